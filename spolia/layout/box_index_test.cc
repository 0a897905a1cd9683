#include "spolia/layout/box_index.h"

#include <numeric>
#include <random>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

Box random_box(size_t ndim, int64_t offset_below, int64_t size_below) {
  Box box;
  for (size_t d = 0; d < ndim; ++d) {
    box.offsets.push_back(pick(0, offset_below));
    box.sizes.push_back(pick(0, size_below));
  }
  return box;
}

std::vector<uint32_t> linear_search(const BoxList& boxes, const Box& query) {
  std::vector<uint32_t> found;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!intersect(boxes[i], query).empty()) found.push_back(static_cast<uint32_t>(i));
  }
  return found;
}

RC_GTEST_PROP(BoxIndex, FindsWhatALinearSearchFinds, ()) {
  size_t ndim = pick(0, 5);
  BoxList boxes(ndim);
  for (int64_t n = pick(0, 120); n > 0; --n) boxes.add(random_box(ndim, 20, 6));
  BoxIndex index(boxes);
  for (int q = 0; q < 8; ++q) {
    Box query = random_box(ndim, 22, 12);
    RC_ASSERT(index.overlapping(query) == linear_search(boxes, query));
  }
}

TEST(BoxIndex, ShuffledGridsOfAnyShape) {
  std::mt19937 random(7);
  for (Dims tiles : {Dims{3000}, Dims{60, 50}, Dims{3000, 1}, Dims{1, 3000}, Dims{15, 4, 50}}) {
    std::vector<int64_t> order(numel(tiles));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    BoxList boxes(tiles.size());
    for (int64_t tile : order) {
      Box box = whole(tiles);
      for (size_t d = tiles.size(); d-- > 0; tile /= tiles[d]) {
        box.offsets[d] = tile % tiles[d] * 3;
        box.sizes[d] = 3;
      }
      boxes.add(box);
    }
    BoxIndex index(boxes);
    EXPECT_LE(index.memory_bytes(), 16 * boxes.size());
    for (int q = 0; q < 20; ++q) {
      Box query = whole(tiles);
      for (size_t d = 0; d < tiles.size(); ++d) {
        query.offsets[d] = static_cast<int64_t>(random() % (3 * tiles[d]));
        query.sizes[d] = std::min<int64_t>(random() % 9, 3 * tiles[d] - query.offsets[d]);
      }
      EXPECT_EQ(index.overlapping(query), linear_search(boxes, query));
    }
  }
}

TEST(BoxIndex, OneBoxAndNone) {
  BoxList none(2);
  EXPECT_TRUE(BoxIndex(none).overlapping(Box{{0, 0}, {5, 5}}).empty());
  BoxList one(1);
  one.add(Box{{2}, {3}});
  BoxIndex index(one);
  EXPECT_EQ(index.overlapping(Box{{4}, {1}}), std::vector<uint32_t>{0});
  EXPECT_TRUE(index.overlapping(Box{{5}, {1}}).empty());
  EXPECT_TRUE(index.overlapping(Box{{3}, {0}}).empty());
}

}  // namespace
}  // namespace spolia
