#include "spolia/tensor/strided.h"

#include <algorithm>
#include <cstdlib>

#include "spolia/base/error.h"
#include "spolia/tensor/shape.h"

namespace spolia {

std::optional<PairDims> merge_dims(std::span<const int64_t> sizes, std::span<const int64_t> dst_strides,
                                   std::span<const int64_t> src_strides) {
  if (dst_strides.size() != sizes.size() || src_strides.size() != sizes.size()) {
    throw InvalidArgumentError("{} sizes need as many strides; there are {} and {}", sizes.size(),
                               dst_strides.size(), src_strides.size());
  }
  if (std::ranges::any_of(sizes, [](int64_t size) { return size < 0; })) {
    throw InvalidArgumentError("the shape {} has a negative size", list_text(sizes));
  }
  PairDims dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return std::nullopt;
    if (sizes[d] > 1) dims.push_back({sizes[d], dst_strides[d], src_strides[d]});
  }
  std::ranges::stable_sort(dims, std::ranges::greater(),
                           [](const PairDim& dim) { return std::abs(dim.dst); });

  PairDims merged;
  for (size_t d = dims.size(); d-- > 0;) {  // from the innermost outwards
    const PairDim& outer = dims[d];
    if (!merged.empty()) {
      PairDim& inner = merged.back();
      if (outer.dst == inner.dst * inner.size && outer.src == inner.src * inner.size) {
        inner.size *= outer.size;
        continue;
      }
    }
    merged.push_back(outer);
  }
  std::ranges::reverse(merged);
  return merged;
}

bool make_plane(PairDims& dims) {
  while (dims.size() < 2) dims.insert(dims.begin(), {1, 0, 0});
  size_t last = dims.size() - 1, fastest = last;
  for (size_t d = last; d-- > 0;) {
    if (dims[d].src != 0 && std::abs(dims[d].src) < std::abs(dims[fastest].src)) fastest = d;
  }
  if (fastest == last) return false;
  std::rotate(dims.begin() + fastest, dims.begin() + fastest + 1, dims.begin() + last);
  return true;
}

}  // namespace spolia
