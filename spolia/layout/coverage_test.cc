#include "spolia/layout/coverage.h"

#include <limits>
#include <map>
#include <random>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

BoxList list_of(size_t ndim, const std::vector<Box>& boxes) {
  BoxList list(ndim);
  for (const Box& box : boxes) list.add(box);
  return list;
}

Coverage check(const std::vector<Box>& boxes, const Dims& shape, CoverageOptions options = {}) {
  return check_coverage(list_of(shape.size(), boxes), shape, options);
}

// ---- An independent truth: every element painted ----

/// How many boxes hold each element of `shape`, parts of boxes outside it left out.
std::vector<int> painted(const std::vector<Box>& boxes, const Dims& shape) {
  std::vector<int> counts(numel(shape), 0);
  for (const Box& box : boxes) {
    for (int64_t n = 0; n < std::ssize(counts); ++n) {
      int64_t rest = n;
      bool inside = true;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) {
        int64_t i = rest % shape[d];
        inside = inside && i >= box.offsets[d] && i - box.offsets[d] < box.sizes[d];
      }
      counts[n] += inside;
    }
  }
  return counts;
}

Dims random_shape() {
  Dims shape;
  for (int64_t d = pick(0, 4); d > 0; --d) shape.push_back(pick(1, 7));
  return shape;
}

/// Whether any element of `box` is painted.
bool meets_paint(const Box& box, const Dims& shape, const std::vector<int>& paint) {
  std::vector<int> own = painted({box}, shape);
  for (size_t n = 0; n < own.size(); ++n) {
    if (own[n] != 0 && paint[n] != 0) return true;
  }
  return false;
}

/// A tiling that no layout need have made: boxes grow at random from the first element still free.
std::vector<Box> random_tiling(const Dims& shape) {
  std::vector<Box> boxes;
  std::vector<int> paint = painted(boxes, shape);
  for (int64_t n = 0; n < std::ssize(paint); ++n) {
    if (paint[n] != 0) continue;
    Box box{Dims(shape.size()), Dims(shape.size(), 1)};
    int64_t rest = n;
    for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) box.offsets[d] = rest % shape[d];
    for (int tries = 0; tries < 5 && !shape.empty(); ++tries) {
      Box grown = box;
      ++grown.sizes[pick(0, shape.size())];
      if (fits(grown.offsets, grown.sizes, shape) && !meets_paint(grown, shape, paint)) box = grown;
    }
    boxes.push_back(box);
    paint = painted(boxes, shape);
  }
  std::mt19937 random(static_cast<uint32_t>(pick(0, 1 << 30)));
  std::ranges::shuffle(boxes, random);
  return boxes;
}

/// Drops, doubles, moves or resizes a few boxes, or none.
void mutate(std::vector<Box>& boxes) {
  for (int64_t changes = pick(0, 4); changes > 0 && !boxes.empty(); --changes) {
    size_t victim = pick(0, boxes.size());
    int64_t kind = pick(0, 5);
    if (kind == 0) {
      boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(victim));
    } else if (kind == 1) {
      boxes.push_back(boxes[victim]);
    } else if (boxes[victim].ndim() > 0) {
      size_t d = pick(0, boxes[victim].ndim());
      int64_t change = *rc::gen::element(-1, 1);
      if (kind == 2) boxes[victim].offsets[d] += change;
      if (kind == 3) boxes[victim].sizes[d] += change;
      if (kind == 4) boxes[victim].sizes[d] = 0;
    }
  }
}

void expect_what_painting_shows() {
  Dims shape = random_shape();
  std::vector<Box> boxes = random_tiling(shape);
  RC_ASSERT(!check(boxes, shape).fault);
  mutate(boxes);
  auto misfit = std::ranges::find_if(boxes, [&](const Box& b) { return !fits(b.offsets, b.sizes, shape); });
  std::vector<int> paint = painted(boxes, shape);
  bool overlap = std::ranges::any_of(paint, [](int count) { return count > 1; });
  bool gap = std::ranges::any_of(paint, [](int count) { return count == 0; });

  std::optional<CoverageFault> fault = check(boxes, shape).fault;
  RC_ASSERT(fault.has_value() == (misfit != boxes.end() || overlap || gap));
  if (!fault) return;
  RC_ASSERT((fault->kind == FaultKind::kOutOfBounds) == (misfit != boxes.end()));
  switch (fault->kind) {
    case FaultKind::kOutOfBounds:
      RC_ASSERT(static_cast<std::ptrdiff_t>(fault->first) == misfit - boxes.begin());
      RC_ASSERT(fault->box == *misfit);
      break;
    case FaultKind::kOverlap:
      RC_ASSERT(fault->first < fault->second && fault->second < boxes.size());
      RC_ASSERT(fault->box == intersect(boxes[fault->first], boxes[fault->second]));
      RC_ASSERT(!fault->box.empty());
      break;
    case FaultKind::kGap:
      RC_ASSERT(fits(fault->box.offsets, fault->box.sizes, shape));
      RC_ASSERT(!fault->box.empty());
      RC_ASSERT(!meets_paint(fault->box, shape, paint));
      break;
  }
}

