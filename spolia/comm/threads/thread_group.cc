#include "spolia/comm/threads/thread_group.h"

#include <algorithm>
#include <numeric>

#include <fmt/ranges.h>

#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using Stage = Meeting::Stage;

/// Operations that write so much or less are carried out by the last that arrives: that is quicker than to
/// wake others for it.
constexpr int64_t kSmallBytes = int64_t{64} << 10;

size_t index(int place) { return static_cast<size_t>(place); }

}  // namespace

ThreadGroup::ThreadGroup(std::vector<int64_t> ranks)
    : ranks_(std::move(ranks)), bells_(ranks_.size()), left_(ranks_.size(), false) {
  all_.participants.resize(ranks_.size());
  std::iota(all_.participants.begin(), all_.participants.end(), 0);
  all_.started.resize(ranks_.size(), 0);
}

Attendance ThreadGroup::join(int place, Collective collective, Runs runs) {
  Attendance attendance;
  {
    std::lock_guard lock(mutex_);
    attendance = seat(place, collective);
    Meeting& meeting = *attendance.meeting;
    meeting.asked[attendance.participant] = std::move(collective);
    if (!runs.empty()) {
      meeting.runs.resize(meeting.asked.size());
      meeting.runs[attendance.participant] = std::move(runs);
    }
    ++meeting.arrived;
    check_agreement(attendance);
    check_presence(attendance);
    if (meeting.arrived < meeting.asked.size()) return attendance;
    begin_moves(attendance);
  }
  const bool small = attendance.meeting->pieces->bytes_written() <= kSmallBytes;
  if (small) {
    while (help(attendance)) {
    }
  }
  if (!small || attendance.meeting->pieces->count() == 0) ring_others(attendance);
  return attendance;
}

bool ThreadGroup::help(const Attendance& attendance) {
  Meeting& meeting = *attendance.meeting;
  if (meeting.stage.load(std::memory_order_acquire) != Stage::kMoving) return false;
  const Pieces::Step step = meeting.pieces->carry_out_one();
  if (step == Pieces::Step::kDoneTheLast) {
    meeting.stage.store(Stage::kLanded, std::memory_order_release);
    ring_others(attendance);
  }
  return step != Pieces::Step::kNothingLeft;
}

void ThreadGroup::rethrow(const Attendance& attendance) const {
  const Meeting& meeting = *attendance.meeting;
  if (meeting.error == ErrorKind::kMismatch) throw MismatchError("{}", meeting.reason);
  throw PeerFailedError("{}: {}", title(attendance), meeting.reason);
}

void ThreadGroup::give_up(const Attendance& attendance) {
  std::lock_guard lock(mutex_);
  const Meeting& meeting = *attendance.meeting;
  if (meeting.stage.load(std::memory_order_relaxed) != Stage::kGathering) return;
  const std::string reason = fmt::format("{}, {}: timed out; not arrived: {}",
                                         describe(meeting.asked[attendance.participant], ranks_),
                                         title(attendance), missing(attendance));
  break_locked(reason);
  throw TimeoutError("{}", reason);
}

void ThreadGroup::break_group(const std::string& reason) {
  std::lock_guard lock(mutex_);
  break_locked(reason);
}

std::string ThreadGroup::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

void ThreadGroup::leave(int place) {
  std::lock_guard lock(mutex_);
  left_[index(place)] = true;
  const auto lacks = [&](const Channel& channel) {
    for (size_t p = 0; p < channel.participants.size(); ++p) {
      const int64_t open_end = channel.first_open + std::ssize(channel.open);
      if (channel.participants[p] == place && channel.started[p] < open_end) return true;
    }
    return false;
  };
  const bool needed =
      lacks(all_) || std::ranges::any_of(between_, [&](const auto& item) { return lacks(item.second); });
  if (needed) break_locked(fmt::format("rank {} has ended, or let go of the group", ranks_[index(place)]));
}

