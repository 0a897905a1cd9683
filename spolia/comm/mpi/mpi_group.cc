#include "spolia/comm/mpi/mpi_group.h"

#include <algorithm>
#include <utility>

#include <fmt/ranges.h>

#include "spolia/comm/mpi/tree.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Stage = MpiOperation::Stage;

/// Operations of the whole group that move at once. Each has a tag of its own.
constexpr int64_t kMoving = 4;
// Kinds of tags.
constexpr int kGatherTag = 0, kMoveTag = 1, kSenderTag = kMoveTag + kMoving, kReceiverTag = kSenderTag + 1,
              kTransferTag = kReceiverTag + 1;
static_assert(kTransferTag < MpiGroup::kTags);

/// When others are asked where they are: after so long, then twice as long each time.
constexpr milliseconds kFirstQuestion{100};
constexpr seconds kLastInterval{5};
/// Communication threads answer whatever their rank computes: after so long without an answer something is
/// wrong with the process. The first is for what has to fail in any case.
constexpr seconds kAnswerTime{1}, kSilence{60};
/// What moves in a broken group is given so long to land, and MPI so long to let go of what does not.
constexpr seconds kMercy{1}, kLetGo{1};

}  // namespace

bool GroupFace::break_with(Broken broken) {
  {
    std::lock_guard lock(mutex_);
    if (!broken_.reason.empty()) return false;
    broken_ = std::move(broken);
  }
  bell_.ring();
  return true;
}

Broken GroupFace::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

std::string GroupFace::title(const MpiOperation& operation) const {
  return fmt::format("{} {} of the group {}", operation.channel.is_all() ? "operation" : "transfer",
                     operation.number, list_text(ranks_));
}

std::pair<ErrorKind, std::string> GroupFace::error_of(const MpiOperation& operation) const {
  const Broken why = broken();
  if (why.is_mismatch && why.channel == operation.channel && why.number == operation.number)
    return {ErrorKind::kMismatch, why.reason};
  return {ErrorKind::kPeerFailed, fmt::format("{}: {}", title(operation), why.reason)};
}

MpiGroup::Key MpiGroup::key_of(const MpiOperation& operation) const {
  return {operation.channel, operation.collective.kind == CollectiveKind::kReceive ? 1 : 0};
}

int MpiGroup::place_of(int rank) const {
  const auto& ranks = face_->ranks();
  return static_cast<int>(std::ranges::lower_bound(ranks, rank) - ranks.begin());
}

void MpiGroup::send(int place, int message_tag, const GroupMessage& message) {
  mail_.send(Transport::Lane::kGroups, rank(place), message_tag, packed(message));
}

void MpiGroup::start(std::shared_ptr<MpiOperation> operation) {
  Queue& queue = queues_[key_of(*operation)];
  queue.started = operation->number + 1;
  Flight& flight = queue.flights.emplace_back();
  flight.operation = std::move(operation);
  if (!face_->broken().reason.empty()) fail(flight);
  land(queue);
}

bool MpiGroup::is_idle() const {
  return std::ranges::all_of(queues_, [](const auto& item) { return item.second.flights.empty(); });
}

bool MpiGroup::is_moving() const {
  return std::ranges::any_of(queues_, [](const auto& item) {
    return std::ranges::any_of(item.second.flights,
                               [](const Flight& flight) { return flight.stage == Flight::Stage::kMoving; });
  });
}

bool MpiGroup::progress(Deadline now) {
  bool did = false;
  try {
    for (auto& [key, queue] : queues_) did = advance(key, queue, now) || did;
  } catch (const Error& error) {
    break_group({.reason = fmt::format("rank {}: {}", rank(face_->place()), error.what())});
  }
  if (!has_failed_pending_ && !face_->broken().reason.empty()) fail_pending(now);
  return did;
}

bool MpiGroup::advance(const Key& key, Queue& queue, Deadline now) {
  bool did = false;
  int64_t ahead = 0;
  for (Flight& flight : queue.flights) {
    if (flight.stage == Flight::Stage::kQueued) {
      // Whose turn it is: transfers move one after the other.
      if (ahead >= (key.channel.is_all() ? kMoving : 1)) break;
      begin_gathering(key, flight, now);
      did = true;
    }
    did = advance(key, flight, now) || did;
    if (flight.stage == Flight::Stage::kGathering) break;
    ++ahead;
  }
  land(queue);
  return did;
}

bool MpiGroup::advance(const Key& key, Flight& flight, Deadline now) {
  bool did = false;
  if (flight.stage == Flight::Stage::kGathering) {
    did = gather(key, flight);
    if (flight.stage == Flight::Stage::kGathering) did = inquire(key, flight, now) || did;
  }
  if (flight.stage == Flight::Stage::kMoving) {
    did = move(key, flight, now) || did;
    if (flight.stage == Flight::Stage::kMoving && flight.inquiry.gives_up)
      did = inquire(key, flight, now) || did;
  }
  return did;
}

