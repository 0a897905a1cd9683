#include "spolia/tensor/cast.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/tensor/cast_kernels.h"

namespace spolia {
namespace {

using enum DType;
constexpr std::array kFloats = {kFloat64, kFloat32, kFloat16, kBFloat16};

/// The value of a 16-bit pattern by the formats' definition, in exact arithmetic.
double value_of(uint16_t pattern, int exponent_bits) {
  int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = (pattern & 0x7FFF) >> mantissa_bits, mantissa = pattern & ((1 << mantissa_bits) - 1);
  double magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return std::copysign(magnitude, (pattern & 0x8000) != 0 ? -1 : 1);
}

/// Rounds by search in the table of all non-negative values: the nearest, the even pattern where two tie.
class NearestSearch {
 public:
  explicit NearestSearch(int exponent_bits) {
    int mantissa_bits = 15 - exponent_bits;
    infinity_ = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
    for (int p = 0; p < infinity_; ++p) values_.push_back(value_of(static_cast<uint16_t>(p), exponent_bits));
    // Where the next value would be, were there room: from half-way to it on, values become infinite.
    values_.push_back(values_.back() + (values_.back() - values_[values_.size() - 2]));
  }

  /// `value` is no NaN.
  uint16_t round(double value) const {
    double magnitude = std::fabs(value);
    size_t above = std::ranges::lower_bound(values_, magnitude) - values_.begin();
    size_t pattern;
    if (above == values_.size()) {
      pattern = infinity_;
    } else if (values_[above] == magnitude) {
      pattern = above;
    } else {
      double up = values_[above] - magnitude, down = magnitude - values_[above - 1];  // exact
      pattern = up < down || (up == down && above % 2 == 0) ? above : above - 1;
    }
    return static_cast<uint16_t>(pattern | (std::signbit(value) ? 0x8000 : 0));
  }

  /// Every value, and every point half-way between two.
  std::vector<double> boundaries() const {
    std::vector<double> points;
    for (size_t i = 0; i + 1 < values_.size(); ++i) {
      points.push_back(values_[i]);
      points.push_back((values_[i] + values_[i + 1]) / 2);
    }
    return points;
  }

 private:
  uint16_t infinity_;
  std::vector<double> values_;
};

const NearestSearch& search(DType dtype) {
  static const NearestSearch half(5), bfloat16(8);
  return dtype == kFloat16 ? half : bfloat16;
}

std::vector<uint16_t> all_patterns() {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  return patterns;
}

template <class To, class From>
std::vector<To> cast_all(DType to, DType from, const std::vector<From>& values) {
  std::vector<To> out(values.size());
  cast(to, out.data(), from, values.data(), static_cast<int64_t>(values.size()));
  return out;
}

class CastFrom16Bits : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Both, CastFrom16Bits, testing::Values(kFloat16, kBFloat16));

TEST_P(CastFrom16Bits, EveryPatternHasItsValue) {
  std::vector<uint16_t> patterns = all_patterns();
  auto floats = cast_all<float>(kFloat32, GetParam(), patterns);
  auto doubles = cast_all<double>(kFloat64, GetParam(), patterns);
  for (uint16_t p : patterns) {
    double value = value_of(p, GetParam() == kFloat16 ? 5 : 8);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(floats[p]) && std::isnan(doubles[p])) << p;
      EXPECT_EQ(std::signbit(floats[p]), (p & 0x8000) != 0) << p;
    } else {
      EXPECT_EQ(std::bit_cast<uint64_t>(doubles[p]), std::bit_cast<uint64_t>(value)) << p;
      EXPECT_EQ(std::bit_cast<uint64_t>(double{floats[p]}), std::bit_cast<uint64_t>(value)) << p;
    }
  }
}

