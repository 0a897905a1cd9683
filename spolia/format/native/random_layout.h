// Random layouts for property tests.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/layout/layout.h"
#include "spolia/layout/test_random.h"

namespace spolia {

/// 0-d, empty and uneven ones among them.
inline Dims random_shape() {
  Dims shape;
  for (int64_t d = pick(0, 10) == 0 ? 0 : pick(1, 4); d > 0; --d) {
    shape.push_back(pick(0, 12) == 0 ? 0 : pick(1, 9));
  }
  return shape;
}

inline Placement random_placement(size_t ndim, int64_t parts) {
  const int64_t kind = pick(0, ndim == 0 ? 2 : 8);
  if (kind < 2) return Replicate{};
  const int64_t dim = pick(0, static_cast<int64_t>(ndim));
  if (kind < 5) return Shard{dim, pick(0, 2) == 1 ? Split::kBalanced : Split::kCeil};
  if (kind < 7) {
    return StridedShard{dim, pick(1, 5), pick(0, 2) == 1 ? StridedSplit::kAligned : StridedSplit::kChunked};
  }
  RaggedShard ragged;
  for (int64_t d = 0; d <= dim; ++d) ragged.dims.push_back(d);
  for (int64_t i = 0; i < parts; ++i) ragged.units.push_back(pick(0, 4));
  return ragged;
}

/// One that suits the shape, on a few ranks, which need not start at 0.
inline Layout random_layout(const Dims& shape) {
  Dims grid;
  for (int64_t d = pick(0, 4); d > 0; --d) grid.push_back(pick(1, 4));
  std::vector<int64_t> ranks(static_cast<size_t>(numel(grid)));
  const int64_t first = pick(0, 3);
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = first + static_cast<int64_t>(i);
  if (pick(0, 2) == 1) std::ranges::reverse(ranks);
  const DeviceMesh mesh(grid, {}, ranks);
  std::vector<Placement> placements(grid.size());
  for (size_t m = 0; m < grid.size(); ++m) {
    placements[m] = random_placement(shape.size(), grid[m]);
    try {
      const Layout layout(mesh, placements);
      for (int64_t rank : ranks) layout.shard(shape, rank);
    } catch (const Error&) {
      placements[m] = Replicate{};  // it does not suit what is left
    }
  }
  return Layout(mesh, placements);
}

}  // namespace spolia
