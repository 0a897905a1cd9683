#include "spolia/layout/box.h"

#include <limits>
#include <map>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/layout/coverage.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Dims random_dims(size_t ndim, int64_t below) {
  Dims dims;
  for (size_t d = 0; d < ndim; ++d) dims.push_back(pick(0, below));
  return dims;
}

Box random_box(size_t ndim) { return {random_dims(ndim, 4), random_dims(ndim, 5)}; }

/// The indices of a box's elements in row-major order, found by trying every one below 9 in each dim.
std::vector<Dims> elements(const Box& box) {
  std::vector<Dims> all = {Dims{}};
  for (size_t d = 0; d < box.ndim(); ++d) {
    std::vector<Dims> longer;
    for (const Dims& index : all) {
      for (int64_t i = 0; i < 9; ++i) {
        if (i < box.offsets[d] || i >= box.offsets[d] + box.sizes[d]) continue;
        longer.push_back(index);
        longer.back().push_back(i);
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::vector<Dims> elements(const std::vector<Box>& boxes) {
  std::vector<Dims> all;
  for (const Box& box : boxes) {
    for (const Dims& index : elements(box)) all.push_back(index);
  }
  return all;
}

bool holds(const Box& box, const Dims& index) {
  auto all = elements(box);
  return std::ranges::find(all, index) != all.end();
}

TEST(Box, Basics) {
  EXPECT_EQ(Box{}.numel(), 1);
  EXPECT_FALSE(Box{}.empty());
  Box box{{1, 0}, {2, 3}};
  EXPECT_EQ(box.numel(), 6);
  EXPECT_EQ(box_text(box), "[1, 0] + [2, 3]");
  EXPECT_TRUE((Box{{1, 3}, {2, 0}}).empty());
  EXPECT_EQ(whole(Dims{4, 5}), (Box{{0, 0}, {4, 5}}));
}

TEST(Box, FitsRefusesAStrangersNumbers) {
  auto fit = [](Dims offsets, Dims sizes, Dims shape) { return fits(offsets, sizes, shape); };
  EXPECT_TRUE(fit({}, {}, {}));
  EXPECT_TRUE(fit({2, 0}, {2, 3}, {4, 3}));
  EXPECT_TRUE(fit({4, 0}, {0, 3}, {4, 3}));  // an empty shard at the edge
  EXPECT_FALSE(fit({5, 0}, {0, 3}, {4, 3}));
  EXPECT_FALSE(fit({3, 0}, {2, 3}, {4, 3}));
  EXPECT_FALSE(fit({-1, 0}, {2, 3}, {4, 3}));
  EXPECT_FALSE(fit({0, 0}, {-2, 3}, {4, 3}));
  EXPECT_FALSE(fit({kMax, 0}, {kMax, 3}, {4, 3}));
  EXPECT_FALSE(fit({kMax}, {1}, {kMax}));
  EXPECT_TRUE(fit({kMax - 1}, {1}, {kMax}));
  EXPECT_FALSE(fit({0}, {0}, {-1}));
  EXPECT_FALSE(fit({0}, {1}, {4, 3}));
  EXPECT_FALSE(fit({0, 0}, {1}, {4, 3}));
}

RC_GTEST_PROP(Box, IntersectAndContainAreSetOperations, ()) {
  size_t ndim = pick(0, 4);
  Box a = random_box(ndim), b = random_box(ndim);
  std::vector<Dims> common;
  for (const Dims& index : elements(a)) {
    if (holds(b, index)) common.push_back(index);
  }
  RC_ASSERT(elements(intersect(a, b)) == common);
  RC_ASSERT(contains(b, a) == (common == elements(a)));
}

RC_GTEST_PROP(Box, SubtractLeavesTheRest, ()) {
  size_t ndim = pick(0, 4);
  Box a = random_box(ndim), b = random_box(ndim);
  std::vector<Box> rest = subtract(a, b);
  std::map<Dims, int> counts;
  for (const Dims& index : elements(rest)) ++counts[index];
  for (const Dims& index : elements(a)) RC_ASSERT(counts[index] == (holds(b, index) ? 0 : 1));
  RC_ASSERT(elements(rest).size() == elements(a).size() - elements(intersect(a, b)).size());
  if (ndim > 0) RC_ASSERT(rest.size() <= 2 * ndim);
  RC_ASSERT(std::ranges::is_sorted(rest, {}, &Box::offsets));
  RC_ASSERT(std::ranges::none_of(rest, &Box::empty));
}

RC_GTEST_PROP(Box, SplitCutsInOrder, ()) {
  size_t ndim = pick(1, 4);
  Box box = random_box(ndim);
  size_t dim = pick(0, ndim);
  int64_t size = pick(1, 5);
  std::vector<Box> pieces = split(box, dim, size);
  RC_ASSERT(elements(pieces).size() == elements(box).size());
  int64_t at = box.offsets[dim];
  for (const Box& piece : pieces) {
    RC_ASSERT(piece.offsets[dim] == at);
    RC_ASSERT(piece.sizes[dim] > 0 && piece.sizes[dim] <= size);
    at += piece.sizes[dim];
  }
  RC_ASSERT(at == box.offsets[dim] + box.sizes[dim]);
}

RC_GTEST_PROP(Box, SplitRowMajorKeepsTheOrder, ()) {
  Box box = random_box(pick(0, 4));
  int64_t most = pick(1, 70);
  std::vector<Box> pieces = split_row_major(box, most);
  // Concatenated, the pieces' elements are the box's: each piece is a contiguous run of its buffer.
  RC_ASSERT(elements(pieces) == elements(box));
  for (const Box& piece : pieces) RC_ASSERT(piece.numel() >= 1 && piece.numel() <= most);
}

TEST(Box, SplitRowMajorTakesWholeSlices) {
  Box box{{0, 2}, {5, 10}};
  EXPECT_EQ(split_row_major(box, 25),
            (std::vector<Box>{{{0, 2}, {2, 10}}, {{2, 2}, {2, 10}}, {{4, 2}, {1, 10}}}));
  EXPECT_EQ(split_row_major(box, 1000), std::vector<Box>{box});
  EXPECT_EQ(split_row_major(Box{{7, 2}, {1, 10}}, 6), (std::vector<Box>{{{7, 2}, {1, 6}}, {{7, 8}, {1, 4}}}));
}

RC_GTEST_PROP(Box, FlatRangesBecomeBoxes, ()) {
  Dims shape = random_dims(pick(0, 4), 5);
  std::vector<Dims> all = elements(whole(shape));
  int64_t begin = pick(0, std::ssize(all) + 1);
  int64_t end = pick(begin, std::ssize(all) + 1);
  std::vector<Box> boxes = boxes_of_flat_range(shape, begin, end);
  RC_ASSERT(elements(boxes) == std::vector<Dims>(all.begin() + begin, all.begin() + end));
  if (!shape.empty()) RC_ASSERT(boxes.size() <= 2 * shape.size() - 1);
}

TEST(Box, FlatRangesOfWholeRowsAreOneBox) {
  Dims shape = {4, 3, 5};
  EXPECT_EQ(boxes_of_flat_range(shape, 0, 60), std::vector<Box>{whole(shape)});
  EXPECT_EQ(boxes_of_flat_range(shape, 15, 45), (std::vector<Box>{{{1, 0, 0}, {2, 3, 5}}}));
  EXPECT_EQ(boxes_of_flat_range(shape, 20, 30), (std::vector<Box>{{{1, 1, 0}, {1, 2, 5}}}));
  EXPECT_EQ(boxes_of_flat_range(shape, 4, 59).size(), 5u);
}

TEST(BoxList, PacksBoxes) {
  BoxList list(2);
  list.add(Box{{0, 4}, {2, 3}});
  list.add(Dims{2, 4}, Dims{1, 3});
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0], (Box{{0, 4}, {2, 3}}));
  EXPECT_EQ(Dims(list.offsets(1)), (Dims{2, 4}));
  EXPECT_EQ(Dims(list.sizes(1)), (Dims{1, 3}));
  BoxList scalars(0);
  scalars.add(Box{});
  scalars.add(Box{});
  EXPECT_EQ(scalars.size(), 2u);
}

RC_GTEST_PROP(SplitInBlocks, BlocksTileTheBoxAndAreNoLargerThanAsked, ()) {
  Box box;
  const size_t ndim = static_cast<size_t>(pick(2, 5));
  for (size_t d = 0; d < ndim; ++d) {
    box.offsets.push_back(pick(0, 4));
    box.sizes.push_back(pick(0, 9));
  }
  const size_t dim = static_cast<size_t>(pick(0, static_cast<int64_t>(ndim) - 1));
  const int64_t elements = pick(1, 60);
  BoxList blocks(ndim);
  Dims shape;
  for (size_t d = 0; d < ndim; ++d) shape.push_back(box.sizes[d]);
  for (Box& block : split_in_blocks(box, dim, elements)) {
    RC_ASSERT(block.numel() <= elements);
    for (size_t d = 0; d < ndim; ++d) block.offsets[d] -= box.offsets[d];
    blocks.add(block);
  }
  RC_ASSERT(!check_coverage(blocks, shape).fault);
}

TEST(SplitInBlocks, SmallOnesAreAsLongOneWayAsTheOther) {
  const auto blocks = split_in_blocks(whole(Dims{3, 1000, 1000}), 1, 10'000);
  EXPECT_EQ(blocks.size(), 300u);
  EXPECT_EQ(blocks.front().sizes, (Dims{1, 100, 100}));
  // A narrow matrix: what one way does not need the other one gets.
  EXPECT_EQ(split_in_blocks(whole(Dims{1000, 10}), 0, 1000).front().sizes, (Dims{100, 10}));
}

TEST(SplitInBlocks, LargeOnesAreLongInTheLastDim) {
  EXPECT_EQ(split_in_blocks(whole(Dims{5000, 6000}), 0, 6'000'000).front().sizes, (Dims{1000, 6000}));
  EXPECT_EQ(split_in_blocks(whole(Dims{5000, 20'000}), 0, 6'000'000).front().sizes, (Dims{600, 10'000}));
  EXPECT_EQ(split_in_blocks(whole(Dims{5000, 100'000}), 0, 6'000'000).front().sizes, (Dims{539, 11'112}));
  EXPECT_EQ(split_in_blocks(whole(Dims{100, 100'000}), 0, 6'000'000).front().sizes, (Dims{100, 50'000}));
}

}  // namespace
}  // namespace spolia
