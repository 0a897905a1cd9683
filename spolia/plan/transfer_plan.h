// Transfer plans: which elements go where, in what pieces, at what cost. Computed from catalogs alone, before
// anything is read.
//
// A plan turns region copies (what the target is made of) into tiles (what one thread holds at a time). A
// tile is a few boxes of the target's tensors whose bytes fit a buffer; each box is mostly contiguous in the
// row-major order of its tensor, however the tensor is cut into chunks: what a tile needs then lies in a few
// runs of the source's chunks, and makes a few runs of the target's. A tensor too large for a tile has its
// tiles to itself. Tiles depend on the catalogs and the tile size alone, never on threads or timing, so the
// same input gives the same bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "spolia/layout/box.h"
#include "spolia/state/catalog.h"
#include "spolia/state/region_copy.h"

namespace spolia {

/// All of a target tensor, or one box of it.
struct TilePart {
  static constexpr size_t kWhole = std::numeric_limits<size_t>::max();
  size_t target = 0;
  size_t box = kWhole;  // which of TransferPlan::boxes
};

struct TransferCost {
  int64_t tensors = 0;
  int64_t bytes_read = 0;  // element bytes needed from the source; what lies around them is not counted
  int64_t bytes_written = 0;
  int64_t buffer_bytes = 0;  // what the executor allocates
};

struct TransferPlan {
  std::vector<RegionCopy> copies;  // by target, in the order the target catalog lists its tensors
  std::vector<size_t> first_copy;  // copies of target t: [first_copy[t], first_copy[t + 1])
  std::vector<TilePart> parts;     // of all tiles, one after the other
  std::vector<size_t> first_part;  // parts of tile i: [first_part[i], first_part[i + 1])
  std::vector<Box> boxes;          // of the tensors that were cut, in their addressable shapes
  int64_t tile_bytes = 0;          // no tile is larger
  int64_t scratch_bytes = 0;       // a thread's room for bytes that cannot be read into place
  size_t decoders = 1;  // compressed items a thread may keep open; each holds a window of some mebibytes
  size_t threads = 1;
  TransferCost cost;

  size_t tiles() const { return first_part.size() - 1; }
  std::span<const TilePart> tile(size_t i) const {
    return std::span(parts).subspan(first_part[i], first_part[i + 1] - first_part[i]);
  }
  /// A part's box, in its tensor's addressable shape. `target`: the catalog the plan was made for.
  Box box_of(const TilePart& part, const Catalog& target) const;
  std::span<const RegionCopy> copies_of(size_t target) const {
    return std::span(copies).subspan(first_copy[target], first_copy[target + 1] - first_copy[target]);
  }
};

struct PlanOptions {
  int64_t memory = int64_t{1} << 30;  // bytes for all buffers of all threads; at least kLeastMemory
  size_t threads = 1;
  /// No tile is larger, but blocks (below), which may be eight times as large. More gains nothing: reads and
  /// writes of this size already keep a disk busy, and what is in flight should fit the outer caches.
  int64_t largest_tile = int64_t{4} << 20;
  /// Whether each tensor's tiles are to be in its row-major order, every part contiguous. Without, a tensor
  /// that is stored across (RegionCopy::fastest_dim) is cut into blocks, which reads and writes longer runs.
  bool row_major = false;
};
inline constexpr int64_t kLeastMemory = int64_t{16} << 20;

/// Plans the transfer. Checks that the copies fill every target tensor exactly, that they lie inside their
/// sources, and that each tensor's chunks tile it exactly: CorruptError or InvalidArgumentError naming the
/// tensor and the gap, overlap or box out of bounds. `order`: the target tensors in the order in which tiles
/// visit them. Pure.
TransferPlan plan_transfer(const Catalog& source, const Catalog& target, std::vector<RegionCopy> copies,
                           std::span<const size_t> order, const PlanOptions& options);

/// The number of threads a budget has room for, at most `wanted`.
size_t threads_within(int64_t memory, size_t wanted);

/// For people and for programs: cost and, for each target tensor, what it is made of.
std::string plan_text(const TransferPlan& plan, const Catalog& source, const Catalog& target);
nlohmann::ordered_json plan_json(const TransferPlan& plan, const Catalog& source, const Catalog& target);

}  // namespace spolia