/// The place's next operation of a channel, which exists from now on. Throws where the group is broken.
Attendance ThreadGroup::seat(int place, const Collective& collective) {
  Attendance attendance;
  if (is_between_two(collective.kind)) {
    const bool sends = collective.kind == CollectiveKind::kSend;
    const auto [from, to] = sends ? std::pair(place, collective.peer) : std::pair(collective.peer, place);
    Channel& channel = between_[{from, to}];
    if (channel.participants.empty()) channel = {.participants = {from, to}, .started = {0, 0}};
    attendance = {.channel = &channel, .participant = sends ? size_t{0} : size_t{1}};
  } else {
    attendance = {.channel = &all_, .participant = index(place)};
  }
  Channel& channel = *attendance.channel;
  attendance.number = channel.started[attendance.participant]++;
  const auto ahead = static_cast<size_t>(attendance.number - channel.first_open);
  if (ahead < channel.open.size()) {
    attendance.meeting = channel.open[ahead];
    if (attendance.meeting->stage.load(std::memory_order_relaxed) == Stage::kFailed) rethrow(attendance);
  }
  if (!broken_.empty()) throw PeerFailedError("{}: {}", title(attendance), broken_);
  if (!attendance.meeting) {
    attendance.meeting = std::make_shared<Meeting>(channel.participants.size());
    channel.open.push_back(attendance.meeting);
  }
  return attendance;
}

/// Breaks the group and throws where what this participant asks for does not go with what others do.
void ThreadGroup::check_agreement(const Attendance& attendance) {
  Meeting& meeting = *attendance.meeting;
  const Collective& own = meeting.asked[attendance.participant];
  const Channel& channel = *attendance.channel;
  const std::vector<int>& places = channel.participants;
  for (size_t p = 0; p < meeting.asked.size(); ++p) {
    if (p == attendance.participant || channel.started[p] <= attendance.number) continue;
    const auto reason =
        disagreement(meeting.asked[p], places[p], own, places[attendance.participant], ranks_);
    if (reason) {
      break_locked(fmt::format("{}: {}", title(attendance), *reason), &meeting);
      rethrow(attendance);
    }
    // Only what two ranks of an all-to-all send each other is theirs alone; else, who agrees with one agrees
    // with all.
    if (own.kind != CollectiveKind::kAllToAll) return;
  }
}

/// Breaks the group and throws where a rank that is still needed has left.
void ThreadGroup::check_presence(const Attendance& attendance) {
  const Channel& channel = *attendance.channel;
  for (size_t p = 0; p < channel.participants.size(); ++p) {
    const size_t place = index(channel.participants[p]);
    if (!left_[place] || channel.started[p] > attendance.number) continue;
    break_locked(fmt::format("rank {} has ended, or let go of the group", ranks_[place]));
    rethrow(attendance);
  }
}

/// All have arrived.
void ThreadGroup::begin_moves(const Attendance& attendance) {
  Meeting& meeting = *attendance.meeting;
  const Collective& first = meeting.asked[0];
  meeting.pieces.emplace(moves_of(meeting.asked, meeting.runs), first.dtype, first.op);
  meeting.stage.store(meeting.pieces->count() == 0 ? Stage::kLanded : Stage::kMoving,
                      std::memory_order_release);
  // Operations gather in their order: this is the first that is open.
  attendance.channel->open.pop_front();
  ++attendance.channel->first_open;
}

/// Fails whatever gathers, with the first reason there was.
void ThreadGroup::break_locked(const std::string& reason, Meeting* mismatch) {
  if (!broken_.empty()) return;
  broken_ = reason;
  const auto fail = [&](Channel& channel) {
    for (const std::shared_ptr<Meeting>& meeting : channel.open) {
      if (meeting.get() == mismatch) meeting->error = ErrorKind::kMismatch;
      meeting->reason = reason;
      meeting->stage.store(Stage::kFailed, std::memory_order_release);
    }
  };
  fail(all_);
  for (auto& [pair, channel] : between_) fail(channel);
  for (Bell& bell : bells_) bell.ring();
}

void ThreadGroup::ring_others(const Attendance& attendance) {
  const std::vector<int>& places = attendance.channel->participants;
  for (size_t p = 0; p < places.size(); ++p) {
    if (p != attendance.participant) bell(places[p]).ring();
  }
}

std::string ThreadGroup::title(const Attendance& attendance) const {
  const std::string_view what = attendance.channel == &all_ ? "operation" : "transfer";
  return fmt::format("{} {} of the group {}", what, attendance.number, list_text(ranks_));
}

std::string ThreadGroup::missing(const Attendance& attendance) const {
  const Channel& channel = *attendance.channel;
  std::vector<std::string> ranks;
  for (size_t p = 0; p < channel.participants.size(); ++p) {
    if (channel.started[p] > attendance.number) continue;
    ranks.push_back(fmt::format("rank {} (which has started {} of them)",
                                ranks_[index(channel.participants[p])], channel.started[p]));
  }
  return fmt::format("{}", fmt::join(ranks, ", "));
}

}  // namespace spolia
