#include "spolia/state/region_copy.h"

#include <utility>

namespace spolia {

Region narrowed(const Region& region, const Box& target) {
  Region part{region.source, target, region.permute};
  for (size_t d = 0; d < target.ndim(); ++d) {
    const int64_t from = source_dim(region, d);
    if (from < 0) continue;
    part.source.offsets[from] += target.offsets[d] - region.target.offsets[d];
    part.source.sizes[from] = target.sizes[d];
  }
  return part;
}

RegionCopy copy_whole(size_t source, size_t target) { return {source, target, nullptr}; }

RegionCopy copy_region(size_t source, size_t target, Region region) {
  return {source, target, std::make_shared<const Region>(std::move(region))};
}

}  // namespace spolia
