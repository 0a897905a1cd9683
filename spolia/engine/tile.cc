#include "spolia/engine/tile.h"

#include <algorithm>
#include <tuple>

namespace spolia {

ChunkIndices::ChunkIndices(const Catalog& catalog) : catalog_(catalog) {
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    if (catalog.tensors[t].chunks() != 1) indices_.try_emplace(indices_.end(), t);
  }
}

std::vector<uint32_t> ChunkIndices::overlapping(size_t tensor, const Box& box) {
  const TensorEntry& entry = catalog_.tensors[tensor];
  if (entry.chunks() == 1) return {0};
  Slot& slot = indices_.at(tensor);
  std::call_once(slot.once, [&] { slot.index.emplace(entry.boxes); });
  return slot.index->overlapping(box);
}

std::vector<TileRegion> regions_of(const TransferPlan& plan, size_t tile, const Catalog& target,
                                   ChunkIndices& target_chunks) {
  std::vector<TileRegion> regions;
  for (const TilePart& part : plan.tile(tile)) {
    const TensorEntry& tensor = target.tensors[part.target];
    const Box all = plan.box_of(part, target);
    if (tensor.chunks() == 1) {
      regions.push_back({part.target, 0, all, 0});
      continue;
    }
    for (uint32_t chunk : target_chunks.overlapping(part.target, all)) {
      Box box = intersect(all, addressable_box(tensor, chunk));
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
