#include "spolia/tensor/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include <fmt/format.h>

#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

constexpr int64_t kBlock = 1024;  // numbers that are decoded together

/// The dtype of a complex number's parts; other dtypes are their own.
DType part_of(DType dtype) {
  switch (dtype) {
    case DType::kComplex128:
      return DType::kFloat64;
    case DType::kComplex64:
      return DType::kFloat32;
    case DType::kComplex32:
      return DType::kFloat16;
    default:
      return dtype;
  }
}

// ---- Decoding: every number as a double, an int64_t or a uint64_t ----

template <class Stored, class Number>
void widen(const std::byte* from, Number* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Stored stored;
    std::memcpy(&stored, from + i * static_cast<int64_t>(sizeof stored), sizeof stored);
    to[i] = stored;
  }
}

void decode(DType dtype, const std::byte* from, double* to, int64_t count) {
  cast(DType::kFloat64, to, dtype, from, count);
}
void decode(DType dtype, const std::byte* from, int64_t* to, int64_t count) {
  switch (element_bytes(dtype)) {
    case 1:
      return widen<int8_t>(from, to, count);
    case 2:
      return widen<int16_t>(from, to, count);
    case 4:
      return widen<int32_t>(from, to, count);
    default:
      return widen<int64_t>(from, to, count);
  }
}
void decode(DType dtype, const std::byte* from, uint64_t* to, int64_t count) {
  switch (element_bytes(dtype)) {
    case 1:
      return widen<uint8_t>(from, to, count);
    case 2:
      return widen<uint16_t>(from, to, count);
    case 4:
      return widen<uint32_t>(from, to, count);
    default:
      return widen<uint64_t>(from, to, count);
  }
}

bool is_signed(DType dtype) {
  return dtype == DType::kInt64 || dtype == DType::kInt32 || dtype == DType::kInt16 || dtype == DType::kInt8;
}

// ---- Distances ----

/// How far apart two numbers are that are not equal.
struct Distance {
  double absolute;   // NaN where just one of them is
  double magnitude;  // |b|
};

Distance distance(double a, double b) { return {std::abs(a - b), std::abs(b)}; }
Distance distance(uint64_t a, uint64_t b) {
  return {static_cast<double>(a > b ? a - b : b - a), static_cast<double>(b)};
}
Distance distance(int64_t a, int64_t b) {
  const uint64_t ua = static_cast<uint64_t>(a),
                 ub = static_cast<uint64_t>(b);  // whose difference cannot overflow
  return {static_cast<double>(a > b ? ua - ub : ub - ua), std::abs(static_cast<double>(b))};
}

bool are_equal(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }
bool are_equal(int64_t a, int64_t b) { return a == b; }
bool are_equal(uint64_t a, uint64_t b) { return a == b; }

bool is_close(const Distance& d, const Tolerance& tolerance) {
  return std::isfinite(d.magnitude) && d.absolute <= tolerance.absolute + tolerance.relative * d.magnitude;
}

/// Adds the element at `index`, whose `parts` numbers are these.
template <class Number>
void add_element(ElementDifferences& found, int64_t index, const Number* a, const Number* b, int64_t parts,
                 const Tolerance& tolerance) {
  bool close = true, has_nan = false;
  double absolute = 0;
  for (int64_t p = 0; p < parts; ++p) {
    if (are_equal(a[p], b[p])) continue;
    const Distance d = distance(a[p], b[p]);
    close = close && is_close(d, tolerance);
    has_nan = has_nan || std::isnan(d.absolute);
    absolute = std::max(absolute, d.absolute);  // keeps `absolute` where the other is NaN
    if (std::isfinite(d.magnitude) && d.magnitude > 0) {
      found.max_relative = std::max(found.max_relative, d.absolute / d.magnitude);
    }
  }
  found.max_absolute = std::max(found.max_absolute, absolute);
  found.sum_absolute += absolute;
  found.nan_on_one_side += has_nan ? 1 : 0;
  if (close) return;
  if (found.differing++ == 0) found.first = index;
}

