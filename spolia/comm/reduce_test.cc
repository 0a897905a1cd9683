#include "spolia/comm/reduce.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace spolia {
namespace {

/// The reduction of one element a rank.
template <class T>
T reduced(DType dtype, ReduceOp op, const std::vector<T>& ranks) {
  std::vector<const std::byte*> from;
  for (const T& value : ranks) from.push_back(reinterpret_cast<const std::byte*>(&value));
  T result{};
  const std::array to = {reinterpret_cast<std::byte*>(&result)};
  reduce(dtype, op, from, to, 0, sizeof result);
  return result;
}

TEST(Reduce, WrapsIntegers) {
  EXPECT_EQ(reduced<int8_t>(DType::kInt8, ReduceOp::kSum, {127, 1}), -128);
  EXPECT_EQ(reduced<uint8_t>(DType::kUInt8, ReduceOp::kSum, {200, 100}), 44);
  EXPECT_EQ(reduced<int16_t>(DType::kInt16, ReduceOp::kSum, {-32768, -1}), 32767);
  EXPECT_EQ(reduced<int32_t>(DType::kInt32, ReduceOp::kSum, {INT32_MAX, 1}), INT32_MIN);
  EXPECT_EQ(reduced<int64_t>(DType::kInt64, ReduceOp::kSum, {INT64_MIN, -1}), INT64_MAX);
  EXPECT_EQ(reduced<uint64_t>(DType::kUInt64, ReduceOp::kSum, {UINT64_MAX, 2}), 1u);
}

TEST(Reduce, ChoosesBySign) {
  EXPECT_EQ(reduced<int8_t>(DType::kInt8, ReduceOp::kMin, {1, -1, 0}), -1);
  EXPECT_EQ(reduced<int64_t>(DType::kInt64, ReduceOp::kMax, {INT64_MIN, -5, -7}), -5);
  EXPECT_EQ(reduced<uint64_t>(DType::kUInt64, ReduceOp::kMax, {1, UINT64_MAX}), UINT64_MAX);
  EXPECT_EQ(reduced<uint16_t>(DType::kUInt16, ReduceOp::kMin, {40000, 50000}), 40000);
  EXPECT_EQ(reduced<uint32_t>(DType::kUInt32, ReduceOp::kMax, {3000000000u, 1u}), 3000000000u);
}

TEST(Reduce, TakesBoolsAsTruths) {
  EXPECT_EQ(reduced<uint8_t>(DType::kBool, ReduceOp::kSum, {1, 1, 0}), 1);
  EXPECT_EQ(reduced<uint8_t>(DType::kBool, ReduceOp::kMax, {0, 2}), 1);
  EXPECT_EQ(reduced<uint8_t>(DType::kBool, ReduceOp::kMin, {1, 2}), 1);
  EXPECT_EQ(reduced<uint8_t>(DType::kBool, ReduceOp::kMin, {1, 0}), 0);
}

TEST(Reduce, LetsTheFirstNaNAndTheFirstOfEqualsWin) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::isnan(reduced<double>(DType::kFloat64, op, {nan, 1.0})));
    EXPECT_TRUE(std::isnan(reduced<double>(DType::kFloat64, op, {1.0, nan, 2.0})));
    EXPECT_TRUE(std::signbit(reduced<double>(DType::kFloat64, op, {-0.0, 0.0})));
    EXPECT_FALSE(std::signbit(reduced<double>(DType::kFloat64, op, {0.0, -0.0})));
    const double second = std::bit_cast<double>(std::bit_cast<uint64_t>(nan) | 1);
    EXPECT_EQ(std::bit_cast<uint64_t>(reduced<double>(DType::kFloat64, op, {0.0, nan, second})),
              std::bit_cast<uint64_t>(nan));
  }
  EXPECT_EQ(reduced<float>(DType::kFloat32, ReduceOp::kMin, {1.0f, -INFINITY}), -INFINITY);
}

TEST(Reduce, RoundsHalvesOnce) {
  // 256 + 1 rounds to 256 in bfloat16: added one by one, eight ones would be lost.
  const std::vector<uint16_t> ones = {0x4380, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80};
  EXPECT_EQ(reduced<uint16_t>(DType::kBFloat16, ReduceOp::kSum, ones), 0x4384);  // 264
  // 2048 + 1 + 1 in float16.
  EXPECT_EQ(reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum, {0x6800, 0x3C00, 0x3C00}), 0x6801);  // 2050
  EXPECT_EQ(reduced<uint32_t>(DType::kComplex32, ReduceOp::kSum, {0x3C006800, 0x3C003C00, 0x3C003C00}),
            0x42006801u);
  // Past float16's largest.
  EXPECT_EQ(reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum, {0x7BFF, 0x7BFF}), 0x7C00);
  EXPECT_EQ(reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum, {0x7BFF, 0x7BFF, 0xFBFF}), 0x7BFF);
  EXPECT_EQ(reduced<uint16_t>(DType::kBFloat16, ReduceOp::kMin, {0x3F80, 0xBF80}), 0xBF80);
}

TEST(Reduce, AddsInTheOrderOfTheRanks) {
  EXPECT_EQ(reduced<float>(DType::kFloat32, ReduceOp::kSum, {1e8f, 1.0f, -1e8f}), 0.0f);
  EXPECT_EQ(reduced<float>(DType::kFloat32, ReduceOp::kSum, {1e8f, -1e8f, 1.0f}), 1.0f);
}

// Longer than a tile, off alignment, from a part of the buffers, and into several targets, one of which is a
// source.
TEST(Reduce, GoesFromAnywhereToSeveral) {
  constexpr int64_t kCount = 5000, kBegin = 3;
  std::vector<std::byte> first(kCount * 8 + 1), second(kCount * 8 + 3), other(kCount * 8 + 5);
  std::byte *a = first.data() + 1, *b = second.data() + 3, *c = other.data() + 5;
  for (int64_t i = 0; i < kCount; ++i) {
    const double x = static_cast<double>(i), y = 0.5;
    std::memcpy(a + i * 8, &x, 8);
    std::memcpy(b + i * 8, &y, 8);
  }
  const std::array<const std::byte*, 2> from = {a, b};
  const std::array<std::byte*, 2> to = {b, c};
  reduce(DType::kFloat64, ReduceOp::kSum, from, to, kBegin * 8, kCount * 8);
  for (int64_t i = 0; i < kCount; ++i) {
    double in_b = 0, in_c = 0;
    std::memcpy(&in_b, b + i * 8, 8);
    std::memcpy(&in_c, c + i * 8, 8);
    ASSERT_EQ(in_b, i < kBegin ? 0.5 : static_cast<double>(i) + 0.5) << i;
    ASSERT_EQ(in_c, i < kBegin ? 0.0 : static_cast<double>(i) + 0.5) << i;
  }
}

TEST(Reduce, KnowsWhatItCannot) {
  EXPECT_TRUE(can_reduce(DType::kComplex64, ReduceOp::kSum));
  EXPECT_FALSE(can_reduce(DType::kComplex64, ReduceOp::kMax));
  EXPECT_TRUE(can_reduce(DType::kBool, ReduceOp::kMin));
  for (DType dtype :
       {DType::kFloat8E4M3FN, DType::kFloat4E2M1FN, DType::kQInt8, DType::kBits8, DType::kUInt4}) {
    EXPECT_FALSE(can_reduce(dtype, ReduceOp::kSum)) << name_of(dtype);
  }
}

}  // namespace
}  // namespace spolia
