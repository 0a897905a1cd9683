// The checkpoints of a run: a folder of them, the newest named by a file, old ones deleted.
//
//   ROOT/step-00000100/        a checkpoint, whole
//   ROOT/step-00000200/
//   ROOT/latest                "step-00000200", replaced in one step when that folder is whole and durable
//
// What a save that crashed left beside them (`step-00000300.partial-4711`) is cleared by the next.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/save.h"

namespace spolia {

/// Thread-safe: a save may go on in the background while another thread loads. One job at a time saves into a
/// root; any number may load from it.
class Checkpoints {
 public:
  /// `keep`: so many of the newest stay after a save; 0: all. What `latest` names stays in any case, and what
  /// is being loaded, by any process of this host, or of another that has not said that it is done.
  explicit Checkpoints(std::filesystem::path root, size_t keep = 0,
                       std::shared_ptr<Store> store = posix_store());

  /// Saves as save() does, under the step's name, then sets `latest`, then deletes old ones. Collective over
  /// the group. `step` >= 0. Makes the root where it is not there. InvalidArgumentError where the step is
  /// there and options.existing is to refuse that.
  Report save(Group& group, const StateDict& state, int64_t step, const SaveOptions& options = {});

  /// Loads as load() does; without `step` what `latest` names. Collective over the world. NotFoundError where
  /// there is no such checkpoint, naming those that there are.
  Report load(World& world, StateDict& state, std::optional<int64_t> step = std::nullopt,
              const LoadOptions& options = {});

  /// The steps of which there is a checkpoint, rising.
  std::vector<int64_t> steps() const;
  /// The step that `latest` names; where there is no such file, the highest step, which was saved before it
  /// could be named. Nothing where there are no checkpoints. CorruptError where the file names something
  /// else.
  std::optional<int64_t> latest() const;

  const std::filesystem::path& root() const { return root_; }
  std::filesystem::path folder_of(int64_t step) const;

 private:
  void clear_leftovers();
  void set_latest(int64_t step);
  void delete_old(std::vector<std::string>& notes);
  bool is_being_loaded(const std::string& name) const;

  std::filesystem::path root_;
  size_t keep_;
  std::shared_ptr<Store> store_;
};

}  // namespace spolia
