#include "spolia/state/copy_index.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

RC_GTEST_PROP(CopyIndices, FindWhatLookingAtEachFinds, ()) {
  const Dims shape = {pick(1, 12), pick(1, 12)};
  std::vector<RegionCopy> copies;
  std::vector<size_t> first = {0};
  for (size_t t = 0; t < 4; ++t) {
    if (pick(0, 5) == 0) {
      copies.push_back(copy_whole(0, t));
    } else {
      const int64_t rows = pick(1, 13),
                    columns = pick(1, 13);  // of each box: one to a hundred and forty-four of them
      for (const Box& row : split(whole(shape), 0, rows)) {
        for (const Box& box : split(row, 1, columns)) copies.push_back(copy_region(0, t, {box, box, {}}));
      }
    }
    first.push_back(copies.size());
  }
  CopyIndices indices(copies, first);
  for (size_t t = 0; t < 4; ++t) {
    Box box{{pick(0, shape[0]), pick(0, shape[1])}, {0, 0}};
    for (size_t d = 0; d < 2; ++d) box.sizes[d] = pick(1, shape[d] - box.offsets[d] + 1);
    std::vector<size_t> expected;
    for (size_t c = first[t]; c < first[t + 1]; ++c) {
      const Region* region = copies[c].region.get();
      if (region == nullptr || !intersect(region->target, box).empty()) expected.push_back(c);
    }
    RC_ASSERT(indices.overlapping(t, box) == expected);
  }
}

}  // namespace
}  // namespace spolia
