#include "spolia/comm/mpi/mpi_engine.h"

#include <algorithm>
#include <exception>
#include <future>
#include <limits>
#include <utility>

#include "spolia/base/error.h"

namespace spolia {
namespace {

using std::chrono::microseconds;

/// Rounds without anything to do, after which the thread rests. MPI moves a long message in its calls, many
/// of them, without saying so: then there are more. And how long it rests: who may arrive is looked at often,
/// other ranks' questions need not be.
constexpr int kBusyRounds = 200, kMovingRounds = 20000;
constexpr microseconds kShortRest{20}, kLongRest{1000}, kIdleRest{5000};

/// How long messages may take to leave in the end.
constexpr std::chrono::seconds kLastWords{2};

/// Groups that were left and are remembered, for questions about them.
constexpr size_t kPastGroups = 1024;

}  // namespace

MpiEngine::MpiEngine(std::function<Transport*()> open) {
  const auto opened = std::make_shared<std::promise<void>>();
  std::future<void> is_open = opened->get_future();
  thread_ = std::thread([this, opened, open = std::move(open)] {
    try {
      transport_ = open();
      rank_ = transport_->rank();
      size_ = transport_->size();
      hosts_.assign(transport_->hosts(), transport_->hosts() + size_);
      most_groups_ = (int64_t{transport_->greatest_tag()} + 1) / MpiGroup::kTags;
      mail_ = std::make_unique<Mail>(*transport_);
    } catch (...) {
      return opened->set_exception(std::current_exception());
    }
    opened->set_value();
    loop();
    transport_->close(ends_together_);
  });
  try {
    is_open.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

MpiEngine::~MpiEngine() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  woken_.notify_one();
  thread_.join();
  delete transport_;
}

void MpiEngine::post(Job job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    has_jobs_ = true;
  }
  woken_.notify_one();
}

std::shared_ptr<GroupFace> MpiEngine::make_group(int64_t id, std::vector<int64_t> ranks) {
  const auto place = static_cast<int>(std::ranges::lower_bound(ranks, rank_) - ranks.begin());
  auto face = std::make_shared<GroupFace>(std::move(ranks), place);
  post([this, id, face] {
    MpiGroup& group = groups_.try_emplace(id, *mail_, id, face).first->second;
    greatest_id_ = std::max(greatest_id_, id);
    if (const auto early = early_.extract(id)) group.on_broken(early.mapped());
  });
  return face;
}

/// Does something with a group on the thread, unless this rank has left it.
void MpiEngine::with_group(int64_t id, std::function<void(MpiGroup& group)> body) {
  post([this, id, body = std::move(body)] {
    if (const auto at = groups_.find(id); at != groups_.end()) body(at->second);
  });
}

void MpiEngine::start(int64_t group, std::shared_ptr<MpiOperation> operation) {
  with_group(group, [operation = std::move(operation)](MpiGroup& g) { g.start(operation); });
}

void MpiEngine::give_up(int64_t group, std::shared_ptr<MpiOperation> operation) {
  with_group(group, [operation = std::move(operation)](MpiGroup& g) { g.give_up(operation); });
}

void MpiEngine::break_group(int64_t group, Broken broken) {
  with_group(group, [broken = std::move(broken)](MpiGroup& g) { g.break_group(broken); });
}

void MpiEngine::leave(int64_t group) {
  post([this, group] { leave_now(group); });
}

void MpiEngine::leave_now(int64_t group) {
  past_.insert(groups_.extract(group));
  if (past_.size() > kPastGroups) past_.erase(past_.begin());
}

void MpiEngine::break_groups_from(int64_t first_id, const std::string& reason) {
  post([this, first_id, reason] {
    for (auto at = groups_.lower_bound(first_id); at != groups_.end(); ++at)
      at->second.break_group({.reason = reason});
  });
}

void MpiEngine::leave_groups_from(int64_t first_id) {
  post([this, first_id] {
    while (!groups_.empty() && groups_.rbegin()->first >= first_id) leave_now(groups_.rbegin()->first);
  });
}

void MpiEngine::abort(int code) {
  post([this, code] { transport_->abort(code); });
}

void MpiEngine::loop() {
  int idle_rounds = 0;
  while (true) {
    bool did = do_jobs();
    did = progress() || did;
    did = hear() || did;
    idle_rounds = did ? 0 : std::min(idle_rounds, 2 * kMovingRounds) + 1;
    if (!did) rest(idle_rounds);
    if (stops_ && has_said_all()) return;
  }
}

/// Whether nothing is left to do or to tell; a rank that is gone does not hear the last words.
bool MpiEngine::has_said_all() {
  const Deadline now = std::chrono::steady_clock::now();
  if (!stopped_) stopped_ = now;
  return !has_jobs_ && (!mail_->is_sending() || now - *stopped_ > kLastWords);
}

bool MpiEngine::do_jobs() {
  if (!has_jobs_.load(std::memory_order_acquire)) return false;
  std::vector<Job> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs.swap(jobs_);
    has_jobs_ = false;
  }
  for (const Job& job : jobs) job();
  return !jobs.empty();
}

bool MpiEngine::progress() {
  const Deadline now = std::chrono::steady_clock::now();
  bool did = mail_->sweep();
  for (auto& [id, group] : groups_) did = group.progress(now) || did;
  return did;
}

/// Takes what other communication threads say.
bool MpiEngine::hear() {
  bool did = false;
  try {
    while (auto message = mail_->next_control()) {
      obey(message->first, unpack_control_message(message->second));
      did = true;
    }
  } catch (const Error&) {  // a rank that is gone; whoever waits for it finds out
  }
  return did;
}

void MpiEngine::obey(int from, const ControlMessage& message) {
  const auto found = groups_.find(message.group);
  MpiGroup* group = found == groups_.end() ? nullptr : &found->second;
  if (const Broken* broken = std::get_if<Broken>(&message.what)) {
    if (group) return group->on_broken(*broken);
    if (message.group > greatest_id_) early_.emplace(message.group, *broken);
  } else if (const Answer* said = std::get_if<Answer>(&message.what)) {
    if (group) group->on_answer(from, *said);
  } else {
    const Question& question = std::get<Question>(message.what);
    if (group) return group->on_question(from, question);
    Answer answer{.channel = question.channel};
    if (message.group <= greatest_id_) {
      const auto past = past_.find(message.group);
      answer.has_left = true;
      answer.started = past == past_.end() ? std::numeric_limits<int64_t>::max()
                                           : past->second.started(question.channel, from);
    }
    mail_->send(Transport::Lane::kControl, from, 0, packed(ControlMessage{message.group, answer}));
  }
}

bool MpiEngine::is_idle() const {
  if (mail_->is_sending()) return false;
  for (const auto& [id, group] : groups_) {
    if (!group.is_idle()) return false;
  }
  return true;
}

bool MpiEngine::is_moving() const {
  return std::ranges::any_of(groups_, [](const auto& item) { return item.second.is_moving(); });
}

void MpiEngine::rest(int idle_rounds) {
  const bool idle = is_idle();
  const int busy_rounds = is_moving() ? kMovingRounds : kBusyRounds;
  if (!idle && idle_rounds < busy_rounds) return std::this_thread::yield();
  const microseconds longer = std::min(kLongRest, kShortRest * (1 + idle_rounds - busy_rounds));
  std::unique_lock lock(mutex_);
  woken_.wait_for(lock, idle ? kIdleRest : longer, [this] { return has_jobs_ || stops_; });
}

}  // namespace spolia