void MpiGroup::begin_gathering(const Key& key, Flight& flight, Deadline now) {
  flight.stage = Flight::Stage::kGathering;
  flight.inquiry.next = now + kFirstQuestion;
  flight.inquiry.interval = 2 * kFirstQuestion;
  flight.inquiry.asked = now;
  const MpiOperation& operation = *flight.operation;
  const Arrival own{.number = operation.number, .collective = operation.collective};
  const size_t most = most_message_bytes(face_->ranks().size());
  if (!key.channel.is_all()) {
    const int other = key.side == 0 ? key.channel.to : key.channel.from;
    flight.arrivals.push_back(
        mail_.expect(rank(other), tag(key.side == 0 ? kReceiverTag : kSenderTag), most));
    send(other, tag(key.side == 0 ? kSenderTag : kReceiverTag), own);
    return;
  }
  const bool pairwise = operation.collective.kind == CollectiveKind::kAllToAll;
  if (pairwise) {
    for (const Participant& other : others(key)) {
      flight.arrivals.push_back(mail_.expect(rank(other.place), tag(kGatherTag), most));
      send(other.place, tag(kGatherTag), own);
    }
  } else {
    if (rides(operation.collective, face_->size()))
      flight.ride.emplace(operation.collective, face_->place(), face_->size());
    for (int child : children_of(face_->place(), face_->size()))
      flight.arrivals.push_back(mail_.expect(rank(child), tag(kGatherTag), most));
  }
}

/// Takes what has come; goes on once all has.
bool MpiGroup::gather(const Key& key, Flight& flight) {
  bool did = false;
  for (size_t i = 0; i < flight.arrivals.size();) {
    const int place = place_of(flight.arrivals[i].from);
    const auto message = mail_.take(flight.arrivals[i]);
    if (!message) {
      ++i;
      continue;
    }
    flight.arrivals.erase(flight.arrivals.begin() + static_cast<std::ptrdiff_t>(i));
    meet(flight, place, *message);
    did = true;
    if (flight.stage != Flight::Stage::kGathering) return true;  // it has failed
  }
  if (!flight.arrivals.empty()) return did;
  const MpiOperation& operation = *flight.operation;
  const bool in_tree = key.channel.is_all() && operation.collective.kind != CollectiveKind::kAllToAll;
  const int place = face_->place();
  if (in_tree && place != 0 && !flight.waits_for_go) {
    flight.waits_for_go = true;
    const int parent = parent_of(place);
    flight.arrivals.push_back(
        mail_.expect(rank(parent), tag(kGatherTag), most_message_bytes(face_->ranks().size())));
    Arrival arrival{.number = operation.number, .collective = operation.collective};
    if (flight.ride) arrival.riding = flight.ride->gathered();
    send(parent, tag(kGatherTag), arrival);
    return true;
  }
  if (in_tree) {
    if (flight.ride && place == 0) flight.result = flight.ride->result();
    for (int child : children_of(place, face_->size()))
      send(child, tag(kGatherTag), Go{.number = operation.number, .riding = flight.result});
  }
  if (flight.ride) {
    flight.ride->land(flight.result);
    flight.stage = Flight::Stage::kDone;
  } else {
    begin_moving(flight);
  }
  return true;
}

/// What another rank says about an operation: that all agree, or what it asks for.
void MpiGroup::meet(Flight& flight, int place, const std::vector<std::byte>& message) {
  const MpiOperation& operation = *flight.operation;
  GroupMessage met = unpack_group_message(message);
  if (Go* go = std::get_if<Go>(&met)) {
    flight.result = std::move(go->riding);
    return;
  }
  const Arrival& arrival = std::get<Arrival>(met);
  const auto reason = disagreement(arrival.collective, place, operation.collective, face_->place(),
                                   std::span<const int64_t>(face_->ranks()));
  if (!reason) {
    if (flight.ride) flight.ride->add(place, arrival.riding);
    return;
  }
  break_group({.is_mismatch = true,
               .channel = operation.channel,
               .number = operation.number,
               .reason = fmt::format("{}: {}", face_->title(operation), *reason)});
}

void MpiGroup::begin_moving(Flight& flight) {
  flight.stage = Flight::Stage::kMoving;
  flight.schedule = schedule(flight.operation->collective, face_->place(), face_->size());
}

