#include "spolia/assemble/unit_pool.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace spolia {

std::vector<Buffer> UnitPool::take(std::span<const int64_t> sizes, int64_t later) {
  std::vector<size_t> largest_first(sizes.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::ranges::stable_sort(largest_first, std::greater(), [&](size_t i) { return sizes[i]; });

  // Blocks may be larger than they have to be where that leaves room for these now, and for the next ones.
  const int64_t needed = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  int64_t spare = limit_ - needed - std::max(in_use_, later);
  std::vector<Buffer> blocks(sizes.size());
  int64_t taken = 0, fresh = 0;
  std::vector<size_t> missing;
  for (size_t i : largest_first) {
    const auto block = free_.lower_bound(sizes[i]);
    const bool there_is_room = in_use_ + taken + fresh + free_bytes_ + sizes[i] <= limit_;
    if (block == free_.end() || block->first - sizes[i] > spare ||
        (block->first / 2 > sizes[i] && there_is_room)) {
      missing.push_back(i);
      fresh += sizes[i];
      continue;
    }
    spare -= block->first - sizes[i];
    taken += block->first;
    free_bytes_ -= block->first;
    blocks[i] = std::move(block->second);
    free_.erase(block);
  }
  while (!free_.empty() && in_use_ + taken + fresh + free_bytes_ > limit_) {
    free_bytes_ -= free_.begin()->first;
    free_.erase(free_.begin());
  }
  for (size_t i : missing) blocks[i] = Buffer(sizes[i], device_);
  in_use_ += taken + fresh;
  peak_ = std::max(peak_, held());
  return blocks;
}

void UnitPool::give_back(Buffer block) {
  in_use_ -= block.size();
  free_bytes_ += block.size();
  free_.emplace(block.size(), std::move(block));
}

}  // namespace spolia