RC_GTEST_PROP(Coverage, IsWhatPaintingShows, ()) {
  for (int n = 0; n < 5; ++n) expect_what_painting_shows();
}

RC_GTEST_PROP(Coverage, ReplicasMayBeAllowed, ()) {
  Dims shape = random_shape();
  std::vector<Box> boxes = random_tiling(shape);
  size_t tiles = boxes.size();
  for (int64_t copies = pick(0, 6); copies > 0; --copies) {
    Box copy = boxes[pick(0, tiles)];
    boxes.insert(boxes.begin() + pick(0, std::ssize(boxes) + 1), copy);
  }
  std::vector<ReplicaBox> expected;
  for (size_t i = 0; i < boxes.size(); ++i) {
    size_t first = static_cast<size_t>(std::ranges::find(boxes, boxes[i]) - boxes.begin());
    if (first < i) expected.push_back({i, first});
  }
  Coverage coverage = check(boxes, shape, {.allow_replicas = true});
  RC_ASSERT(!coverage.fault);
  RC_ASSERT(coverage.replicas == expected);
  RC_ASSERT(check(boxes, shape).fault.has_value() == !expected.empty());
}

TEST(Coverage, NamesTheFault) {
  Dims shape = {4, 6};
  std::vector<Box> halves = {{{0, 0}, {2, 6}}, {{2, 0}, {2, 6}}};
  EXPECT_FALSE(check(halves, shape).fault);

  auto text = [&](const std::vector<Box>& boxes) { return fault_text(*check(boxes, shape).fault, shape); };
  EXPECT_EQ(text({halves[0]}), "no chunk holds [2, 0] + [2, 6] of the shape [4, 6]");
  EXPECT_EQ(text({}), "no chunk holds [0, 0] + [4, 6] of the shape [4, 6]");
  EXPECT_EQ(text({halves[1], halves[0], {{1, 1}, {1, 2}}}), "chunks 1 and 2 both hold [1, 1] + [1, 2]");
  EXPECT_EQ(text({halves[0], {{2, 1}, {2, 6}}}),
            "chunk 1, [2, 1] + [2, 6], does not fit in the shape [4, 6]");
}

