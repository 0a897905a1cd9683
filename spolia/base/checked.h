// Arithmetic on sizes and offsets that never wraps: 64-bit, signed, checked.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "spolia/base/error.h"

namespace spolia {

/// The sum, product or difference, or nothing where it does not fit in 64 signed bits.
inline std::optional<int64_t> try_add(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_add_overflow(a, b, &r) ? std::nullopt : std::optional(r);
}
inline std::optional<int64_t> try_mul(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_mul_overflow(a, b, &r) ? std::nullopt : std::optional(r);
}

/// The same, throwing CorruptError("WHAT overflows 64 bits"). For values that come from files.
inline int64_t checked_add(int64_t a, int64_t b, std::string_view what = "a sum of sizes") {
  if (auto r = try_add(a, b)) return *r;
  throw CorruptError("{} overflows 64 bits: {} + {}", what, a, b);
}
inline int64_t checked_mul(int64_t a, int64_t b, std::string_view what = "a product of sizes") {
  if (auto r = try_mul(a, b)) return *r;
  throw CorruptError("{} overflows 64 bits: {} * {}", what, a, b);
}

/// `value` as another integer type; CorruptError where it does not fit.
template <std::integral To, std::integral From>
To checked_cast(From value, std::string_view what = "a size") {
  if (!std::in_range<To>(value)) throw CorruptError("{} is out of range: {}", what, value);
  return static_cast<To>(value);
}

/// a / b rounded up, for a >= 0 and b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/// `value` rounded up to a multiple of `unit` > 0.
inline int64_t align_up(int64_t value, int64_t unit) { return checked_mul(ceil_div(value, unit), unit); }

}  // namespace spolia
