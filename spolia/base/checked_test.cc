#include "spolia/base/checked.h"

#include <string>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace spolia {
namespace {

__extension__ using Wide = __int128;

std::optional<int64_t> narrowed(Wide value) {
  if (value < INT64_MIN || value > INT64_MAX) return std::nullopt;
  return static_cast<int64_t>(value);
}

rc::Gen<int64_t> edges_and_others() {
  return rc::gen::oneOf(
      rc::gen::arbitrary<int64_t>(),
      rc::gen::element<int64_t>(0, 1, -1, 2, INT64_MAX, INT64_MIN, INT64_MAX - 1, int64_t{1} << 31,
                                int64_t{1} << 32, 3037000499, 3037000500));
}

RC_GTEST_PROP(Checked, EqualsWiderArithmetic, ()) {
  int64_t a = *edges_and_others(), b = *edges_and_others();
  RC_ASSERT(try_add(a, b) == narrowed(Wide{a} + b));
  RC_ASSERT(try_mul(a, b) == narrowed(Wide{a} * b));
}

TEST(Checked, ThrowsCorruptAndSaysWhat) {
  EXPECT_EQ(checked_add(2, 3), 5);
  EXPECT_EQ(checked_mul(-2, 3), -6);
  EXPECT_THROW(checked_add(INT64_MAX, 1), CorruptError);
  try {
    checked_mul(INT64_MAX, 2, "the end of a payload");
    FAIL();
  } catch (const CorruptError& error) {
    EXPECT_EQ(std::string(error.what()), "the end of a payload overflows 64 bits: 9223372036854775807 * 2");
  }
}

TEST(Checked, CastKeepsTheValueOrThrows) {
  EXPECT_EQ(checked_cast<uint8_t>(255), 255);
  EXPECT_THROW(checked_cast<uint8_t>(256), CorruptError);
  EXPECT_THROW(checked_cast<uint64_t>(-1), CorruptError);
  EXPECT_THROW(checked_cast<int64_t>(UINT64_MAX), CorruptError);
}

TEST(Checked, RoundsUp) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(7, 3), 3);
  EXPECT_EQ(ceil_div(INT64_MAX, 2), (int64_t{1} << 62));
  EXPECT_EQ(align_up(0, 64), 0);
  EXPECT_EQ(align_up(64, 64), 64);
  EXPECT_EQ(align_up(65, 64), 128);
  EXPECT_THROW(align_up(INT64_MAX, 4096), CorruptError);
}

}  // namespace
}  // namespace spolia
