// launch(): ranks that are threads, and the world as each of them sees it.
#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/threads/thread_backend.h"
#include "spolia/comm/world.h"

namespace spolia {
namespace {

/// What the ranks of one launch share. Thread-safe.
class Team {
 public:
  Team(int ranks, const LaunchOptions& options) : options_(options) {
    std::vector<int64_t> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), int64_t{0});
    for (int64_t rank : all) hosts_.push_back(options.ranks_per_host > 0 ? rank / options.ranks_per_host : 0);
    world_ = std::make_shared<ThreadGroup>(std::move(all));
    groups_.push_back(world_);
  }

  const LaunchOptions& options() const { return options_; }
  std::span<const int64_t> hosts() const { return hosts_; }
  const std::shared_ptr<ThreadGroup>& world() const { return world_; }

  /// The group that is created as the `number`th; each of its ranks calls this once.
  std::shared_ptr<ThreadGroup> take_group(int64_t number, std::span<const int64_t> ranks) {
    std::lock_guard lock(mutex_);
    Fresh& fresh = fresh_[number];
    if (!fresh.group) {
      fresh.group = std::make_shared<ThreadGroup>(std::vector(ranks.begin(), ranks.end()));
      std::erase_if(groups_, [](const auto& group) { return group.expired(); });
      groups_.push_back(fresh.group);
    }
    std::shared_ptr<ThreadGroup> group = fresh.group;
    if (++fresh.taken == std::ssize(ranks)) fresh_.erase(number);
    return group;
  }

  void break_groups_of(int64_t rank, const std::string& reason) {
    for_each_group_of(rank, [&](ThreadGroup& group, int) { group.break_group(reason); });
  }
  void leave_groups_of(int64_t rank) {
    for_each_group_of(rank, [](ThreadGroup& group, int place) { group.leave(place); });
  }

 private:
  struct Fresh {
    std::shared_ptr<ThreadGroup> group;
    int64_t taken = 0;
  };

  template <class Body>
  void for_each_group_of(int64_t rank, Body body) {
    std::lock_guard lock(mutex_);
    for (const std::weak_ptr<ThreadGroup>& weak : groups_) {
      const std::shared_ptr<ThreadGroup> group = weak.lock();
      if (!group) continue;
      const auto at = std::ranges::lower_bound(group->ranks(), rank);
      if (at != group->ranks().end() && *at == rank)
        body(*group, static_cast<int>(at - group->ranks().begin()));
    }
  }

  const LaunchOptions& options_;
  std::vector<int64_t> hosts_;
  std::shared_ptr<ThreadGroup> world_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<ThreadGroup>> groups_;  // in the order they were made
  std::map<int64_t, Fresh> fresh_;                  // not taken by all of their ranks yet, by number
};

class ThreadWorld final : public World {
 public:
  ThreadWorld(Team& team, int rank) : team_(team), all_(end_of(team.world(), rank)) {}

  const std::shared_ptr<Group>& all() const override { return all_; }
  std::span<const int64_t> hosts() const override { return team_.hosts(); }

  std::shared_ptr<Group> create(std::span<const int64_t> ranks) override {
    check_same_ranks(*all_, ranks);
    const int64_t number = created_++;
    const auto at = std::ranges::lower_bound(ranks, rank());
    if (at == ranks.end() || *at != rank()) return nullptr;
    return end_of(team_.take_group(number, ranks), static_cast<int>(at - ranks.begin()));
  }

 private:
  std::shared_ptr<Group> end_of(std::shared_ptr<ThreadGroup> group, int place) const {
    std::shared_ptr<GroupBackend> end = std::make_shared<ThreadBackend>(std::move(group), place);
    const LaunchOptions& options = team_.options();
    if (options.decorate) end = options.decorate(std::move(end));
    return std::make_shared<Group>(std::move(end), options.timeout);
  }

  Team& team_;
  const std::shared_ptr<Group> all_;
  int64_t created_ = 0;
};

/// Runs one rank; what it threw.
std::exception_ptr run_rank(Team& team, int rank, const std::function<void(World&)>& body) {
  std::exception_ptr error;
  try {
    ThreadWorld world(team, rank);
    try {
      body(world);
    } catch (...) {  // here, while the rank has not left its groups yet
      team.break_groups_of(rank, fmt::format("rank {}: {}", rank, text_of(std::current_exception())));
      throw;
    }
  } catch (...) {
    error = std::current_exception();
  }
  team.leave_groups_of(rank);
  return error;
}

void rethrow_culprit(const std::vector<std::exception_ptr>& errors) {
  std::vector<size_t> failed;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) failed.push_back(rank);
  }
  if (failed.empty()) return;
  const size_t rank = *std::ranges::min_element(failed, {}, [&](size_t r) { return suffering(errors[r]); });
  // What all ranks say alike was agreed on, and names its rank if there is one to name.
  const bool alike =
      failed.size() == errors.size() && std::ranges::all_of(errors, [&](const std::exception_ptr& error) {
        return text_of(error) == text_of(errors[rank]);
      });
  if (alike) std::rethrow_exception(errors[rank]);
  try {
    std::rethrow_exception(errors[rank]);
  } catch (const Error& error) {
    rethrow_with_context(error, fmt::format("rank {}", rank));
  }
}

}  // namespace

void launch(int ranks, const std::function<void(World& world)>& body, const LaunchOptions& options) {
  if (ranks < 1) throw InvalidArgumentError("a launch of {} ranks", ranks);
  Team team(ranks, options);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    try {
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] { errors[static_cast<size_t>(rank)] = run_rank(team, rank, body); });
      }
    } catch (const std::system_error& error) {
      const auto rank = std::ssize(threads);
      team.world()->break_group(fmt::format("rank {} could not be started: {}", rank, error.what()));
      threads.clear();
      throw IoError("rank {} of {} could not be started: {}", rank, ranks, error.what());
    }
  }
  rethrow_culprit(errors);
}

}  // namespace spolia