TEST_P(CastFrom16Bits, EveryPatternComesBack) {
  std::vector<uint16_t> patterns = all_patterns();
  auto via_float = cast_all<uint16_t>(GetParam(), kFloat32, cast_all<float>(kFloat32, GetParam(), patterns));
  auto via_double =
      cast_all<uint16_t>(GetParam(), kFloat64, cast_all<double>(kFloat64, GetParam(), patterns));
  EXPECT_EQ(cast_all<uint16_t>(GetParam(), GetParam(), patterns), patterns);
  for (uint16_t p : patterns) {
    uint16_t expected = p;
    if (std::isnan(value_of(p, GetParam() == kFloat16 ? 5 : 8))) {
      expected = GetParam() == kFloat16 ? p | 0x0200 : 0x7FC0;  // quiet; the one NaN
    }
    EXPECT_EQ(via_float[p], expected) << p;
    EXPECT_EQ(via_double[p], expected) << p;
  }
}

TEST_P(CastFrom16Bits, EveryPatternToTheOtherIsTheNearest) {
  DType other = GetParam() == kFloat16 ? kBFloat16 : kFloat16;
  std::vector<uint16_t> patterns = all_patterns();
  auto others = cast_all<uint16_t>(other, GetParam(), patterns);
  for (uint16_t p : patterns) {
    double value = value_of(p, GetParam() == kFloat16 ? 5 : 8);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(value_of(others[p], other == kFloat16 ? 5 : 8))) << p;
    } else {
      EXPECT_EQ(others[p], search(other).round(value)) << p;
    }
  }
}

/// Floats at, just below and just above every value and every half-way point of `dtype`, both signs.
std::vector<float> floats_around_boundaries(DType dtype) {
  std::vector<float> floats;
  for (double point : search(dtype).boundaries()) {
    auto at = static_cast<float>(point);
    for (float f :
         {at, std::nextafter(at, -1.0f), std::nextafter(at, std::numeric_limits<float>::infinity())}) {
      floats.push_back(f);
      floats.push_back(-f);
    }
  }
  return floats;
}

/// Every `step`th float that is no NaN.
std::vector<float> sampled_floats(uint32_t step) {
  std::vector<float> floats;
  for (uint64_t bits = 0; bits <= 0xFFFFFFFF; bits += step) {
    auto f = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (!std::isnan(f)) floats.push_back(f);
  }
  return floats;
}

class CastTo16Bits : public testing::TestWithParam<DType> {
 protected:
  void expect_nearest(const std::vector<float>& floats) {
    auto patterns = cast_all<uint16_t>(GetParam(), kFloat32, floats);
    std::vector<double> doubles(floats.begin(), floats.end());
    EXPECT_EQ(cast_all<uint16_t>(GetParam(), kFloat64, doubles), patterns);
    for (size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(patterns[i], search(GetParam()).round(floats[i])) << floats[i];
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Both, CastTo16Bits, testing::Values(kFloat16, kBFloat16));

TEST_P(CastTo16Bits, BoundariesAreTheNearest) { expect_nearest(floats_around_boundaries(GetParam())); }
TEST_P(CastTo16Bits, SamplesAreTheNearest) { expect_nearest(sampled_floats(10007)); }
TEST_P(CastTo16Bits, SlowDenseSamplesAreTheNearest) { expect_nearest(sampled_floats(127)); }

TEST_P(CastTo16Bits, OverflowIsInfinite) {
  float largest_kept = GetParam() == kFloat16 ? 65519.996f : std::bit_cast<float>(0x7F7F7FFF);
  std::vector<float> floats = {largest_kept, std::nextafter(largest_kept, INFINITY), INFINITY, -INFINITY};
  uint16_t infinity = GetParam() == kFloat16 ? 0x7C00 : 0x7F80;
  std::vector<uint16_t> expected = {static_cast<uint16_t>(infinity - 1), infinity, infinity,
                                    static_cast<uint16_t>(infinity | 0x8000)};
  EXPECT_EQ(cast_all<uint16_t>(GetParam(), kFloat32, floats), expected);
}

TEST(Cast, NansStayNans) {
  std::vector<uint32_t> patterns;
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t payload : {1u, 0x1000u, 0x2000u, 0x3FFFFFu, 0x400000u, 0x412345u, 0x7FFFFFu}) {
      for (int i = 0; i < 9; ++i) patterns.push_back(sign | 0x7F800000 | payload);  // both loops of a kernel
    }
  }
  auto halves = cast_all<uint16_t>(kFloat16, kFloat32, patterns);
  auto bfloats = cast_all<uint16_t>(kBFloat16, kFloat32, patterns);
  auto doubles = cast_all<double>(kFloat64, kFloat32, patterns);
  for (size_t i = 0; i < patterns.size(); ++i) {
    EXPECT_EQ(halves[i], (patterns[i] >> 16 & 0x8000) | 0x7E00 | (patterns[i] >> 13 & 0x3FF));
    EXPECT_EQ(bfloats[i], 0x7FC0);
    EXPECT_TRUE(std::isnan(doubles[i]));
  }
  EXPECT_EQ(cast_all<uint32_t>(kFloat32, kFloat32, patterns), patterns);
}

