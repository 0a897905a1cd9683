// What the threads of a group share: the operations, and where the ranks meet in them.
//
// An operation gathers until all its ranks have arrived and agree; only then anything of it moves. From there
// on it cannot fail: whoever waits for it carries its pieces out, whosever they are, so it needs no other
// rank any more, and ranks may wait for their operations in whatever order they like. What fails, fails while
// it gathers, when no buffer has been touched and none will be.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/comm/threads/bell.h"
#include "spolia/comm/threads/moves.h"

namespace spolia {

/// One operation.
struct Meeting {
  enum class Stage { kGathering, kMoving, kLanded, kFailed };

  explicit Meeting(size_t participants) : asked(participants) {}

  std::atomic<Stage> stage{Stage::kGathering};
  // Under the group's mutex, and constant once the stage is not kGathering:
  std::vector<Collective> asked;  // by participant, of those that have arrived
  std::vector<Runs> runs;         // by participant, if any has runs: see moves_of()
  size_t arrived = 0;
  std::optional<Pieces> pieces;              // from kMoving on
  ErrorKind error = ErrorKind::kPeerFailed;  // of kFailed
  std::string reason;
};

/// The operations that the same ranks number together: those of the whole group, or those from one rank to
/// one other.
struct Channel {
  std::vector<int> participants;  // places in the group; of two: the sender, the receiver
  std::vector<int64_t> started;   // by participant: operations started
  /// Operations that not all participants have started: `first_open` and those after it.
  std::deque<std::shared_ptr<Meeting>> open;
  int64_t first_open = 0;
};

/// Where a rank stands in an operation that it has started.
struct Attendance {
  Channel* channel = nullptr;
  size_t participant = 0;
  int64_t number = 0;
  std::shared_ptr<Meeting> meeting;
};

/// Thread-safe.
class ThreadGroup {
 public:
  explicit ThreadGroup(std::vector<int64_t> ranks);

  std::span<const int64_t> ranks() const { return ranks_; }
  Bell& bell(int place) { return bells_[static_cast<size_t>(place)]; }

  /// Arrives at the place's next operation; GroupBackend::start() says what it throws. A small operation is
  /// carried out by the last to arrive.
  Attendance join(int place, Collective collective, Runs runs);
  /// Carries out a piece of an operation that is moving; false where none is left.
  bool help(const Attendance& attendance);
  /// Throws what an operation has failed with.
  [[noreturn]] void rethrow(const Attendance& attendance) const;
  /// After the deadline: breaks the group and throws a TimeoutError, unless everyone has arrived meanwhile.
  void give_up(const Attendance& attendance);

  void break_group(const std::string& reason);
  std::string broken() const;
  /// The place will start no more operations: those that need it break the group.
  void leave(int place);

 private:
  // All under the mutex.
  Attendance seat(int place, const Collective& collective);
  void check_agreement(const Attendance& attendance);
  void check_presence(const Attendance& attendance);
  void begin_moves(const Attendance& attendance);
  void break_locked(const std::string& reason, Meeting* mismatch = nullptr);

  void ring_others(const Attendance& attendance);
  /// "operation 3 of the group [0, 1, 4]", "transfer 2 in the group [0, 1, 4]".
  std::string title(const Attendance& attendance) const;
  std::string missing(const Attendance& attendance) const;

  const std::vector<int64_t> ranks_;
  std::vector<Bell> bells_;  // by place

  mutable std::mutex mutex_;  // guards what is below, and what gathers
  Channel all_;
  std::map<std::pair<int, int>, Channel> between_;  // from, to
  std::vector<bool> left_;
  std::string broken_;
};

}  // namespace spolia
