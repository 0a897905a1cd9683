// Groups whose ranks are processes: one rank's end.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "spolia/comm/mpi/mpi_engine.h"

namespace spolia {

/// Leaves the group when it goes, unless an exception takes it along: then MpiJob::run() breaks the group and
/// says why.
class MpiBackend final : public GroupBackend {
 public:
  MpiBackend(std::shared_ptr<MpiEngine> engine, int64_t id, std::vector<int64_t> ranks);
  ~MpiBackend() override;
  MpiBackend(const MpiBackend&) = delete;
  MpiBackend& operator=(const MpiBackend&) = delete;

  std::string_view name() const override { return "mpi"; }
  std::span<const int64_t> ranks() const override { return face_->ranks(); }
  int place() const override { return face_->place(); }
  bool reaches(Device device) const override { return device.kind == DeviceKind::kCpu; }
  std::unique_ptr<Work> start(const Collective& collective) override;
  void break_group(const std::string& reason) override;
  std::string broken() const override { return face_->broken().reason; }

 private:
  friend class MpiWork;

  const std::shared_ptr<MpiEngine> engine_;
  const int64_t id_;
  const std::shared_ptr<GroupFace> face_;
  std::map<std::pair<ChannelName, bool>, int64_t> started_;  // by channel, and whether as its receiver
};

}  // namespace spolia
