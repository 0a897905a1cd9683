// A folder that appears under its name only when it is whole.
//
// It is filled under another name beside its place, `NAME.partial-PID`, and renamed at the end. The order on
// disk, each step durable before the next: its files, its own list of names, the rename, the parent's list of
// names. Whatever stops a program before the rename leaves at most a folder whose name says that it is
// partial.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "spolia/store/store.h"

namespace spolia {

/// Used by one thread. The store outlives it.
class StagedFolder {
 public:
  /// Creates the partial folder. InvalidArgumentError where `folder` is there already or its parent is not.
  StagedFolder(Store& store, const std::filesystem::path& folder);
  /// Removes the partial folder, unless it was published.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  /// A new file in the folder.
  std::unique_ptr<OutputFile> create(const std::string& name);

  /// Makes the folder appear under its name. Precondition: its files are synced.
  void publish();

  /// Partial folders of the same name that earlier, killed runs left behind.
  const std::vector<std::string>& leftovers() const { return leftovers_; }

 private:
  Store& store_;
  std::filesystem::path final_;
  std::filesystem::path partial_;
  std::vector<std::string> leftovers_;
  bool published_ = false;
};

/// InvalidArgumentError where `destination` lies inside the folder `source`: a source is only read.
void refuse_inside(const Store& store, const std::filesystem::path& source,
                   const std::filesystem::path& destination);

}  // namespace spolia
