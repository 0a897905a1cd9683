// Saving while the job goes on: the state is copied, and the copy is saved by a thread of its own.
//
//   BackgroundSaver saver(world);
//   Checkpoints checkpoints("run");
//   ...
//   saver.start(state, [&](Group& group, const StateDict& copy) { return checkpoints.save(group, copy, step);
//   });
//   // the state may be changed now
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "spolia/base/report.h"
#include "spolia/comm/world.h"
#include "spolia/device/buffer.h"
#include "spolia/state/state_dict.h"

namespace spolia {

/// Memory for copies of states, kept between saves: one aligned block, as large as the largest state so far.
class SnapshotPool {
 public:
  /// A copy of the state whose tensors lie in the pool, dense, in the host's memory. The one before is gone.
  /// On so many threads.
  StateDict copy(const StateDict& state, size_t threads);

  int64_t bytes() const { return memory_.size(); }

 private:
  Buffer memory_;
};

/// One rank's end. Used by one thread, its rank's.
class BackgroundSaver {
 public:
  /// What a second save does while one is under way, on any rank.
  enum class WhenBusy : uint8_t { kWait, kRefuse };
  struct Options {
    WhenBusy when_busy = WhenBusy::kWait;
    size_t copy_threads = 1;
  };
  /// Saves the copy; runs on the saver's thread, in a group of all ranks that is its own.
  using Save = std::function<Report(Group& group, const StateDict& copy)>;
  /// Called on the saver's thread when a save has ended: with its report, or with what it threw. What it
  /// throws itself is the save's failure, if that had none.
  using Callback = std::function<void(const Report& report, std::exception_ptr failure)>;

  /// Makes two groups of all ranks. Collective over the world, which outlives the saver.
  explicit BackgroundSaver(World& world, Options options);
  explicit BackgroundSaver(World& world) : BackgroundSaver(world, Options()) {}
  /// Waits for a save under way. Its failure is lost, if nobody has waited for it.
  ~BackgroundSaver();
  BackgroundSaver(const BackgroundSaver&) = delete;
  BackgroundSaver& operator=(const BackgroundSaver&) = delete;

  /// Copies the state and returns; the state may be changed from then on. Collective over the world. Where
  /// the save before has failed on any rank, its error is thrown now, on all, and nothing is started. With
  /// kRefuse, InvalidArgumentError on all ranks where one of them is still saving.
  void start(const StateDict& state, Save save, Callback callback = {});

  /// Whether no save is under way on this rank.
  bool done() const;
  /// Waits for the last save and gives its report; throws its failure, once. TimeoutError where it takes
  /// longer, and goes on. Nothing where there was no save since the last report.
  std::optional<Report> wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

 private:
  void run();

  const Options options_;
  std::shared_ptr<Group> caller_group_, saver_group_;
  SnapshotPool pool_;
  StateDict copy_;
  Save save_;
  Callback callback_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  bool ends_ = false;
  std::optional<Report> report_;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace spolia
