// Parts of a dense tensor along its leading dim.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "spolia/layout/placement.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// `size` indices of the leading dim, from `begin` on; by default, all of any tensor.
struct LeadingPart {
  static constexpr int64_t kAll = -1;
  int64_t begin = 0, size = kAll;

  bool is_all() const { return size == kAll; }
  Dims shape_of(Dims shape) const {
    if (!is_all() && !shape.empty()) shape[0] = size;
    return shape;
  }
  View of(View view) const {
    if (is_all() || view.shape.empty()) return view;
    if (view.data) view.data += begin * view.strides[0];
    view.shape[0] = size;
    return view;
  }
};

/// How a leading dim is cut into parts.
struct LeadingCut {
  size_t parts = 1;
  /// Their sizes, or what sizes are in proportion to, which then sum up to a divisor of the dim. None: sizes
  /// differ by at most one, larger ones first.
  std::vector<int64_t> shares;

  /// Where a part of a dim of `size` begins.
  int64_t begin(size_t part, int64_t size) const {
    const auto i = static_cast<int64_t>(part), n = static_cast<int64_t>(parts);
    if (shares.empty()) return i * (size / n) + std::min(i, size % n);
    return size / std::accumulate(shares.begin(), shares.end(), int64_t{0}) *
           std::accumulate(shares.begin(), shares.begin() + i, int64_t{0});
  }
  /// Of a tensor of this shape.
  LeadingPart part(size_t index, const Dims& shape) const {
    if (parts == 1) return {};
    return {begin(index, shape[0]), begin(index + 1, shape[0]) - begin(index, shape[0])};
  }
  /// The same as a layout says it.
  Placement placement() const {
    if (shares.empty()) return Shard{0, Split::kBalanced};
    return RaggedShard{{0}, shares};
  }
};

}  // namespace spolia
