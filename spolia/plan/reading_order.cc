#include "spolia/plan/reading_order.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace spolia {

std::vector<size_t> order_of_reading(std::span<const size_t> sources, const Catalog& source) {
  std::vector<size_t> order(sources.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) {
    const std::vector<Extent>& extents = source.tensors[sources[i]].extents;
    return extents.empty() ? std::tuple(uint32_t{0}, int64_t{0})
                           : std::tuple(extents[0].file, extents[0].offset);
  });
  return order;
}

}  // namespace spolia
