#include "spolia/comm/nccl/nccl_world.h"

#include "spolia/base/error.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/nccl/nccl_backend.h"
#include "spolia/comm/nccl/nccl_engine.h"

namespace spolia {

NcclWorld::NcclWorld(World& host, Device device, NcclOptions options)
    : host_(host), options_(std::move(options)) {
  agree(*host.all(), "NCCL", [&] {
    if (device.kind != DeviceKind::kCuda)
      throw InvalidArgumentError("NCCL moves the memory of CUDA devices, and not of {}", name_of(device));
    const CudaBackend& backend = cuda_backend(device.index);
    const NcclLibrary& library = options_.library != nullptr ? *options_.library : nccl_library();
    engine_ = std::make_shared<NcclEngine>(backend, library);
  });
  const std::vector<int64_t> ranks(host.all()->ranks().begin(), host.all()->ranks().end());
  all_ = create(ranks);
}

NcclWorld::~NcclWorld() = default;

std::shared_ptr<Group> NcclWorld::create(std::span<const int64_t> ranks) {
  std::shared_ptr<Group> control = host_.create(ranks);
  return control ? over(std::move(control)) : nullptr;
}

std::shared_ptr<Group> NcclWorld::over(std::shared_ptr<Group> control) const {
  const milliseconds timeout = control->timeout();
  std::shared_ptr<GroupBackend> end =
      std::make_shared<NcclBackend>(engine_, std::move(control), options_.reduce_in_any_order);
  if (options_.decorate) end = options_.decorate(std::move(end));
  return std::make_shared<Group>(std::move(end), timeout);
}

}  // namespace spolia
