// A group as its communication thread carries it: what has been started, who has arrived, what is under way.
//
// An operation waits its turn, then gathers: its ranks tell each other what they ask for, up a tree and down
// again (an all-to-all: everybody everybody, as each pair has sizes of its own). Nobody's buffer is touched
// until all have arrived and agree; few bytes are there by then, as they have come along (ride.h). Others
// move now, in the steps of schedule.h. Operations of the whole group gather in their order, some may move at
// once, and they land in their order.
//
// What can fail, fails while it gathers, when MPI holds none of its buffers - unless a process dies. When the
// group breaks, operations that move are given a moment to land, as all other ranks move them too.
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
#include <vector>

#include "spolia/base/error.h"
#include "spolia/comm/backend.h"
#include "spolia/comm/mpi/mail.h"
#include "spolia/comm/mpi/message.h"
#include "spolia/comm/mpi/ride.h"
#include "spolia/comm/mpi/schedule.h"
#include "spolia/comm/threads/bell.h"

namespace spolia {

/// What a rank has started, shared by its own thread and the communication thread.
struct MpiOperation {
  enum class Stage { kPending, kLanded, kFailed };

  Collective collective;
  ChannelName channel;
  int64_t number = 0;  // in the channel
  std::atomic<Stage> stage{Stage::kPending};
  ErrorKind error = ErrorKind::kPeerFailed;  // these two: of kFailed, constant from then on
  std::string reason;
};

/// What both threads know of a group. Thread-safe.
class GroupFace {
 public:
  GroupFace(std::vector<int64_t> ranks, int place) : ranks_(std::move(ranks)), place_(place) {}

  const std::vector<int64_t>& ranks() const { return ranks_; }
  int place() const { return place_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  Bell& bell() { return bell_; }

  /// Breaks it, unless it is broken; whether it was whole.
  bool break_with(Broken broken);
  /// The first reason; its reason is empty where the group is whole.
  Broken broken() const;
  /// The error of an operation in the broken group.
  std::pair<ErrorKind, std::string> error_of(const MpiOperation& operation) const;
  /// "operation 3 of the group [0, 1, 4]", "transfer 2 in the group [0, 1, 4]".
  std::string title(const MpiOperation& operation) const;

 private:
  const std::vector<int64_t> ranks_;
  const int place_;
  Bell bell_;
  mutable std::mutex mutex_;
  Broken broken_;
};

/// Used by the communication thread.
class MpiGroup {
 public:
  /// Tags that a group takes for itself.
  static constexpr int kTags = 8;

  MpiGroup(Mail& mail, int64_t id, std::shared_ptr<GroupFace> face)
      : mail_(mail), id_(id), face_(std::move(face)) {}

  const GroupFace& face() const { return *face_; }

  void start(std::shared_ptr<MpiOperation> operation);
  /// The deadline of a wait has passed: fails the operation, naming who has not arrived, unless all have.
  void give_up(const std::shared_ptr<MpiOperation>& operation);
  /// Breaks it here and tells the others; the face may know already.
  void break_group(const Broken& broken);

  /// Does what can be done now; whether that was anything.
  bool progress(Deadline now);
  bool is_idle() const;
  /// Whether an operation's bytes are under way.
  bool is_moving() const;

  void on_broken(const Broken& broken);
  void on_question(int rank, const Question& question);
  void on_answer(int rank, const Answer& answer);
  /// What this rank has started of a channel that `asker`, a rank, takes part in too.
  int64_t started(ChannelName channel, int asker) const;

 private:
  /// A rank that an operation needs: its place, and which side of a channel between two it is.
  struct Participant {
    int place = 0;
    int side = 0;
  };
  /// The operations of one channel that this rank has started, by its side of it.
  struct Key {
    ChannelName channel;
    int side = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  /// Finds out where the others are.
  struct Inquiry {
    Deadline next;                // when to ask the next time
    Deadline::duration interval;  // and how long after that
    Deadline asked;
    std::map<int, Answer> answers;  // since `asked`, by place
    std::map<int, Deadline> silent_since;
    bool gives_up = false;
  };

  struct Flight {
    enum class Stage { kQueued, kGathering, kMoving, kDone };
    std::shared_ptr<MpiOperation> operation;
    Stage stage = Stage::kQueued;
    // While it gathers:
    std::vector<Expected> arrivals;  // of those that have not come
    bool waits_for_go = false;
    std::optional<Ride> ride;       // where its bytes ride
    std::vector<std::byte> result;  // what all get of these
    Inquiry inquiry;
    // While it moves:
    Schedule schedule;
    std::deque<std::pair<Transport::Request, bool>> under_way;  // and whether it receives
    std::function<void()> then;
    std::optional<Deadline> give_up_at;  // in a broken group
    bool is_abandoned = false;           // its receives are cancelled
  };
  struct Queue {
    int64_t started = 0;
    std::deque<Flight> flights;
  };

  Key key_of(const MpiOperation& operation) const;
  bool advance(const Key& key, Queue& queue, Deadline now);
  bool advance(const Key& key, Flight& flight, Deadline now);
  void begin_gathering(const Key& key, Flight& flight, Deadline now);
  bool gather(const Key& key, Flight& flight);
  void meet(Flight& flight, int place, const std::vector<std::byte>& message);
  void begin_moving(Flight& flight);
  bool move(const Key& key, Flight& flight, Deadline now);
  bool drop_done(Flight& flight);
  void abandon(Flight& flight, Deadline now);
  void land(Queue& queue);
  void fail(Flight& flight);
  void fail_with(Flight& flight, ErrorKind error, const std::string& reason);
  void fail_pending(Deadline now);

  std::vector<Participant> others(const Key& key) const;
  bool inquire(const Key& key, Flight& flight, Deadline now);
  void ask(const Key& key, Flight& flight, Deadline now);
  void expire(const Key& key, Flight& flight);
  void heed(Flight& flight, int place, const Answer& answer);
  std::vector<std::string> missing(const Key& key, const Flight& flight) const;

  void tell(int place, const ControlMessage& message);
  void send(int place, int tag, const GroupMessage& message);
  int rank(int place) const { return static_cast<int>(face_->ranks()[static_cast<size_t>(place)]); }
  int place_of(int rank) const;
  int tag(int kind) const { return static_cast<int>(id_) * kTags + kind; }

  Mail& mail_;
  const int64_t id_;
  const std::shared_ptr<GroupFace> face_;
  std::map<Key, Queue> queues_;
  bool has_failed_pending_ = false;
  bool others_know_ = false;  // that it is broken
};

}  // namespace spolia
