#include "spolia/comm/decorators.h"

#include <random>
#include <thread>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using std::chrono::microseconds;

class LoggingBackend final : public ForwardingBackend {
 public:
  LoggingBackend(std::shared_ptr<GroupBackend> inner, OperationLog& log)
      : ForwardingBackend(std::move(inner)), log_(log) {}

 private:
  std::unique_ptr<Work> pass(const Collective& collective, const Start& start) override {
    log_.add(rank(), fmt::format("{} {}", list_text(ranks()), describe(collective, ranks())));
    return start();
  }

  OperationLog& log_;
};

class DelayingBackend final : public ForwardingBackend {
 public:
  DelayingBackend(std::shared_ptr<GroupBackend> inner, microseconds least, microseconds most, uint64_t seed)
      : ForwardingBackend(std::move(inner)), delay_(least.count(), most.count()) {
    std::seed_seq seeds = {seed, static_cast<uint64_t>(rank()), static_cast<uint64_t>(ranks().size())};
    random_.seed(seeds);
  }

 private:
  std::unique_ptr<Work> pass(const Collective&, const Start& start) override {
    std::this_thread::sleep_for(microseconds(delay_(random_)));
    return start();
  }

  std::mt19937_64 random_;
  std::uniform_int_distribution<int64_t> delay_;
};

/// The work of an operation that nobody else hears of.
class LostWork final : public Work {
 public:
  LostWork(GroupBackend& group, std::string what) : group_(group), what_(std::move(what)) {}

  bool test() override {
    const std::string reason = group_.broken();
    if (!reason.empty()) throw PeerFailedError("{}: {}", what_, reason);
    return false;
  }
  void wait(Deadline deadline) override {
    while (!test()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        group_.break_group(what_ + ": timed out");
        throw TimeoutError("{}: timed out", what_);
      }
      std::this_thread::sleep_for(microseconds(500));
    }
  }

 private:
  GroupBackend& group_;
  const std::string what_;
};

class DroppingBackend final : public ForwardingBackend {
 public:
  DroppingBackend(std::shared_ptr<GroupBackend> inner, int64_t number)
      : ForwardingBackend(std::move(inner)), number_(number) {}

 private:
  std::unique_ptr<Work> pass(const Collective& collective, const Start& start) override {
    const int64_t number = started_++;
    if (number != number_) return start();
    return std::make_unique<LostWork>(
        inner(), fmt::format("{}, operation {} of the group {}, dropped by rank {}",
                             describe(collective, ranks()), number, list_text(ranks()), rank()));
  }

  const int64_t number_;
  int64_t started_ = 0;
};

class DyingBackend final : public ForwardingBackend {
 public:
  DyingBackend(std::shared_ptr<GroupBackend> inner, int64_t number)
      : ForwardingBackend(std::move(inner)), number_(number) {}

 private:
  std::unique_ptr<Work> pass(const Collective&, const Start& start) override {
    const int64_t number = started_++;
    if (number < number_) return start();
    throw IoError("rank {} dies at operation {} of the group {}, as it was told to", rank(), number,
                  list_text(ranks()));
  }

  const int64_t number_;
  int64_t started_ = 0;
};

}  // namespace

void OperationLog::add(int64_t rank, std::string line) {
  std::lock_guard lock(mutex_);
  lines_[rank].push_back(std::move(line));
}

std::vector<std::string> OperationLog::lines(int64_t rank) const {
  std::lock_guard lock(mutex_);
  const auto at = lines_.find(rank);
  return at == lines_.end() ? std::vector<std::string>() : at->second;
}

Decorator where(std::function<bool(const GroupBackend& backend)> which, Decorator decorate) {
  return [which = std::move(which), decorate = std::move(decorate)](std::shared_ptr<GroupBackend> backend) {
    return which(*backend) ? decorate(std::move(backend)) : backend;
  };
}

Decorator on_rank(int64_t rank, Decorator decorate) {
  const auto is_on = [rank](const GroupBackend& backend) {
    return backend.ranks()[static_cast<size_t>(backend.place())] == rank;
  };
  return where(is_on, std::move(decorate));
}

Decorator chain(std::vector<Decorator> decorators) {
  return [decorators = std::move(decorators)](std::shared_ptr<GroupBackend> backend) {
    for (auto decorate = decorators.rbegin(); decorate != decorators.rend(); ++decorate) {
      backend = (*decorate)(std::move(backend));
    }
    return backend;
  };
}

Decorator logging(OperationLog& log) {
  return [&log](std::shared_ptr<GroupBackend> backend) {
    return std::make_shared<LoggingBackend>(std::move(backend), log);
  };
}

Decorator costing(microseconds cost) { return delaying(cost, cost); }

Decorator delaying(microseconds least, microseconds most, uint64_t seed) {
  return [=](std::shared_ptr<GroupBackend> backend) {
    return std::make_shared<DelayingBackend>(std::move(backend), least, most, seed);
  };
}

Decorator dropping(int64_t number) {
  return [number](std::shared_ptr<GroupBackend> backend) {
    return std::make_shared<DroppingBackend>(std::move(backend), number);
  };
}

Decorator dying(int64_t number) {
  return [number](std::shared_ptr<GroupBackend> backend) {
    return std::make_shared<DyingBackend>(std::move(backend), number);
  };
}

}  // namespace spolia