TEST(Cast, DoubleRoundsToFloat32First) {
  // Just above half-way between 1 and the next bfloat16 or float16: once rounded to float32, exactly
  // half-way.
  std::vector<double> bfloat = {1 + 0x1p-8 + 0x1p-40}, half = {1 + 0x1p-11 + 0x1p-40};
  EXPECT_EQ(cast_all<uint16_t>(kBFloat16, kFloat64, bfloat), std::vector<uint16_t>{0x3F80});
  EXPECT_EQ(cast_all<uint16_t>(kFloat16, kFloat64, half), std::vector<uint16_t>{0x3C00});
}

TEST(Cast, DoubleToFloat32IsExactAtTheEdges) {
  std::vector<double> doubles = {0x1p-149,       0x1p-150, 0x1.8p-150, -0.0, 0x1.fffffefffffffp127,
                                 0x1.ffffffp127, 1e300,    -1e300,     0.1,  1 + 0x1p-24,
                                 1 + 0x1.8p-23};
  std::vector<float> floats = {0x1p-149f, 0.0f,      0x1p-149f, -0.0f, 0x1.fffffep127f, INFINITY,
                               INFINITY,  -INFINITY, 0.1f,      1.0f,  1 + 0x1p-22f};
  EXPECT_EQ(cast_all<float>(kFloat32, kFloat64, doubles), floats);
  EXPECT_TRUE(std::signbit(cast_all<float>(kFloat32, kFloat64, doubles)[3]));
}

// Bits of every kind, NaNs with payloads too, at lengths around the register's and off alignment.
TEST(Cast, SimdEqualsScalar) {
  if (simd_cast_kernel(kFloat16, kFloat32) == nullptr) GTEST_SKIP() << "no AVX2 and F16C here";
  std::vector<std::byte> bits(8 * 40000 + 1);
  uint64_t state = 1;
  for (std::byte& b : bits)
    b = static_cast<std::byte>((state = state * 6364136223846793005u + 1442695040888963407u) >> 56);
  // In every second element an exponent of all ones or all zeros, which random bits seldom have.
  for (size_t i = 0; i + 1 < bits.size(); i += 16) bits[i + 7] = i % 32 == 0 ? std::byte{0x7F} : std::byte{0};
  for (DType to : kFloats) {
    for (DType from : kFloats) {
      for (int64_t count : {0, 1, 7, 8, 9, 16, 31, 40000}) {
        for (int64_t shift : {0, 1}) {
          std::vector<std::byte> simd(count * element_bytes(to) + 2, std::byte{0xEE}), scalar = simd;
          simd_cast_kernel(to, from)(simd.data() + shift, bits.data() + shift, count);
          scalar_cast_kernel(to, from)(scalar.data() + shift, bits.data() + shift, count);
          EXPECT_TRUE(simd == scalar) << name_of(from) << " to " << name_of(to) << ", " << count;
        }
      }
    }
  }
}