template <class Number>
void compare_numbers(ElementDifferences& found, DType dtype, const std::byte* a, const std::byte* b,
                     int64_t count, const Tolerance& tolerance) {
  const DType part = part_of(dtype);
  const int64_t size = element_bytes(dtype), parts = size / element_bytes(part), block = kBlock / parts;
  std::array<Number, kBlock> as, bs;
  for (int64_t done = 0; done < count; done += block) {
    const int64_t n = std::min(block, count - done);
    const std::byte *block_a = a + done * size, *block_b = b + done * size;
    if (std::memcmp(block_a, block_b, static_cast<size_t>(n * size)) == 0) continue;
    decode(part, block_a, as.data(), n * parts);
    decode(part, block_b, bs.data(), n * parts);
    for (int64_t i = 0; i < n; ++i) {
      add_element(found, done + i, &as[i * parts], &bs[i * parts], parts, tolerance);
    }
  }
}

void compare_bytes(ElementDifferences& found, int64_t size, const std::byte* a, const std::byte* b,
                   int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::memcmp(a + i * size, b + i * size, static_cast<size_t>(size)) == 0) continue;
    if (found.differing++ == 0) found.first = i;
  }
}

std::string hex_text(const std::byte* bytes, int64_t size) {
  std::string text = "0x";
  for (int64_t i = size; i-- > 0;) text += fmt::format("{:02x}", std::to_integer<unsigned>(bytes[i]));
  return text;
}

std::string float_text(DType dtype, const std::byte* element) {
  if (dtype == DType::kFloat64) {
    double value = 0;
    decode(dtype, element, &value, 1);
    return fmt::format("{}", value);
  }
  float value = 0;  // has fewer digits to print
  cast(DType::kFloat32, &value, dtype, element, 1);
  return fmt::format("{}", value);
}

std::string complex_text(DType dtype, const std::byte* element) {
  const DType part = part_of(dtype);
  const std::string imaginary = float_text(part, element + element_bytes(part));
  return float_text(part, element) + (imaginary[0] == '-' ? "" : "+") + imaginary + "j";
}

std::string integer_text(DType dtype, const std::byte* element) {
  if (is_signed(dtype)) {
    int64_t value = 0;
    decode(dtype, element, &value, 1);
    return fmt::format("{}", value);
  }
  uint64_t value = 0;
  decode(dtype, element, &value, 1);
  return fmt::format("{}", value);
}

std::string bool_text(const std::byte* element) {
  const unsigned value = std::to_integer<unsigned>(*element);
  return value == 0 ? "false" : value == 1 ? "true" : fmt::format("true ({})", value);
}

}  // namespace

ElementDifferences compare_elements(DType dtype, const void* a, const void* b, int64_t count,
                                    const Tolerance& tolerance) {
  ElementDifferences found;
  const auto *bytes_a = static_cast<const std::byte*>(a), *bytes_b = static_cast<const std::byte*>(b);
  const int64_t size = element_bytes(dtype);
  if (count == 0 || std::memcmp(a, b, static_cast<size_t>(count * size)) == 0) return found;
  switch (info(dtype).kind) {
    case DTypeKind::kFloat:
    case DTypeKind::kComplex:
      compare_numbers<double>(found, dtype, bytes_a, bytes_b, count, tolerance);
      break;
    case DTypeKind::kInteger:
    case DTypeKind::kBool:
      if (is_signed(dtype))
        compare_numbers<int64_t>(found, dtype, bytes_a, bytes_b, count, tolerance);
      else
        compare_numbers<uint64_t>(found, dtype, bytes_a, bytes_b, count, tolerance);
      break;
    case DTypeKind::kOpaque:
      compare_bytes(found, size, bytes_a, bytes_b, count);
  }
  return found;
}

std::string element_text(DType dtype, const void* element) {
  const auto* bytes = static_cast<const std::byte*>(element);
  switch (info(dtype).kind) {
    case DTypeKind::kFloat:
      return float_text(dtype, bytes);
    case DTypeKind::kComplex:
      return complex_text(dtype, bytes);
    case DTypeKind::kInteger:
      return integer_text(dtype, bytes);
    case DTypeKind::kBool:
      return bool_text(bytes);
    case DTypeKind::kOpaque:
      break;
  }
  return hex_text(bytes, element_bytes(dtype));
}

}  // namespace spolia
