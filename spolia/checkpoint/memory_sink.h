// The sink that puts tiles into memory: targets that are whole tensors, each a view.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "spolia/engine/executor.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// Dense memory that the host reaches is read into directly.
class MemorySink final : public TileSink {
 public:
  /// One view a target tensor, of its dtype and shape.
  explicit MemorySink(std::vector<View> views);

  std::optional<std::span<std::byte>> memory_of(std::span<const TileRegion> regions) override;
  void put(size_t worker, std::span<const TileRegion> regions, std::span<std::byte> bytes) override;

  /// Returns when a target is complete, or nobody fills it any more.
  void wait_for(size_t target);
  /// Nobody fills the targets any more.
  void give_up();

 private:
  void note(size_t target, int64_t bytes);

  std::vector<View> views_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> left_;  // bytes, of each target
  bool given_up_ = false;
};

}  // namespace spolia