bool MpiGroup::move(const Key& key, Flight& flight, Deadline now) {
  const int64_t number = flight.operation->number;
  const int move_tag =
      tag(key.channel.is_all() ? kMoveTag + static_cast<int>(number % kMoving) : kTransferTag);
  bool did = false;
  while (true) {
    try {
      did = drop_done(flight) || did;
    } catch (const Error&) {
      abandon(flight, now);
      throw;
    }
    if (!flight.under_way.empty()) break;
    if (flight.is_abandoned) {
      fail(flight);
      return true;
    }
    if (flight.then) std::exchange(flight.then, nullptr)();
    std::optional<Step> step = flight.schedule();
    if (!step) {
      flight.schedule = nullptr;
      flight.stage = Flight::Stage::kDone;
      return true;
    }
    did = true;
    // Receives first: what comes then has a place to go.
    for (const bool sends : {false, true}) {
      for (const Transfer& t : step->transfers) {
        if (t.sends != sends) continue;
        flight.under_way.emplace_back(mail_.start(sends, t.data, t.bytes, rank(t.peer), move_tag), !sends);
      }
    }
    flight.then = std::move(step->then);
  }
  if (flight.give_up_at && now >= *flight.give_up_at) abandon(flight, now);
  return did;
}

/// Forgets the messages at the front that are done, so that a look takes no time that grows with the bytes;
/// MPI goes on with all of them whichever is looked at.
bool MpiGroup::drop_done(Flight& flight) {
  auto at = flight.under_way.begin();
  while (at != flight.under_way.end() && mail_.is_done(at->first)) ++at;
  const bool any = at != flight.under_way.begin();
  flight.under_way.erase(flight.under_way.begin(), at);
  return any;
}

/// Takes back what can be. What is left after some time is between this rank and one that is gone: then
/// nobody writes there any more.
void MpiGroup::abandon(Flight& flight, Deadline now) {
  if (flight.is_abandoned) return flight.under_way.clear();
  flight.is_abandoned = true;
  flight.give_up_at = now + kLetGo;
  for (auto& [request, receives] : flight.under_way) {
    if (receives) mail_.cancel(request);
  }
}

/// Those at the front that are over have landed.
void MpiGroup::land(Queue& queue) {
  bool any = false;
  while (!queue.flights.empty() && queue.flights.front().stage == Flight::Stage::kDone) {
    MpiOperation& operation = *queue.flights.front().operation;
    if (operation.stage.load(std::memory_order_relaxed) == Stage::kPending)
      operation.stage.store(Stage::kLanded, std::memory_order_release);
    queue.flights.pop_front();
    any = true;
  }
  if (any) face_->bell().ring();
}

void MpiGroup::fail(Flight& flight) {
  const auto [error, reason] = face_->error_of(*flight.operation);
  fail_with(flight, error, reason);
}

void MpiGroup::fail_with(Flight& flight, ErrorKind error, const std::string& reason) {
  for (Expected& expected : flight.arrivals) mail_.forget(std::move(expected));
  flight.arrivals.clear();
  flight.stage = Flight::Stage::kDone;
  MpiOperation& operation = *flight.operation;
  operation.error = error;
  operation.reason = reason;
  operation.stage.store(Stage::kFailed, std::memory_order_release);
  face_->bell().ring();
}

/// The group is broken: what gathers fails, what moves is given a moment.
void MpiGroup::fail_pending(Deadline now) {
  has_failed_pending_ = true;
  for (auto& [key, queue] : queues_) {
    for (Flight& flight : queue.flights) {
      if (flight.stage == Flight::Stage::kMoving) {
        flight.give_up_at = now + kMercy;
      } else if (flight.stage != Flight::Stage::kDone) {
        fail(flight);
      }
    }
  }
}

/// Tells another communication thread; a rank that cannot be reached does not hear.
void MpiGroup::tell(int place, const ControlMessage& message) {
  try {
    mail_.send(Transport::Lane::kControl, rank(place), 0, packed(message));
  } catch (const Error&) {
  }
}

void MpiGroup::break_group(const Broken& broken) {
  face_->break_with(broken);
  if (!has_failed_pending_) fail_pending(std::chrono::steady_clock::now());
  if (std::exchange(others_know_, true)) return;
  const ControlMessage news{id_, face_->broken()};
  for (const Participant& other : others({})) tell(other.place, news);
}

void MpiGroup::on_broken(const Broken& broken) {
  // Whoever found it has told everybody.
  others_know_ = true;
  face_->break_with(broken);
  if (!has_failed_pending_) fail_pending(std::chrono::steady_clock::now());
}

/// The ranks that an operation needs, besides this one; of a transfer to itself: the other side.
std::vector<MpiGroup::Participant> MpiGroup::others(const Key& key) const {
  std::vector<Participant> found;
  if (!key.channel.is_all()) {
    found.push_back({key.side == 0 ? key.channel.to : key.channel.from, 1 - key.side});
    return found;
  }
  for (int place = 0; place < face_->size(); ++place) {
    if (place != face_->place()) found.push_back({place, 0});
  }
  return found;
}

