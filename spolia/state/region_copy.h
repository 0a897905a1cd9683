// Region copies: the one kind of move. Which elements of one catalog become which elements of another.
#pragma once

#include <cstddef>
#include <memory>

#include "spolia/layout/box.h"

namespace spolia {

/// A box of one tensor that becomes a box of another. Dim d of the target is dim permute[d] of the source
/// (empty: d itself). Boxes are in addressable shapes (catalog.h).
///
/// Where a tensor was reshaped on the way, the number of dims differs: permute[d] is -1 for a dim of the
/// target that is no dim of the source, and a dim of the source may be no dim of the target. The box has size
/// 1 in both.
struct Region {
  Box source;
  Box target;
  Dims permute;
  friend bool operator==(const Region&, const Region&) = default;
};

/// The dim of the source that is dim d of the target, or -1.
inline int64_t source_dim(const Region& region, size_t d) {
  return region.permute.empty() ? static_cast<int64_t>(d) : region.permute[d];
}

/// The part of the region that becomes `target`, which is not empty and lies in region.target.
Region narrowed(const Region& region, const Box& target);

/// What becomes of a part of a source tensor, or of all of it. Where the dtypes differ the elements are cast.
struct RegionCopy {
  size_t source = 0;  // an index into the source catalog's tensors
  size_t target = 0;  // an index into the target catalog's tensors
  /// nullptr: all of the source, as it is, becomes all of the target. Most copies are such, and there may be
  /// millions of them.
  std::shared_ptr<const Region> region;
  /// The target's dim along which the source's elements lie closest together, where it is not the last: a
  /// hint from those who know how the source is stored. -1: the last one that is not permuted away.
  int fastest_dim = -1;
};

RegionCopy copy_whole(size_t source, size_t target);
RegionCopy copy_region(size_t source, size_t target, Region region);

}  // namespace spolia
