#include "spolia/comm/nccl/nccl_backend.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

/// What moves when its group breaks moves on all ranks, and mostly lands: it has this long.
constexpr seconds kGrace{1};
/// A device that is still at it so long after its communicator was aborted is stuck.
constexpr seconds kStuck{5};
/// What a communicator may take to be taken down.
constexpr seconds kTakeDown{1};
/// Thread blocks of a transfer between two ranks: several are under way at once and have to fit on a device.
constexpr int kTransferBlocks = 4;

bool is_all(const std::tuple<int, int, bool>& name) { return std::get<0>(name) < 0; }

[[noreturn]] void rethrow(ErrorKind kind, const std::string& reason) {
  if (kind == ErrorKind::kMismatch) throw MismatchError("{}", reason);
  if (kind == ErrorKind::kTimeout) throw TimeoutError("{}", reason);
  if (kind == ErrorKind::kIo) throw IoError("{}", reason);
  throw PeerFailedError("{}", reason);
}

/// What the ranks of a communicator are told of it, as an operation of the host's.
Collective id_message(NcclUniqueId& id, CollectiveKind kind, int peer, bool sends) {
  Collective message;
  message.kind = kind;
  message.peer = peer;
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(id.bytes));
  if (sends) {
    message.send = bytes;
  } else {
    message.receive = bytes;
  }
  return message;
}

/// Where nobody waits for it any more: it lands, or it fails.
void end_of(std::unique_ptr<Work> work) {
  const Deadline deadline = steady_clock::now() + kTakeDown;
  try {
    while (!work->test()) {
      if (steady_clock::now() < deadline) {
        std::this_thread::sleep_for(milliseconds(1));
        continue;
      }
      (void)work.release();  // its memory may still be written: it is never given back
      return;
    }
  } catch (const Error&) {
  }
}

}  // namespace

class NcclWork final : public Work {
 public:
  NcclWork(NcclBackend& backend, std::shared_ptr<NcclOperation> operation)
      : backend_(backend), operation_(std::move(operation)) {}

  bool test() override { return backend_.test(*operation_); }
  void wait(Deadline deadline) override { backend_.wait(*operation_, deadline); }

 private:
  NcclBackend& backend_;
  const std::shared_ptr<NcclOperation> operation_;
};

NcclBackend::NcclBackend(std::shared_ptr<NcclEngine> engine, std::shared_ptr<Group> control, bool any_order)
    : engine_(std::move(engine)), control_(std::move(control)), any_order_(any_order) {
  const std::lock_guard lock(engine_->mutex());
  engine_->add(*this);
}

