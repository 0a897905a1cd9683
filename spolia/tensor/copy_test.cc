#include "spolia/tensor/copy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

/// Strides in bytes for `sizes` laid out in a random order of dims, with random gaps; and the bytes they
/// span.
struct Strides {
  Dims bytes;
  int64_t span;
};

Strides random_strides(const Dims& sizes, int64_t element_bytes, bool may_expand) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[*rc::gen::inRange<size_t>(0, i + 1)]);
  Strides strides = {Dims(sizes.size()), element_bytes};
  for (size_t d : order) {
    if (may_expand && *rc::gen::inRange(0, 6) == 0) continue;  // a stride of 0
    int64_t gap = *rc::gen::element<int64_t>(0, 0, 0, 1, 5, 64);
    strides.bytes[d] = strides.span + gap;
    strides.span = strides.bytes[d] * std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

/// Where the first element lies, so that no element lies before the buffer, after turning some dims round.
int64_t turn_some_round(Strides& strides, const Dims& sizes) {
  int64_t first = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (*rc::gen::inRange(0, 8) != 0) continue;
    first += strides.bytes[d] * std::max<int64_t>(sizes[d] - 1, 0);
    strides.bytes[d] = -strides.bytes[d];
  }
  return first;
}

/// The truth: one element at a time.
void copy_one_by_one(std::span<const int64_t> sizes, int64_t element_bytes, std::byte* dst,
                     std::span<const int64_t> dst_strides, const std::byte* src,
                     std::span<const int64_t> src_strides) {
  if (sizes.empty()) return void(std::memcpy(dst, src, element_bytes));
  for (int64_t i = 0; i < sizes[0]; ++i) {
    if (sizes.size() == 1) {  // saves a call for each element
      std::memcpy(dst + i * dst_strides[0], src + i * src_strides[0], element_bytes);
      continue;
    }
    copy_one_by_one(sizes.subspan(1), element_bytes, dst + i * dst_strides[0], dst_strides.subspan(1),
                    src + i * src_strides[0], src_strides.subspan(1));
  }
}

std::vector<std::byte> numbered_bytes(int64_t count) {
  std::vector<std::byte> bytes(count);
  for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
  return bytes;
}

/// Copies both ways into buffers that start `shift` bytes off alignment, and compares every byte of dst, gaps
/// too.
void expect_same(const Dims& sizes, int64_t element_bytes, const Strides& dst, int64_t dst_first,
                 const Strides& src, int64_t src_first, int64_t shift) {
  std::vector<std::byte> source = numbered_bytes(src.span + shift);
  std::vector<std::byte> copied(dst.span + shift, std::byte{0xEE}), expected = copied;
  copy_strided(sizes, element_bytes, copied.data() + shift + dst_first, dst.bytes,
               source.data() + shift + src_first, src.bytes);
  copy_one_by_one(sizes, element_bytes, expected.data() + shift + dst_first, dst.bytes,
                  source.data() + shift + src_first, src.bytes);
  ASSERT_TRUE(copied == expected) << list_text(sizes) << " of " << element_bytes << " bytes, dst "
                                  << list_text(dst.bytes) << ", src " << list_text(src.bytes);
}

RC_GTEST_PROP(CopyStrided, EqualsOneElementAtATime, ()) {
  auto ndim = *rc::gen::inRange<size_t>(0, 6);
  Dims sizes;
  int64_t most = 4000;  // elements
  for (size_t d = 0; d < ndim; ++d) {
    int64_t size = std::min(most, *rc::gen::element<int64_t>(0, 1, 1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 130));
    sizes.push_back(size);
    most /= std::max<int64_t>(size, 1);
  }
  auto element_bytes = *rc::gen::inRange<int64_t>(1, 17);
  Strides dst = random_strides(sizes, element_bytes, false);
  Strides src = random_strides(sizes, element_bytes, true);
  int64_t dst_first = turn_some_round(dst, sizes), src_first = turn_some_round(src, sizes);
  expect_same(sizes, element_bytes, dst, dst_first, src, src_first, *rc::gen::inRange<int64_t>(0, 17));
}

// Sizes around the tiles' and registers' edges.
TEST(CopyStrided, TransposesEveryElementSize) {
  for (int64_t element : {1, 2, 3, 4, 8, 12, 16}) {
    for (int64_t rows : {1, 2, 15, 16, 17, 64, 65, 80}) {
      for (int64_t cols : {1, 3, 8, 31, 32, 64, 129}) {
        Strides dst = {{rows * element, element}, rows * cols * element};
        Strides src = {{element, cols * element}, rows * cols * element};
        expect_same({cols, rows}, element, dst, 0, src, 0, 3);
      }
    }
  }
}

// At least 4 MiB, from where on stores go around the caches.
TEST(CopyStrided, StreamsLargeTransposes) {
  for (int64_t element : {1, 2, 4, 8, 16}) {
    int64_t rows = 2048, cols = (int64_t{4} << 20) / element / rows + 3;
    for (auto [pad, shift] : {std::pair(0, 0), {64, 7}}) {
      Strides dst = {{rows * element + pad, element}, cols * (rows * element + pad)};
      Strides src = {{element, cols * element}, rows * cols * element};
      expect_same({cols, rows}, element, dst, 0, src, 0, shift);
    }
  }
}

TEST(CopyStrided, StreamsLongRuns) {
  for (int64_t run : {64, 100, 1000, 70000}) {
    int64_t rows = ceil_div(int64_t{4} << 20, run);
    for (auto [gap, shift] : {std::pair(4, 1), {64, 0}}) {
      Strides dst = {{run + gap, 4}, rows * (run + gap)};
      Strides src = {{run + 2 * gap, 4}, rows * (run + 2 * gap)};
      expect_same({rows, run / 4}, 4, dst, 0, src, 0, shift);
    }
  }
}

TEST(CopyStrided, CopiesOneElementWithoutDims) {
  uint32_t from = 7, to = 0;
  copy_strided({}, 4, &to, {}, &from, {});
  EXPECT_EQ(to, 7u);
}

TEST(CopyStrided, TouchesNothingWhereThereIsNoElement) {
  std::array<int64_t, 3> sizes = {INT64_MAX, 0, INT64_MAX}, strides = {INT64_MAX, 1, INT64_MAX};
  EXPECT_NO_THROW(copy_strided(sizes, 8, nullptr, strides, nullptr, strides));
}

TEST(CopyStrided, RefusesWhatMakesNoSense) {
  std::byte a{}, b{};
  std::array<int64_t, 1> one = {1}, negative = {-1};
  EXPECT_THROW(copy_strided(one, 0, &a, one, &b, one), InvalidArgumentError);
  EXPECT_THROW(copy_strided(one, 17, &a, one, &b, one), InvalidArgumentError);
  EXPECT_THROW(copy_strided(negative, 1, &a, one, &b, one), InvalidArgumentError);
  EXPECT_THROW(copy_strided(one, 1, &a, {}, &b, one), InvalidArgumentError);
  EXPECT_THROW(copy_strided(one, 1, &a, one, &b, {}), InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
