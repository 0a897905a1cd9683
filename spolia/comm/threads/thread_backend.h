// Groups whose ranks are threads of one process.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "spolia/comm/backend.h"
#include "spolia/comm/threads/thread_group.h"

namespace spolia {

/// One rank's end. Leaves the group when it goes, unless an exception takes it along: then launch() breaks
/// the group and says why.
class ThreadBackend final : public GroupBackend {
 public:
  ThreadBackend(std::shared_ptr<ThreadGroup> group, int place) : group_(std::move(group)), place_(place) {}
  ~ThreadBackend() override;
  ThreadBackend(const ThreadBackend&) = delete;
  ThreadBackend& operator=(const ThreadBackend&) = delete;

  std::string_view name() const override { return "threads"; }
  std::span<const int64_t> ranks() const override { return group_->ranks(); }
  int place() const override { return place_; }
  bool reaches(Device device) const override { return device.kind == DeviceKind::kCpu; }
  std::unique_ptr<Work> start(const Collective& collective) override { return start_in_runs(collective, {}); }
  bool takes_runs() const override { return true; }
  std::unique_ptr<Work> start_in_runs(const Collective& collective, const Runs& runs) override;
  void break_group(const std::string& reason) override { group_->break_group(reason); }
  std::string broken() const override { return group_->broken(); }

 private:
  friend class ThreadWork;
  /// What this rank has started in a channel and has not seen landed: the operation `first`, and those after
  /// it.
  struct InFlight {
    int64_t first = 0;
    std::deque<Attendance> operations;
  };
  bool has_landed(const Attendance& attendance);
  bool help_once();
  void wait(const Attendance& attendance, Deadline deadline);

  const std::shared_ptr<ThreadGroup> group_;
  const int place_;
  std::map<std::pair<Channel*, size_t>, InFlight> in_flight_;  // by channel and participant
};

}  // namespace spolia
