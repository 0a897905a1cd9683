// A folder that appears under its name only when it is whole, in the place of an older one where that is
// wanted.
//
// It is filled under another name beside its place, `NAME.partial-PID`. The order on disk, each step durable
// before the next: its files, its own list of names, its appearing under NAME, the parent's list of names.
// Only then is the older one removed. Whatever stops a program leaves one of the two whole under NAME, and at
// most folders whose names say what they are.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/store/output_folder.h"
#include "spolia/store/store.h"

namespace spolia {

/// What happens where the name is taken. Only a checkpoint's folder, or an empty one, is ever replaced.
enum class Existing {
  kRefuse,
  kExchange,  // the old one and the new one change names in one step, or nothing is done
  /// For file systems that cannot exchange names: the old one is renamed to `NAME.old-PID`, then the new one
  /// to NAME. In between, and after a crash in between, nothing lies under NAME.
  kReplaceInTwoSteps,
};

/// Used by one thread. The store outlives it.
class StagedFolder {
 public:
  /// Creates the partial folder. InvalidArgumentError where `folder` ends in no name of its own, where its
  /// parent is not there, or where it is there itself and may not be replaced: by `existing`, or because it
  /// is a link, no folder, or holds more than a checkpoint. UnsupportedError where an exchange will be needed
  /// and is more than the file system can do.
  StagedFolder(Store& store, const std::filesystem::path& folder, Existing existing = Existing::kRefuse);
  /// Removes the partial folder, unless it was published.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  /// Where its files lie until it is published.
  const std::filesystem::path& path() const { return partial_; }
  /// Its files. They lie directly in it.
  OutputFolder& files() { return *files_; }

  /// Makes the folder appear under its name; to be called once. Files that are open still are synced first,
  /// one after the other; files().sync() does that on many threads. With `durable` false nothing waits for
  /// the disk: a crash soon after may leave damaged files, and not the old ones either. Where this throws,
  /// what was there before is there still.
  void publish(bool durable = true);

  /// Sentences for the user once it is published: what lies beside the folder, left by killed runs or by this
  /// one, that can be removed.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void note_leftovers();
  std::filesystem::path free_name(std::string_view kind) const;
  void check_exchange();
  void put_in_place();
  void replace_in_two_steps();
  void take_back();
  void remove_old();
  void remove_partial() noexcept;

  Store& store_;
  Existing existing_;
  std::filesystem::path final_, parent_, partial_;
  std::optional<OutputFolder> files_;
  std::vector<std::string> notes_;
  std::optional<std::filesystem::path> old_;  // where the one that was replaced lies
  bool in_place_ = false;                     // what lies at partial_ is not ours to remove
};

/// InvalidArgumentError where `destination` lies inside the folder `source`, or `source` inside a folder
/// `destination`: a source is only read.
void refuse_inside(const Store& store, const std::filesystem::path& source,
                   const std::filesystem::path& destination);

}  // namespace spolia