TEST(Cast, SlowSimdEqualsScalarForEveryFloat) {
  constexpr int64_t kBlock = 1 << 20;
  std::vector<uint32_t> floats(kBlock);
  std::vector<uint16_t> simd(kBlock), scalar(kBlock);
  for (DType to : {kFloat16, kBFloat16}) {
    if (simd_cast_kernel(to, kFloat32) == nullptr) GTEST_SKIP() << "no AVX2 and F16C here";
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) floats[i] = static_cast<uint32_t>(first + i);
      simd_cast_kernel(to, kFloat32)(simd.data(), floats.data(), kBlock);
      scalar_cast_kernel(to, kFloat32)(scalar.data(), floats.data(), kBlock);
      ASSERT_TRUE(simd == scalar) << first;
    }
  }
}

TEST(Cast, OnlyTheFourFloatsAreCast) {
  for (size_t t = 0; t < kDTypeCount; ++t) {
    for (size_t f = 0; f < kDTypeCount; ++f) {
      auto to = static_cast<DType>(t), from = static_cast<DType>(f);
      bool both = info(to).kind == DTypeKind::kFloat && info(from).kind == DTypeKind::kFloat;
      EXPECT_EQ(can_cast(to, from), both) << name_of(from) << " to " << name_of(to);
    }
  }
  std::array<std::byte, 8> a{}, b{};
  EXPECT_THROW(cast(kInt32, a.data(), kFloat32, b.data(), 1), UnsupportedError);
  EXPECT_THROW(cast_strided({}, kFloat32, a.data(), {}, kBool, b.data(), {}), UnsupportedError);
}

RC_GTEST_PROP(CastStrided, EqualsOneElementAtATime, ()) {
  DType to = *rc::gen::elementOf(kFloats), from = *rc::gen::elementOf(kFloats);
  std::array<int64_t, 3> sizes;
  for (int64_t& size : sizes) size = *rc::gen::element<int64_t>(0, 1, 2, 5, 31, 33, 40);
  // dst in row-major order or with its last two dims swapped, perhaps with gaps; src likewise, or expanded.
  auto strides = [&](int64_t element, bool may_expand) {
    bool swapped = *rc::gen::arbitrary<bool>(), gaps = *rc::gen::arbitrary<bool>();
    int64_t inner = element * (gaps ? 2 : 1), outer = inner * sizes[swapped ? 1 : 2] + (gaps ? 3 : 0);
    std::array<int64_t, 3> out = {outer * sizes[swapped ? 2 : 1], outer, inner};
    if (swapped) std::swap(out[1], out[2]);
    if (may_expand && *rc::gen::inRange(0, 4) == 0) out[*rc::gen::inRange(0, 3)] = 0;
    return out;
  };
  auto dst_strides = strides(element_bytes(to), false), src_strides = strides(element_bytes(from), true);
  auto span = [&](const auto& steps) {
    return sizes[0] * steps[0] + sizes[1] * steps[1] + sizes[2] * steps[2] + 16;
  };
  std::vector<std::byte> src(span(src_strides)), dst(span(dst_strides), std::byte{0xEE}), expected = dst;
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<std::byte>((i * 2654435761u) >> 11);

  cast_strided(sizes, to, dst.data(), dst_strides, from, src.data(), src_strides);
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      for (int64_t k = 0; k < sizes[2]; ++k) {
        scalar_cast_kernel(to, from)(
            expected.data() + i * dst_strides[0] + j * dst_strides[1] + k * dst_strides[2],
            src.data() + i * src_strides[0] + j * src_strides[1] + k * src_strides[2], 1);
      }
    }
  }
  RC_ASSERT(dst == expected);
}

TEST(Cast, NoElementsNeedNoMemory) {
  for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    EXPECT_NO_THROW(cast(dtype, nullptr, dtype, nullptr, 0));
    EXPECT_NO_THROW(cast(DType::kFloat64, nullptr, dtype, nullptr, 0));
  }
}

}  // namespace
}  // namespace spolia
