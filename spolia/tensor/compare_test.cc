#include "spolia/tensor/compare.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

using enum DType;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
ElementDifferences compare(DType dtype, const std::vector<T>& a, const std::vector<T>& b,
                           const Tolerance& tolerance = {}) {
  EXPECT_EQ(static_cast<size_t>(element_bytes(dtype)), sizeof(T));
  return compare_elements(dtype, a.data(), b.data(), std::ssize(a), tolerance);
}

template <class T>
std::string text(DType dtype, T element) {
  return element_text(dtype, &element);
}

TEST(Compare, Floats) {
  const ElementDifferences found =
      compare<float>(kFloat32, {1, 2, 4, -8, 0, 5}, {1, 2.5, 4, -8, 0.25, 3}, {.relative = 0.2});
  EXPECT_EQ(found.differing, 2);  // 2 and 2.5 are close
  EXPECT_EQ(found.first, 4);
  EXPECT_EQ(found.max_absolute, 2);
  EXPECT_EQ(found.sum_absolute, 2.75);
  EXPECT_EQ(found.max_relative, 1);
}

TEST(Compare, SpecialNumbers) {
  const std::vector<double> a = {kNan, -kNan, kInf, -kInf, 0.0, kInf, kNan, 1, kInf};
  const std::vector<double> b = {kNan, kNan, kInf, -kInf, -0.0, -kInf, 1, kNan, 1};
  const ElementDifferences found = compare(kFloat64, a, b, {.relative = 10, .absolute = 10});
  EXPECT_EQ(found.differing, 4);
  EXPECT_EQ(found.first, 5);
  EXPECT_EQ(found.nan_on_one_side, 2);
  EXPECT_EQ(found.max_absolute, kInf);
  EXPECT_EQ(compare<double>(kFloat64, {kNan}, {3}).max_absolute, 0);
  EXPECT_EQ(compare<double>(kFloat64, {3}, {kInf}, {.relative = 1}).differing, 1);
}

TEST(Compare, IntegersAreExact) {
  const int64_t big = int64_t{1} << 62;
  EXPECT_EQ(compare<int64_t>(kInt64, {big}, {big + 1}).max_absolute, 1);
  EXPECT_EQ(compare<int64_t>(kInt64, {INT64_MIN}, {INT64_MAX}).max_absolute, 0x1p64);
  EXPECT_EQ(compare<int64_t>(kInt64, {INT64_MAX}, {INT64_MIN}).max_absolute, 0x1p64);
  EXPECT_EQ(compare<uint64_t>(kUInt64, {UINT64_MAX}, {UINT64_MAX - 1}).max_absolute, 1);
  EXPECT_EQ(compare<int8_t>(kInt8, {-128}, {127}).max_absolute, 255);
  EXPECT_EQ(compare<uint8_t>(kUInt8, {128}, {127}).max_absolute, 1);
  EXPECT_EQ(compare<int16_t>(kInt16, {-1}, {1}).max_relative, 2);
  EXPECT_EQ(compare<uint16_t>(kUInt16, {10}, {11}, {.absolute = 1}).differing, 0);
  EXPECT_EQ(compare<uint8_t>(kBool, {0, 1}, {1, 1}).differing, 1);
}

TEST(Compare, ComplexNumbersByTheirParts) {
  using C = std::complex<float>;
  const ElementDifferences found =
      compare<C>(kComplex64, {C(1, 2), C(1, 2), C(5, 1)}, {C(1, 2), C(1, 2.5), C(4, 4)}, {.absolute = 0.5});
  EXPECT_EQ(found.differing, 1);
  EXPECT_EQ(found.first, 2);
  EXPECT_EQ(found.max_absolute, 3);
  EXPECT_EQ(found.sum_absolute, 3.5);
}

TEST(Compare, OtherDtypesByTheirBytes) {
  const ElementDifferences found = compare<uint8_t>(kFloat8E4M3FN, {1, 2, 3}, {1, 3, 4}, {.absolute = 100});
  EXPECT_EQ(found.differing, 2);
  EXPECT_EQ(found.first, 1);
  EXPECT_EQ(found.max_absolute, 0);
  EXPECT_EQ(compare<uint8_t>(kFloat4E2M1FN, {0x12}, {0x13}).differing, 1);
  EXPECT_EQ(compare<int32_t>(kQInt32, {7, 7}, {7, 8}).first, 1);
}

TEST(Compare, Nothing) { EXPECT_EQ(compare_elements(kFloat32, nullptr, nullptr, 0, {}).first, -1); }

