// Groups whose ranks move the memory of CUDA devices by NCCL: one rank's end.
//
// An operation meets first: a host group of the same ranks compares what they ask for, tells who is missing
// and keeps the time-out. Only when all have arrived and agree is a communicator told to do it. A transfer
// between two ranks has a communicator and a stream of its own for each direction, because NCCL holds a
// stream up until the other side takes part: ranks that each send before they receive would wait for each
// other else.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "spolia/base/error.h"
#include "spolia/comm/group.h"
#include "spolia/comm/nccl/nccl_engine.h"
#include "spolia/comm/nccl/nccl_steps.h"

namespace spolia {

struct NcclLane;

/// One operation of this rank.
struct NcclOperation {
  enum class Stage {
    kMeeting,  // ranks are missing
    kMet,      // all have arrived and agree
    kIssuing,  // the communicator is told its steps
    kMoving,   // the device is at it
    kLanded,
    kFailed,
  };

  Collective collective;
  NcclBackend* backend = nullptr;
  NcclLane* lane = nullptr;
  int64_t number = 0;  // in its lane
  int64_t called = 0;  // in messages: as the host group numbers it, which has told an id in between
  Stage stage = Stage::kMeeting;
  std::unique_ptr<Work> meeting;
  Deadline met;
  NcclSteps steps;
  size_t issued = 0;
  std::shared_ptr<NcclScratch> scratch;
  std::optional<CudaEvent> done;
  bool is_late = false;
  ErrorKind error = ErrorKind::kPeerFailed;  // of kFailed
  std::string reason;

  bool is_over() const { return stage == Stage::kLanded || stage == Stage::kFailed; }
};

/// Operations that the same ranks number together, their communicator, which is made when the first operation
/// needs it, and their stream.
struct NcclLane {
  enum class State { kNone, kTelling, kConnecting, kConnected, kGone };

  State state = State::kNone;
  std::shared_ptr<NcclUniqueId> id;
  std::unique_ptr<Work> telling;  // the id to the others
  NcclEnd end;
  std::unique_ptr<CudaStream> stream;
  std::deque<std::shared_ptr<NcclOperation>> operations;  // not landed yet
  int64_t started = 0;
  int64_t landed() const { return started - std::ssize(operations); }
};

/// Leaves the group when it goes, as the host group does.
class NcclBackend final : public GroupBackend {
 public:
  /// `control`: a host group of the same ranks, used by nothing else. `any_order`: nccl_reduces().
  NcclBackend(std::shared_ptr<NcclEngine> engine, std::shared_ptr<Group> control, bool any_order);
  ~NcclBackend() override;
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  std::string_view name() const override { return "nccl"; }
  std::span<const int64_t> ranks() const override { return control_->ranks(); }
  int place() const override { return control_->place(); }
  bool reaches(Device device) const override { return device == this->device(); }
  Device device() const override { return engine_->device().device(); }
  std::unique_ptr<Work> start(const Collective& collective) override;
  void break_group(const std::string& reason) override;
  std::string broken() const override;

 private:
  friend class NcclEngine;
  friend class NcclWork;
  using Stage = NcclOperation::Stage;
  using State = NcclLane::State;
  /// From, to, and whether it is the receiver's: places. (-1, -1, false): of all ranks.
  using LaneName = std::tuple<int, int, bool>;

  // By the rank's thread:
  std::shared_ptr<NcclScratch> scratch_for(const Collective& collective);
  bool test(const NcclOperation& operation);
  void wait(NcclOperation& operation, Deadline deadline);
  Deadline give_up(NcclOperation& operation, Deadline now);

  // By the engine's, under its mutex:
  bool is_busy() const { return pending_ > 0; }
  bool look();
  bool issue(NcclOperation& operation);
  bool issue_transfers();

  // Both, under the mutex:
  NcclLane& lane_of(const Collective& collective);
  bool needs_communicator(const Collective& collective) const;
  void tell_id(NcclLane& lane, const LaneName& name);
  bool meet(NcclLane& lane);
  bool connect(NcclLane& lane);
  bool is_ready(const NcclLane& lane) const;
  NcclSteps steps_of(NcclOperation& operation);
  const NcclOperation* sent_to_self(const NcclOperation& receive);
  bool has_landed(NcclOperation& operation);
  bool land(NcclLane& lane);
  void fail(NcclOperation& operation, ErrorKind error, const std::string& reason);
  void break_with(const std::string& reason, Deadline abort_at);
  void report(const Error& error);
  bool wind_up();
  void abort_lane(NcclLane& lane);
  std::string title(const NcclOperation& operation) const;

  const std::shared_ptr<NcclEngine> engine_;
  const std::shared_ptr<Group> control_;
  const bool any_order_;
  std::map<LaneName, NcclLane> lanes_;
  std::shared_ptr<NcclScratch> scratch_;  // the largest so far; by the rank's thread
  int64_t pending_ = 0;
  std::string broken_;              // empty: it is not, as far as is known here
  Deadline abort_at_, give_up_at_;  // of a broken one: when what moves is aborted, and when it is forgotten
  bool is_aborted_ = false;
};

}  // namespace spolia
