// The seam behind which groups are carried out: threads, MPI, NCCL, and decorators around any of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/comm/collective.h"

namespace spolia {

using Deadline = std::chrono::steady_clock::time_point;

/// Rows of `bytes` bytes; each begins `pitch` bytes after the one before it.
struct Run {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int64_t rows = 1;
  int64_t pitch = 0;
};
/// Bytes that lie in several places, row by row, one run after the other.
using Runs = std::vector<Run>;

/// A started operation. Used by whoever uses its group.
class Work {
 public:
  /// Precondition: test() has returned true or wait() has returned, or one of them has thrown.
  virtual ~Work() = default;
  /// Whether it has landed: this rank's buffers are its own again. Helps the group's operations along. Throws
  /// as wait() does, but never for being late.
  virtual bool test() = 0;
  /// Returns once it has landed. TimeoutError at the deadline, naming operation, group, number and the ranks
  /// that have not arrived; MismatchError where ranks asked for different things; PeerFailedError where one
  /// of them died or broke the group. After any of these the group is broken.
  virtual void wait(Deadline deadline) = 0;
};

/// One rank's end of a group. Used by one thread at a time.
class GroupBackend {
 public:
  virtual ~GroupBackend() = default;

  /// "threads", "mpi", "nccl".
  virtual std::string_view name() const = 0;
  /// The group's ranks of the world, rising.
  virtual std::span<const int64_t> ranks() const = 0;
  /// This rank's place among them.
  virtual int place() const = 0;

  /// Whether it moves the memory of this device.
  virtual bool reaches(Device device) const = 0;
  /// A device whose memory it moves: where to put what this group is to move.
  virtual Device device() const { return {}; }

  /// Starts the next operation. Its buffers are the operation's until it has landed. MismatchError where
  /// others have found already that this operation does not suit theirs; PeerFailedError where the group is
  /// broken. Precondition: it passes check() (collective.h), and the device is reached.
  virtual std::unique_ptr<Work> start(const Collective& collective) = 0;

  /// Whether start_in_runs() is there.
  virtual bool takes_runs() const { return false; }
  /// start() of a broadcast, send or receive whose bytes lie in runs on this rank, none of them empty. The
  /// collective's buffer is as long as they are together, and stands for them: only its size is looked at.
  /// How the bytes lie is each rank's own affair. Precondition: takes_runs().
  virtual std::unique_ptr<Work> start_in_runs(const Collective&, const Runs&) { return nullptr; }

  /// Breaks the group on all ranks that can be reached: what is pending and what comes after fails, with this
  /// reason.
  virtual void break_group(const std::string& reason) = 0;
  /// Why the group is broken; empty where it is not.
  virtual std::string broken() const = 0;
};

}  // namespace spolia