int64_t MpiGroup::started(ChannelName channel, int asker) const {
  Key key{channel, 0};
  if (!channel.is_all() && channel.from == place_of(asker)) key.side = 1;
  const auto at = queues_.find(key);
  return at == queues_.end() ? 0 : at->second.started;
}

void MpiGroup::give_up(const std::shared_ptr<MpiOperation>& operation) {
  const Key key = key_of(*operation);
  for (Flight& flight : queues_[key].flights) {
    if (flight.operation != operation || flight.stage == Flight::Stage::kDone) continue;
    flight.inquiry.gives_up = true;
    flight.inquiry.silent_since.clear();
    ask(key, flight, std::chrono::steady_clock::now());
  }
}

/// Asks where the others are, and looks at what they have said; whether it asked.
bool MpiGroup::inquire(const Key& key, Flight& flight, Deadline now) {
  Inquiry& inquiry = flight.inquiry;
  for (const auto& [place, since] : inquiry.silent_since) {
    if (now - since < (inquiry.gives_up ? Deadline::duration(kAnswerTime) : kSilence)) continue;
    expire(key, flight);
    return true;
  }
  if (inquiry.gives_up && flight.stage != Flight::Stage::kMoving && inquiry.silent_since.empty() &&
      !missing(key, flight).empty()) {
    expire(key, flight);
    return true;
  }
  if (now < inquiry.next) return false;
  ask(key, flight, now);
  return true;
}

/// Asks those who have not come; where the operation is about to fail, everybody.
void MpiGroup::ask(const Key& key, Flight& flight, Deadline now) {
  Inquiry& inquiry = flight.inquiry;
  inquiry.next = now + inquiry.interval;
  inquiry.interval = std::min<Deadline::duration>(2 * inquiry.interval, kLastInterval);
  const auto has_come = [&](int place) {
    return std::ranges::none_of(flight.arrivals, [&](const Expected& e) { return e.from == rank(place); });
  };
  for (const Participant& other : others(key)) {
    if (!inquiry.gives_up && has_come(other.place)) continue;
    if (other.place == face_->place()) {
      const auto at = queues_.find({key.channel, other.side});
      heed(flight, other.place, {.started = at == queues_.end() ? 0 : at->second.started});
      continue;
    }
    inquiry.silent_since.try_emplace(other.place, now);
    tell(other.place, {id_, Question{key.channel}});
  }
}

void MpiGroup::on_question(int asker, const Question& question) {
  const Answer answer{question.channel, started(question.channel, asker)};
  tell(place_of(asker), {id_, answer});
}

void MpiGroup::on_answer(int from, const Answer& answer) {
  for (auto& [key, queue] : queues_) {
    if (key.channel != answer.channel) continue;
    for (Flight& flight : queue.flights) heed(flight, place_of(from), answer);
  }
}

void MpiGroup::heed(Flight& flight, int place, const Answer& answer) {
  flight.inquiry.silent_since.erase(place);
  flight.inquiry.answers[place] = answer;
  if (flight.stage != Flight::Stage::kGathering) return;
  if (!answer.has_left || answer.started > flight.operation->number) return;
  break_group({.reason = fmt::format("rank {} has ended, or let go of the group", rank(place))});
}

/// Fails an operation for which ranks have not come in time.
void MpiGroup::expire(const Key& key, Flight& flight) {
  const MpiOperation& operation = *flight.operation;
  const std::string reason =
      fmt::format("{}, {}: timed out; not arrived: {}",
                  describe(operation.collective, std::span<const int64_t>(face_->ranks())),
                  face_->title(operation), fmt::join(missing(key, flight), ", "));
  if (flight.stage == Flight::Stage::kMoving) {
    abandon(flight, std::chrono::steady_clock::now());
  } else {
    // Whoever hears of the failure finds the group broken.
    face_->break_with({.reason = reason});
    fail_with(flight, ErrorKind::kTimeout, reason);
  }
  break_group({.reason = reason});
}

/// Those that the operation lacks, as far as they have said.
std::vector<std::string> MpiGroup::missing(const Key& key, const Flight& flight) const {
  std::vector<std::string> ranks;
  for (const Participant& other : others(key)) {
    const auto answer = flight.inquiry.answers.find(other.place);
    if (flight.inquiry.silent_since.contains(other.place)) {
      ranks.push_back(fmt::format("rank {} (which does not answer)", rank(other.place)));
    } else if (answer != flight.inquiry.answers.end() && answer->second.started <= flight.operation->number) {
      ranks.push_back(
          fmt::format("rank {} (which has started {} of them)", rank(other.place), answer->second.started));
    }
  }
  return ranks;
}

}  // namespace spolia