NcclBackend::~NcclBackend() {
  std::unique_lock lock(engine_->mutex());
  engine_->remove(*this);
  const bool whole = pending_ == 0 && broken_.empty() && std::uncaught_exceptions() == 0;
  lock.unlock();  // the engine does not know of it any more
  try {
    const CudaBackend::Current current(engine_->device());
    for (auto& [name, lane] : lanes_) {
      if (lane.telling) end_of(std::move(lane.telling));
      if (lane.end.comm == nullptr) continue;
      const NcclLibrary& library = engine_->library();
      int result = kNcclInProgress;
      if (whole && lane.state == State::kConnected) {
        result = library.finalize(lane.end.comm);
        const Deadline deadline = steady_clock::now() + kTakeDown;
        while (result == kNcclInProgress && steady_clock::now() < deadline) {
          if (library.get_async_error(lane.end.comm, &result) != kNcclSuccess) break;
          if (result == kNcclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
      }
      if (result == kNcclSuccess) {
        library.destroy(lane.end.comm);
      } else {
        library.abort(lane.end.comm);
      }
    }
  } catch (...) {  // the device is lost, and all that is on it
  }
}

std::string NcclBackend::title(const NcclOperation& operation) const {
  const std::string_view what = is_between_two(operation.collective.kind) ? "transfer" : "operation";
  return fmt::format("{} {} of the group {}", what, operation.called, list_text(ranks()));
}

std::shared_ptr<NcclScratch> NcclBackend::scratch_for(const Collective& collective) {
  const int64_t slot = scratch_slot(collective, control_->size(), any_order_);
  if (slot == 0) return nullptr;
  if (!scratch_ || scratch_->slot < slot)
    scratch_ = std::make_shared<NcclScratch>(engine_->device(), control_->size(), slot);
  return scratch_;
}

NcclLane& NcclBackend::lane_of(const Collective& collective) {
  LaneName name{-1, -1, false};
  if (collective.kind == CollectiveKind::kSend) name = {place(), collective.peer, false};
  if (collective.kind == CollectiveKind::kReceive) name = {collective.peer, place(), true};
  NcclLane& lane = lanes_[name];
  if (!lane.stream) {
    lane.stream = std::make_unique<CudaStream>(engine_->device());
    lane.end = {.library = &engine_->library(),
                .rank = is_all(name)        ? place()
                        : std::get<2>(name) ? 1
                                            : 0,
                .ranks = is_all(name) ? control_->size() : 2,
                .stream = lane.stream.get()};
  }
  if (needs_communicator(collective) && !lane.id) lane.id = std::make_shared<NcclUniqueId>();
  return lane;
}

bool NcclBackend::needs_communicator(const Collective& collective) const {
  return collective.kind != CollectiveKind::kBarrier && !collective.meets_only &&
         !(is_between_two(collective.kind) && collective.peer == place());
}

/// The first rank of a communicator makes its id, and tells it the others, right behind its first operation.
void NcclBackend::tell_id(NcclLane& lane, const LaneName& name) {
  const auto& [from, to, receives] = name;
  if (lane.end.rank == 0) check_nccl(lane.end, engine_->library().get_unique_id(lane.id.get()), "make an id");
  const Collective message =
      is_all(name) ? id_message(*lane.id, CollectiveKind::kBroadcast, 0, lane.end.rank == 0)
                   : id_message(*lane.id, receives ? CollectiveKind::kReceive : CollectiveKind::kSend,
                                receives ? from : to, !receives);
  lane.telling = control_->backend().start(message);
  lane.state = State::kTelling;
}

std::unique_ptr<Work> NcclBackend::start(const Collective& collective) {
  auto operation = std::make_shared<NcclOperation>();
  operation->collective = collective;
  operation->backend = this;
  operation->scratch = scratch_for(collective);
  const std::lock_guard lock(engine_->mutex());
  NcclLane& lane = lane_of(collective);
  operation->lane = &lane;
  operation->number = lane.started;
  operation->called = lane.started + (lane.state == State::kNone ? 0 : 1);
  Collective met = collective;
  met.meets_only = true;
  operation->meeting = control_->backend().start(met);  // throws where the group is broken
  ++lane.started;
  lane.operations.push_back(operation);
  ++pending_;
  if (!is_between_two(collective.kind)) engine_->queue(operation);
  engine_->wake();
  if (lane.id && lane.state == State::kNone) {
    const auto name =
        std::ranges::find_if(lanes_, [&](const auto& item) { return &item.second == &lane; })->first;
    try {
      tell_id(lane, name);
    } catch (const Error& error) {  // told by the wait
      report(error);
    }
  }
  return std::make_unique<NcclWork>(*this, std::move(operation));
}

void NcclBackend::break_group(const std::string& reason) {
  const std::lock_guard lock(engine_->mutex());
  control_->backend().break_group(reason);
  break_with(reason, steady_clock::now() + kGrace);
}

std::string NcclBackend::broken() const {
  const std::lock_guard lock(engine_->mutex());
  const std::string reason = control_->backend().broken();
  return reason.empty() ? broken_ : reason;
}

bool NcclBackend::test(const NcclOperation& operation) {
  {
    const std::lock_guard lock(engine_->mutex());
    if (operation.stage == Stage::kFailed) rethrow(operation.error, operation.reason);
    if (operation.stage == Stage::kLanded) return true;
  }
  std::this_thread::yield();  // the engine is at it
  return false;
}

void NcclBackend::wait(NcclOperation& operation, Deadline deadline) {
  std::unique_lock lock(engine_->mutex());
  while (!operation.is_over()) {
    const Deadline now = steady_clock::now();
    if (now >= deadline) {
      deadline = give_up(operation, now);
    } else if (deadline == Deadline::max()) {
      engine_->landed().wait(lock);
    } else {
      engine_->landed().wait_until(lock, deadline);
    }
  }
  if (operation.stage == Stage::kFailed) rethrow(operation.error, operation.reason);
}

/// After the deadline. How long to wait yet.
Deadline NcclBackend::give_up(NcclOperation& operation, Deadline now) {
  if (operation.stage == Stage::kMeeting) {
    try {
      operation.meeting->wait(now);
      return now + kGrace;  // all have arrived after all
    } catch (const Error& error) {
      report(error);
      fail(operation, error.kind(), error.what());
    }
    return Deadline::max();
  }
  if (now < operation.met + kGrace) return operation.met + kGrace;
  operation.is_late = true;
  const std::string reason =
      fmt::format("{}, {}: timed out; all ranks have arrived, and NCCL is not done with it",
                  describe(operation.collective, ranks()), title(operation));
  control_->backend().break_group(reason);
  break_with(reason, now);
  engine_->wake();
  return Deadline::max();  // fails when it is aborted
}

/// The first reason is kept.
void NcclBackend::break_with(const std::string& reason, Deadline abort_at) {
  if (broken_.empty()) {
    broken_ = reason;
    abort_at_ = abort_at;
  }
  abort_at_ = std::min(abort_at_, abort_at);
  engine_->wake();
}

/// An error of this rank breaks the group; one that the host group met has done so.
void NcclBackend::report(const Error& error) {
  const std::string reason = control_->backend().broken();
  if (!reason.empty()) return break_with(reason, steady_clock::now() + kGrace);
  const std::string own = fmt::format("rank {}: {}", ranks()[static_cast<size_t>(place())], error.what());
  control_->backend().break_group(own);
  break_with(own, steady_clock::now() + kGrace);
}

void NcclBackend::fail(NcclOperation& operation, ErrorKind error, const std::string& reason) {
  operation.stage = Stage::kFailed;
  operation.error = operation.is_late ? ErrorKind::kTimeout : error;
  operation.reason = reason;
}

/// Who has arrived.
bool NcclBackend::meet(NcclLane& lane) {
  // Operations meet in their order, except where they fail.
  const auto has_met = [](const auto& operation) { return operation->stage != Stage::kMeeting; };
  const auto first =
      broken_.empty() ? std::ranges::partition_point(lane.operations, has_met) : lane.operations.begin();
  bool changed = false;
  for (auto at = first; at != lane.operations.end(); ++at) {
    NcclOperation& operation = **at;
    if (operation.stage != Stage::kMeeting) continue;
    try {
      if (!operation.meeting->test()) break;
      operation.stage = Stage::kMet;
      operation.met = steady_clock::now();
    } catch (const Error& error) {
      fail(operation, error.kind(), error.what());
      report(error);
    }
    changed = true;
  }
  return changed;
}

bool NcclBackend::connect(NcclLane& lane) {
  if (lane.state == State::kTelling) {
    if (!lane.telling->test()) return false;
    lane.telling.reset();
    NcclConfig config;
    if (lane.operations.front()->collective.kind == CollectiveKind::kSend ||
        lane.operations.front()->collective.kind == CollectiveKind::kReceive) {
      config.max_ctas = kTransferBlocks;
    }
    const int result =
        engine_->library().init(&lane.end.comm, lane.end.ranks, *lane.id, lane.end.rank, &config);
    check_nccl(lane.end, result, "connect the ranks");
    lane.state = State::kConnecting;
    return true;
  }
  if (lane.state != State::kConnecting || !is_ready(lane)) return false;
  lane.state = State::kConnected;
  return true;
}

/// Whether the communicator takes the next step. Throws what has happened to it meanwhile.
bool NcclBackend::is_ready(const NcclLane& lane) const {
  if (lane.end.comm == nullptr) return true;
  int result = kNcclSuccess;
  check_nccl(lane.end, engine_->library().get_async_error(lane.end.comm, &result), "tell its state");
  check_nccl(lane.end, result, "go on");
  return result == kNcclSuccess;
}

/// What this rank sends where it receives from itself.
const NcclOperation* NcclBackend::sent_to_self(const NcclOperation& receive) {
  const NcclLane& lane = lanes_.at({place(), place(), false});
  return lane.operations.at(static_cast<size_t>(receive.number - lane.landed())).get();
}

NcclSteps NcclBackend::steps_of(NcclOperation& operation) {
  const Collective& collective = operation.collective;
  NcclLane& lane = *operation.lane;
  if (collective.meets_only) return {};
  NcclSteps steps;
  const auto wait_for = [&](DeviceEvent event) {
    if (event.handle != nullptr) steps.push_back([&lane, event] { lane.stream->wait_for(event); });
  };
  wait_for(collective.after);
  NcclSteps moves;
  if (!is_between_two(collective.kind)) {
    moves = nccl_steps(collective, lane.end, any_order_, operation.scratch);
  } else if (collective.peer != place()) {
    moves = nccl_transfer_steps(collective, lane.end);
  } else {
    const Collective& sent = sent_to_self(operation)->collective;
    wait_for(sent.after);
    moves = {[&collective, &lane, from = sent.send] {
      lane.stream->copy(collective.receive.data(), from.data(), std::ssize(from));
    }};
  }
  if (moves.empty()) return {};
  steps.insert(steps.end(), moves.begin(), moves.end());
  return steps;
}

/// Tells the communicator what it takes now; true where it needs no more telling.
bool NcclBackend::issue(NcclOperation& operation) {
  NcclLane& lane = *operation.lane;
  if (is_aborted_) return operation.is_over();
  try {
    if (operation.stage == Stage::kMet) {
      // Not one that needs none: others may wait for it before they come to what connects the lane.
      if (needs_communicator(operation.collective) && lane.state != State::kConnected) return false;
      operation.steps = steps_of(operation);
      operation.stage = Stage::kIssuing;
    }
    if (operation.stage != Stage::kIssuing) return operation.stage != Stage::kMeeting;
    if (!operation.steps.empty()) {
      while (true) {
        if (!is_ready(lane)) return false;
        if (operation.issued == operation.steps.size()) break;
        operation.steps[operation.issued++]();
      }
      operation.done.emplace(engine_->device());
      operation.done->record(*lane.stream);
    }
    operation.stage = Stage::kMoving;
  } catch (const Error& error) {
    // What has been told already is over when the communicator is aborted: wind_up() fails it then.
    operation.error = error.kind();
    operation.reason = fmt::format("{}: {}", title(operation), error.what());
    report(error);
    abort_at_ = steady_clock::now();
    return false;
  }
  return true;
}

bool NcclBackend::issue_transfers() {
  if (pending_ == 0) return false;
  bool changed = false;
  for (auto& [name, lane] : lanes_) {
    if (is_all(name) || (std::get<0>(name) == std::get<1>(name) && !std::get<2>(name))) continue;
    for (const std::shared_ptr<NcclOperation>& operation : lane.operations) {
      if (operation->stage == Stage::kMoving || operation->is_over()) continue;
      if (!issue(*operation)) break;
      changed = true;
    }
  }
  return changed;
}

bool NcclBackend::has_landed(NcclOperation& operation) {
  if (operation.collective.kind == CollectiveKind::kSend && operation.collective.peer == place()) {
    const auto receiver = lanes_.find({place(), place(), true});
    return operation.stage != Stage::kMeeting && receiver != lanes_.end() &&
           receiver->second.landed() > operation.number;
  }
  return operation.stage == Stage::kMoving && (!operation.done || operation.done->has_happened());
}

/// In the order of the lane.
bool NcclBackend::land(NcclLane& lane) {
  bool changed = false;
  while (!lane.operations.empty()) {
    NcclOperation& first = *lane.operations.front();
    if (!first.is_over()) {
      if (is_aborted_ || !has_landed(first)) break;
      first.stage = Stage::kLanded;
      first.steps.clear();
      first.scratch.reset();
    }
    lane.operations.pop_front();
    --pending_;
    changed = true;
  }
  return changed;
}

void NcclBackend::abort_lane(NcclLane& lane) {
  if (lane.end.comm != nullptr) engine_->library().abort(lane.end.comm);
  lane.end.comm = nullptr;
  lane.state = State::kGone;
}

/// In a broken group: what has not landed in time is aborted, and fails when nothing touches its memory any
/// more. What gathers fails by itself.
bool NcclBackend::wind_up() {
  const Deadline now = steady_clock::now();
  if (now < abort_at_) return false;
  if (!is_aborted_) {
    is_aborted_ = true;
    give_up_at_ = now + kStuck;
    for (auto& [name, lane] : lanes_) abort_lane(lane);
  }
  bool changed = false;
  for (auto& [name, lane] : lanes_) {
    for (const std::shared_ptr<NcclOperation>& operation : lane.operations) {
      if (operation->is_over() || operation->stage == Stage::kMeeting) continue;
      bool quiet = false;
      try {
        if (operation->stage == Stage::kIssuing && operation->issued > 0 && !operation->done) {
          operation->done.emplace(engine_->device());
          operation->done->record(*lane.stream);
        }
        quiet = !operation->done || operation->done->has_happened();
      } catch (const Error&) {  // the device is lost
        quiet = true;
      }
      if (!quiet && now < give_up_at_) continue;
      if (!quiet) new std::shared_ptr(operation);  // the device may touch what it holds: never given back
      const std::string reason = !operation->reason.empty() ? operation->reason
                                 : operation->is_late       ? broken_
                                                      : fmt::format("{}: {}", title(*operation), broken_);
      fail(*operation, operation->error, reason);
      changed = true;
    }
  }
  return changed;
}

/// One look at everything that is under way.
bool NcclBackend::look() {
  if (pending_ == 0) return false;
  bool changed = false;
  if (broken_.empty()) {
    const std::string reason = control_->backend().broken();
    if (!reason.empty()) break_with(reason, steady_clock::now() + kGrace);
  }
  for (auto& [name, lane] : lanes_) {
    changed |= meet(lane);
    try {
      if (!lane.operations.empty() && !is_aborted_) {
        changed |= connect(lane);
        if (lane.operations.front()->stage == Stage::kMoving) is_ready(lane);
      }
      changed |= land(lane);
    } catch (const Error& error) {
      report(error);
      abort_at_ = steady_clock::now();  // nothing that moves will land
    }
  }
  if (!broken_.empty()) {
    changed |= wind_up();
    for (auto& [name, lane] : lanes_) changed |= land(lane);
  }
  return changed;
}

}  // namespace spolia
