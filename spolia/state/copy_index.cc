#include "spolia/state/copy_index.h"

#include <algorithm>

namespace spolia {
namespace {

constexpr size_t kFew = 16;  // looking at so many costs no more than an index of them

}  // namespace

CopyIndices::CopyIndices(std::span<const RegionCopy> copies, std::span<const size_t> first_copy)
    : copies_(copies), first_copy_(first_copy) {
  for (size_t t = 0; t + 1 < first_copy.size(); ++t) {
    const auto of_target = copies.subspan(first_copy[t], first_copy[t + 1] - first_copy[t]);
    const bool all_regions =
        std::ranges::all_of(of_target, [](const RegionCopy& copy) { return copy.region != nullptr; });
    if (of_target.size() > kFew && all_regions) indices_.try_emplace(indices_.end(), t);
  }
}

std::vector<size_t> CopyIndices::overlapping(size_t target, const Box& box) {
  const size_t first = first_copy_[target], end = first_copy_[target + 1];
  std::vector<size_t> found;
  if (const auto many = indices_.find(target); many != indices_.end()) {
    Slot& slot = many->second;
    std::call_once(slot.once, [&] {
      slot.boxes = BoxList(copies_[first].region->target.ndim());
      slot.boxes.reserve(end - first);
      for (size_t c = first; c < end; ++c) slot.boxes.add(copies_[c].region->target);
      slot.index.emplace(slot.boxes);
    });
    for (uint32_t c : slot.index->overlapping(box)) found.push_back(first + c);
    return found;
  }
  for (size_t c = first; c < end; ++c) {
    const Region* region = copies_[c].region.get();
    if (region == nullptr || !intersect(region->target, box).empty()) found.push_back(c);
  }
  return found;
}

}  // namespace spolia
