// Ranks that each have a CUDA device: their groups move its memory by NCCL.
//
//   launch(8, [](World& host) {
//     NcclWorld world(host, {DeviceKind::kCuda, static_cast<int>(host.rank())});
//     world.all()->broadcast(view_on_the_device, 0, event).wait();
//   });
#pragma once

#include <memory>
#include <span>

#include "spolia/comm/nccl/nccl_library.h"
#include "spolia/comm/world.h"

namespace spolia {

struct NcclOptions {
  /// Instead of what libnccl gives: for tests. Outlives the world and its groups.
  const NcclLibrary* library = nullptr;
  /// Sums, minima and maxima of floats by NCCL alone: faster, in an order that is NCCL's own. Their bits then
  /// are not those of other backends, and equal on all ranks only as far as NCCL makes them so.
  bool reduce_in_any_order = false;
  Decorator decorate;
};

/// The same ranks as another world, by which they meet. Used as a World is; groups may outlive it. Nothing of
/// NCCL happens before the first operation that needs it.
///
/// Each rank starts the operations of all groups of a world in one order, also where threads share them: the
/// device is told them in that order, and takes no more where ranks differ. What runs beside, say a save in
/// the background, has a world of its own.
class NcclWorld final : public World {
 public:
  /// Collective over `host`, whose groups reach the host's memory and which outlives this. Each rank has a
  /// device of its own. UnsupportedError on every rank, naming the one and what is not there, where CUDA, the
  /// device or NCCL is missing on any; InvalidArgumentError for a device that is not CUDA's.
  NcclWorld(World& host, Device device, NcclOptions options = {});
  ~NcclWorld() override;

  const std::shared_ptr<Group>& all() const override { return all_; }
  std::span<const int64_t> hosts() const override { return host_.hosts(); }
  /// Has the time-out of the host's groups.
  std::shared_ptr<Group> create(std::span<const int64_t> ranks) override;

 private:
  std::shared_ptr<Group> over(std::shared_ptr<Group> control) const;

  World& host_;
  const NcclOptions options_;
  std::shared_ptr<class NcclEngine> engine_;
  std::shared_ptr<Group> all_;
};

}  // namespace spolia
