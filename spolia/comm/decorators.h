// What can go around every rank's end of every group (LaunchOptions::decorate): logs, costs, delays and
// faults.
//
// Operations are numbered from 0 by each end of each group, those between two ranks too. World::create()
// takes two operations of the group of all ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "spolia/comm/world.h"

namespace spolia {

/// Forwards everything: what other decorators change is all that they say. They meet whatever is started in
/// pass(), however its bytes lie.
class ForwardingBackend : public GroupBackend {
 public:
  explicit ForwardingBackend(std::shared_ptr<GroupBackend> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  std::span<const int64_t> ranks() const override { return inner_->ranks(); }
  int place() const override { return inner_->place(); }
  bool reaches(Device device) const override { return inner_->reaches(device); }
  Device device() const override { return inner_->device(); }
  std::unique_ptr<Work> start(const Collective& collective) final {
    return pass(collective, [&] { return inner_->start(collective); });
  }
  bool takes_runs() const override { return inner_->takes_runs(); }
  std::unique_ptr<Work> start_in_runs(const Collective& collective, const Runs& runs) final {
    return pass(collective, [&] { return inner_->start_in_runs(collective, runs); });
  }
  void break_group(const std::string& reason) override { inner_->break_group(reason); }
  std::string broken() const override { return inner_->broken(); }

 protected:
  /// Starts the operation on the inner backend.
  using Start = std::function<std::unique_ptr<Work>()>;
  virtual std::unique_ptr<Work> pass(const Collective&, const Start& start) { return start(); }

  int64_t rank() const { return ranks()[static_cast<size_t>(place())]; }
  GroupBackend& inner() const { return *inner_; }

 private:
  std::shared_ptr<GroupBackend> inner_;
};

/// What each rank has started, in its order. Thread-safe.
class OperationLog {
 public:
  void add(int64_t rank, std::string line);
  /// Lines "[0, 1, 2] broadcast of 4096 bytes (float32) from rank 2": the group, the operation.
  std::vector<std::string> lines(int64_t rank) const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<std::string>> lines_;
};

/// `decorate` for those ends that `which` picks, nothing for the others.
Decorator where(std::function<bool(const GroupBackend& backend)> which, Decorator decorate);
/// For those of one rank.
Decorator on_rank(int64_t rank, Decorator decorate);
/// The first is outermost: it meets an operation first.
Decorator chain(std::vector<Decorator> decorators);

/// Logs each operation when it is started. `log` outlives the groups.
Decorator logging(OperationLog& log);
/// Each operation costs the rank that starts it this much more, as if the network were slow.
Decorator costing(std::chrono::microseconds cost);
/// Each operation is late by a random time in [least, most], the same for the same seed.
Decorator delaying(std::chrono::microseconds least, std::chrono::microseconds most, uint64_t seed = 0);
/// Operation `number` is lost: the others never hear of it, and here it never lands.
Decorator dropping(int64_t number);
/// The rank dies when it starts operation `number`, or one after it: an IoError.
Decorator dying(int64_t number);

}  // namespace spolia