TEST(Coverage, PinwheelsAreExact) {
  std::vector<Box> pinwheel = {
      {{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}};
  EXPECT_FALSE(check(pinwheel, {3, 3}).fault);
  pinwheel.pop_back();
  EXPECT_EQ(check(pinwheel, {3, 3}).fault, (CoverageFault{FaultKind::kGap, 0, 0, {{1, 1}, {1, 1}}}));
}

/// Dominoes that lie and stand in turn; no straight line parts them.
std::vector<Box> herringbone(int64_t side) {
  std::vector<Box> boxes;
  Box shape = whole(Dims{side, side});
  for (int64_t row = 0; row < side; ++row) {
    for (int64_t column = 0; column < side; ++column) {
      switch ((column - row + 4 * side) % 4) {
        case 0:
          boxes.push_back(intersect({{row, column}, {1, 2}}, shape));
          break;
        case 3:
          boxes.push_back(intersect({{row, column}, {2, 1}}, shape));
          break;
        default:  // the other half of one of those, or of one that begins outside
          if (column == 0 && (column - row + 4 * side) % 4 == 1) boxes.push_back({{row, column}, {1, 1}});
          if (row == 0 && (column - row) % 4 == 2) boxes.push_back({{row, column}, {1, 1}});
      }
    }
  }
  return boxes;
}

TEST(Coverage, IrregularTilingsAreExact) {
  constexpr int64_t kSide = 100;
  std::vector<Box> tiles = herringbone(kSide);
  EXPECT_FALSE(check(tiles, {kSide, kSide}, {.work_limit = 200 * std::ssize(tiles)}).fault);
  Box lost = tiles[2345];
  tiles.erase(tiles.begin() + 2345);
  EXPECT_EQ(check(tiles, {kSide, kSide}).fault->kind, FaultKind::kGap);
  EXPECT_TRUE(contains(lost, check(tiles, {kSide, kSide}).fault->box));
  tiles.push_back(lost);
  tiles.push_back(lost);
  EXPECT_EQ(check(tiles, {kSide, kSide}).fault,
            (CoverageFault{FaultKind::kOverlap, tiles.size() - 2, tiles.size() - 1, lost}));
}

TEST(Coverage, EmptyAndZeroDimensional) {
  EXPECT_FALSE(check({{{0}, {3}}, {{3}, {0}}, {{1}, {0}}}, {3}).fault);
  EXPECT_EQ(check({{{0}, {3}}, {{4}, {0}}}, {3}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_FALSE(check({}, {0, 5}).fault);
  EXPECT_FALSE(check({{{0, 0}, {0, 5}}}, {0, 5}).fault);
  EXPECT_FALSE(check({Box{}}, {}).fault);
  EXPECT_EQ(check({}, {}).fault, (CoverageFault{FaultKind::kGap, 0, 0, Box{}}));
  EXPECT_EQ(check({Box{}, Box{}}, {}).fault, (CoverageFault{FaultKind::kOverlap, 0, 1, Box{}}));
  EXPECT_FALSE(check({Box{}, Box{}}, {}, {.allow_replicas = true}).fault);
}

TEST(Coverage, HostileNumbersAreNamedAndNeverWrap) {
  EXPECT_EQ(check({{{kMax}, {kMax}}}, {4}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_EQ(check({{{-4}, {8}}}, {4}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_EQ(check({{{2}, {-1}}}, {4}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_EQ(check({{{1}, {kMax}}}, {kMax}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_FALSE(check({{{0}, {1}}, {{1}, {kMax - 1}}}, {kMax}).fault);
  EXPECT_EQ(check_coverage(list_of(1, {{{0}, {4}}}), Dims{4, 1}).fault->kind, FaultKind::kOutOfBounds);
  EXPECT_THROW(check({}, {-1}), CorruptError);
  EXPECT_THROW(check({}, {kMax, kMax}), CorruptError);
}

/// `tiles` boxes of `tile` each, shuffled.
std::vector<Box> shuffled_grid(const Dims& tiles, const Dims& tile) {
  std::vector<Box> boxes;
  for (int64_t n = 0; n < numel(tiles); ++n) {
    Box box{Dims(tiles.size()), tile};
    int64_t rest = n;
    for (size_t d = tiles.size(); d-- > 0; rest /= tiles[d]) box.offsets[d] = rest % tiles[d] * tile[d];
    boxes.push_back(box);
  }
  std::mt19937 random(3);
  std::ranges::shuffle(boxes, random);
  return boxes;
}

TEST(Coverage, GridsTakeLinearWork) {
  for (Dims tiles : {Dims{6000}, Dims{60, 100}, Dims{1, 6000}, Dims{6000, 1}, Dims{10, 20, 30}}) {
    Dims tile(tiles.size(), 3), shape;
    for (int64_t count : tiles) shape.push_back(3 * count);
    std::vector<Box> grid = shuffled_grid(tiles, tile);
    CoverageOptions tight{.work_limit = 2 * static_cast<int64_t>(tiles.size()) * std::ssize(grid)};
    EXPECT_FALSE(check(grid, shape, tight).fault);
    Box lost = grid.back();
    grid.pop_back();
    EXPECT_EQ(check(grid, shape, tight).fault, (CoverageFault{FaultKind::kGap, 0, 0, lost}));
    grid.push_back(grid[17]);
    grid.push_back(lost);
    EXPECT_EQ(check(grid, shape).fault, (CoverageFault{FaultKind::kOverlap, 17, grid.size() - 2, grid[17]}));
  }
}

TEST(Coverage, TooIrregularIsAnError) {
  // Each box takes the first row or column of what is left: parted one at a time.
  std::vector<Box> boxes;
  constexpr int64_t kSide = 400;
  for (int64_t i = 0; i < kSide; ++i) {
    boxes.push_back({{i, i}, {1, kSide - i}});
    if (i + 1 < kSide) boxes.push_back({{i + 1, i}, {kSide - i - 1, 1}});
  }
  EXPECT_FALSE(check(boxes, {kSide, kSide}).fault);
  EXPECT_THROW(check(boxes, {kSide, kSide}, {.work_limit = 10000}), UnsupportedError);
}

TEST(Coverage, SlowMillionsOfBoxes) {
  std::vector<Box> grid = shuffled_grid({2000, 1000}, {4, 8});
  EXPECT_FALSE(check(grid, {8000, 8000}).fault);
  grid[1234567].offsets[0] += grid[1234567].offsets[0] == 0 ? 1 : -1;
  EXPECT_TRUE(check(grid, {8000, 8000}).fault);
}

}  // namespace
}  // namespace spolia
