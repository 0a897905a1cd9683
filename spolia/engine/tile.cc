#include "spolia/engine/tile.h"

#include <algorithm>
#include <tuple>

namespace spolia {

std::vector<uint32_t> ChunkIndices::overlapping(size_t tensor, const Box& box) {
  const TensorEntry& entry = catalog_.tensors[tensor];
  if (entry.chunks() == 1) return {0};
  Slot& slot = indices_[tensor];
  std::call_once(slot.once, [&] { slot.index.emplace(entry.boxes); });
  return slot.index->overlapping(box);
}

std::vector<TileRegion> regions_of(std::span<const TilePart> tile, const Catalog& target,
                                   ChunkIndices& target_chunks) {
  std::vector<TileRegion> regions;
  for (const TilePart& part : tile) {
    const TensorEntry& tensor = target.tensors[part.target];
    if (tensor.chunks() == 1) {
      regions.push_back({part.target, 0, part.box, 0});
      continue;
    }
    for (uint32_t chunk : target_chunks.overlapping(part.target, part.box)) {
      Box box = intersect(part.box, addressable_box(tensor, chunk));
      if (!box.empty()) regions.push_back({part.target, chunk, std::move(box), 0});
    }
  }
  std::ranges::stable_sort(regions, {}, [&](const TileRegion& region) {
    const Extent& extent = target.tensors[region.target].extents[region.chunk];
    return std::tuple(extent.file, extent.offset);
  });
  int64_t offset = 0;
  for (TileRegion& region : regions) {
    region.offset = offset;
    offset += region.box.numel() * element_bytes(target.tensors[region.target].dtype);
  }
  return regions;
}

int64_t bytes_of(std::span<const TileRegion> regions, const Catalog& target) {
  if (regions.empty()) return 0;
  const TileRegion& last = regions.back();
  return last.offset + last.box.numel() * element_bytes(target.tensors[last.target].dtype);
}

}  // namespace spolia
