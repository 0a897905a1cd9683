#include "spolia/comm/threads/thread_backend.h"

#include <exception>

namespace spolia {

using Stage = Meeting::Stage;

class ThreadWork final : public Work {
 public:
  ThreadWork(ThreadBackend& backend, Attendance attendance)
      : backend_(backend), attendance_(std::move(attendance)) {}

  bool test() override {
    while (!backend_.has_landed(attendance_)) {
      if (!backend_.help_once()) return false;
    }
    return true;
  }
  void wait(Deadline deadline) override { backend_.wait(attendance_, deadline); }

 private:
  ThreadBackend& backend_;
  const Attendance attendance_;
};

ThreadBackend::~ThreadBackend() {
  if (std::uncaught_exceptions() == 0) group_->leave(place_);
}

std::unique_ptr<Work> ThreadBackend::start_in_runs(const Collective& collective, const Runs& runs) {
  Attendance attendance = group_->join(place_, collective, runs);
  InFlight& in_flight = in_flight_[{attendance.channel, attendance.participant}];
  if (in_flight.operations.empty()) in_flight.first = attendance.number;
  in_flight.operations.push_back(attendance);
  return std::make_unique<ThreadWork>(*this, std::move(attendance));
}

/// Whether this operation and those before it in its channel have landed. Throws where it failed.
bool ThreadBackend::has_landed(const Attendance& attendance) {
  if (attendance.meeting->stage.load(std::memory_order_acquire) == Stage::kFailed)
    group_->rethrow(attendance);
  InFlight& in_flight = in_flight_[{attendance.channel, attendance.participant}];
  while (!in_flight.operations.empty()) {
    const Meeting& first = *in_flight.operations.front().meeting;
    if (first.stage.load(std::memory_order_acquire) != Stage::kLanded) break;
    in_flight.operations.pop_front();
    ++in_flight.first;
  }
  return attendance.number < in_flight.first;
}

/// Carries out a piece of what this rank has started, the oldest of each channel first.
bool ThreadBackend::help_once() {
  for (const auto& [key, in_flight] : in_flight_) {
    for (const Attendance& attendance : in_flight.operations) {
      // Operations gather in their order: nothing after this one moves.
      if (attendance.meeting->stage.load(std::memory_order_acquire) == Stage::kGathering) break;
      if (group_->help(attendance)) return true;
    }
  }
  return false;
}

void ThreadBackend::wait(const Attendance& attendance, Deadline deadline) {
  Bell& bell = group_->bell(place_);
  while (true) {
    const uint32_t rings = bell.rings();
    if (has_landed(attendance)) return;
    if (help_once()) continue;
    const bool gathers = attendance.meeting->stage.load(std::memory_order_acquire) == Stage::kGathering;
    if (gathers && std::chrono::steady_clock::now() >= deadline) {
      group_->give_up(attendance);
      continue;
    }
    // What moves will land: others are at the last pieces.
    bell.wait(rings, gathers ? deadline : Deadline::max());
  }
}

}  // namespace spolia
