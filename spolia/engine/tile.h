// Tiles in memory: which boxes of which target chunks lie where in a thread's buffer.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "spolia/layout/box_index.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/state/catalog.h"

namespace spolia {

/// For each tensor of a catalog, the index of its chunks, made when first asked for. Thread-safe.
class ChunkIndices {
 public:
  /// The catalog outlives the object.
  explicit ChunkIndices(const Catalog& catalog);
  /// The chunks of a tensor that overlap `box`, in rising order.
  std::vector<uint32_t> overlapping(size_t tensor, const Box& box);

 private:
  struct Slot {
    std::once_flag once;
    std::optional<BoxIndex> index;
  };
  const Catalog& catalog_;
  std::map<size_t, Slot> indices_;  // by tensor, for those of several chunks
};

/// A box of one chunk of a target tensor that lies in a tile's buffer, row-major, `offset` bytes from its
/// start. The box is in the tensor's addressable shape.
struct TileRegion {
  size_t target = 0;
  uint32_t chunk = 0;
  Box box;
  int64_t offset = 0;
};

/// The regions of a tile: its parts, cut where the target's chunks are, one after the other without gaps, in
/// the order of their places in the target's files.
std::vector<TileRegion> regions_of(const TransferPlan& plan, size_t tile, const Catalog& target,
                                   ChunkIndices& target_chunks);

/// The bytes of all regions.
int64_t bytes_of(std::span<const TileRegion> regions, const Catalog& target);

}  // namespace spolia