TEST(Compare, Texts) {
  EXPECT_EQ(text(kFloat32, 0.1F), "0.1");
  EXPECT_EQ(text(kFloat64, 0.1), "0.1");
  EXPECT_EQ(text(kBFloat16, uint16_t{0x3FC0}), "1.5");
  EXPECT_EQ(text(kFloat16, uint16_t{0x7C00}), "inf");
  EXPECT_EQ(text(kFloat64, kNan), "nan");
  EXPECT_EQ(text(kInt8, int8_t{-3}), "-3");
  EXPECT_EQ(text(kUInt64, UINT64_MAX), "18446744073709551615");
  EXPECT_EQ(text(kBool, uint8_t{1}), "true");
  EXPECT_EQ(text(kBool, uint8_t{0}), "false");
  EXPECT_EQ(text(kBool, uint8_t{2}), "true (2)");
  EXPECT_EQ(text(kComplex64, std::complex<float>(1, -2)), "1-2j");
  EXPECT_EQ(text(kComplex128, std::complex<double>(0, kNan)), "0+nanj");
  EXPECT_EQ(text(kFloat8E5M2, uint8_t{0x3C}), "0x3c");
  EXPECT_EQ(text(kBits16, uint16_t{0x1234}), "0x1234");
}

// ---- Brute force: numpy.isclose, one number at a time ----

bool is_close(double a, double b, const Tolerance& t) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::abs(a - b) <= t.absolute + t.relative * std::abs(b);
}

/// The numbers of an element as doubles; only of dtypes whose numbers all are.
std::vector<double> numbers_of(DType dtype, const std::byte* element) {
  const int parts = info(dtype).kind == DTypeKind::kComplex ? 2 : 1;
  const DType part = dtype == kComplex128  ? kFloat64
                     : dtype == kComplex64 ? kFloat32
                     : dtype == kComplex32 ? kFloat16
                                           : dtype;
  std::vector<double> numbers(parts);
  for (int p = 0; p < parts; ++p) {
    const std::byte* at = element + p * element_bytes(part);
    int64_t integer = 0;
    std::memcpy(&integer, at, static_cast<size_t>(element_bytes(part)));
    const int unused = 64 - info(part).bits;
    if (info(part).kind == DTypeKind::kFloat)
      cast(kFloat64, &numbers[p], part, at, 1);
    else if (part == kInt32 || part == kInt16 || part == kInt8)
      numbers[p] = static_cast<double>(integer << unused >> unused);
    else
      numbers[p] = static_cast<double>(integer);
  }
  return numbers;
}

RC_GTEST_PROP(Compare, AgreesWithBruteForce, ()) {
  const DType dtype = *rc::gen::element(kFloat64, kFloat32, kFloat16, kBFloat16, kInt32, kInt16, kInt8,
                                        kUInt32, kUInt16, kUInt8, kBool, kComplex128, kComplex64, kComplex32);
  const Tolerance tolerance = {*rc::gen::element(0.0, 0.001, 1.0), *rc::gen::element(0.0, 0.5, 100.0)};
  const auto any_number = [](size_t count) {
    return rc::gen::resize(rc::kNominalSize, rc::gen::inRange<size_t>(0, count));
  };
  const size_t count = *any_number(3000);  // several blocks
  const size_t width = static_cast<size_t>(element_bytes(dtype));
  std::vector<std::byte> a(count * width);
  for (std::byte& byte : a) byte = static_cast<std::byte>(*any_number(256));
  std::vector<std::byte> b = a;
  for (size_t changes = b.empty() ? 0 : *any_number(20); changes > 0; --changes) {
    b[*any_number(b.size())] = static_cast<std::byte>(*rc::gen::element(0x00, 0x3C, 0x7F, 0x80, 0xFF));
  }

  ElementDifferences expected;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<double> x = numbers_of(dtype, &a[i * width]), y = numbers_of(dtype, &b[i * width]);
    bool close = true, nan = false;
    double distance = 0;
    for (size_t p = 0; p < x.size(); ++p) {
      close = close && is_close(x[p], y[p], tolerance);
      nan = nan || std::isnan(x[p]) != std::isnan(y[p]);
      if (x[p] == y[p] || std::isnan(x[p]) || std::isnan(y[p])) continue;
      distance = std::max(distance, std::abs(x[p] - y[p]));
      if (std::isinf(y[p]) || y[p] == 0) continue;
      expected.max_relative = std::max(expected.max_relative, std::abs(x[p] - y[p]) / std::abs(y[p]));
    }
    expected.max_absolute = std::max(expected.max_absolute, distance);
    expected.sum_absolute += distance;
    expected.nan_on_one_side += nan;
    expected.differing += !close;
    if (!close && expected.first < 0) expected.first = static_cast<int64_t>(i);
  }

  const ElementDifferences found =
      compare_elements(dtype, a.data(), b.data(), static_cast<int64_t>(count), tolerance);
  RC_ASSERT(found.differing == expected.differing);
  RC_ASSERT(found.first == expected.first);
  RC_ASSERT(found.nan_on_one_side == expected.nan_on_one_side);
  RC_ASSERT(found.max_absolute == expected.max_absolute);
  RC_ASSERT(found.sum_absolute == expected.sum_absolute);
  RC_ASSERT(found.max_relative == expected.max_relative);
}

}  // namespace
}  // namespace spolia
