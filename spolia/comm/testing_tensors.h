// Tensors for tests of operations between ranks: at any strides, read and written element by element.
//
// The tests of this room are functions of a World that throw where something is wrong, so that ranks may be
// threads or processes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// Throws, on the rank where it is so, unless `fine`.
template <class... Args>
void require(bool fine, fmt::format_string<Args...> format, Args&&... args) {
  if (!fine) throw CorruptError("test: {}", fmt::format(format, std::forward<Args>(args)...));
}

/// A number that is the same for the same numbers, and else looks random.
inline uint64_t mixed(std::initializer_list<int64_t> numbers) {
  uint64_t hash = 0x9E3779B97F4A7C15;
  for (int64_t number : numbers) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 0xBF58476D1CE4E5B9;
    hash ^= hash >> 29;
  }
  return hash;
}

/// `count` bytes that are the same for the same `seed`.
inline std::vector<std::byte> noise(int64_t seed, int64_t count) {
  std::vector<uint64_t> words(static_cast<size_t>(count / 8 + 1));
  uint64_t state = mixed({seed}) | 1;
  for (uint64_t& word : words) word = state = state * 0x5851F42D4C957F2D + 0x14057B7EF767814F;
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  return {bytes, bytes + count};
}

/// A small whole number as an element: those up to 127 in all dtypes that can be reduced, exactly.
inline void append_number(DType dtype, int64_t number, std::vector<std::byte>& bytes) {
  const auto append = [&](auto value) {
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), raw, raw + sizeof value);
  };
  const auto append_half = [&](DType half, int64_t value) {
    const auto single = static_cast<float>(value);
    uint16_t bits = 0;
    cast(half, &bits, DType::kFloat32, &single, 1);
    append(bits);
  };
  switch (dtype) {
    case DType::kFloat64:
      return append(static_cast<double>(number));
    case DType::kFloat32:
      return append(static_cast<float>(number));
    case DType::kFloat16:
    case DType::kBFloat16:
      return append_half(dtype, number);
    case DType::kComplex128:
      append(static_cast<double>(number));
      return append(static_cast<double>(-number));
    case DType::kComplex64:
      append(static_cast<float>(number));
      return append(static_cast<float>(-number));
    case DType::kComplex32:
      append_half(DType::kFloat16, number);
      return append_half(DType::kFloat16, -number);
    case DType::kBool:
      return append(static_cast<uint8_t>(number != 0));
    default:
      for (int64_t i = 0; i < element_bytes(dtype); ++i) {  // integers, little-endian
        append(static_cast<uint8_t>(static_cast<uint64_t>(number) >> (8 * i)));
      }
  }
}

enum class Arrangement { kDense, kGaps, kTransposed, kBackwards };
inline constexpr Arrangement kArrangements[] = {Arrangement::kDense, Arrangement::kGaps,
                                                Arrangement::kTransposed, Arrangement::kBackwards};

/// Elements in memory of its own.
class TestTensor {
 public:
  TestTensor(DType dtype, Dims shape, Arrangement arrangement = Arrangement::kDense) {
    if (is_sub_byte(dtype)) arrangement = Arrangement::kDense;
    const int64_t element = element_bytes(dtype);
    Dims strides(shape.size());
    int64_t span = element;
    for (size_t i = 0; i < shape.size(); ++i) {
      const size_t d = arrangement == Arrangement::kTransposed ? i : shape.size() - 1 - i;
      if (arrangement == Arrangement::kGaps) span += element;
      strides[d] = span;
      span *= std::max<int64_t>(shape[d], 1);
    }
    if (arrangement == Arrangement::kDense) span = byte_size(dtype, shape);
    memory_.assign(static_cast<size_t>(span), kGap);
    std::byte* data = memory_.data();
    if (arrangement == Arrangement::kBackwards) {
      for (size_t d = 0; d < shape.size(); ++d) {
        data += strides[d] * std::max<int64_t>(shape[d] - 1, 0);
        strides[d] = -strides[d];
      }
    }
    view_ = {data, dtype, std::move(shape), std::move(strides), {}};
  }
  TestTensor(TestTensor&&) = default;

  const View& view() const { return view_; }

  /// The elements, row-major and dense.
  std::vector<std::byte> elements() const {
    std::vector<std::byte> bytes(static_cast<size_t>(view_.bytes()));
    for_each_run(
        [&](std::byte* here, int64_t at, int64_t count) { std::copy_n(here, count, bytes.begin() + at); });
    return bytes;
  }
  void set_elements(const std::vector<std::byte>& bytes) {
    require(std::ssize(bytes) == view_.bytes(), "{} bytes for a tensor of {}", bytes.size(), view_.bytes());
    for_each_run(
        [&](std::byte* here, int64_t at, int64_t count) { std::copy_n(bytes.begin() + at, count, here); });
  }

  /// Throws where the elements differ, or where a byte between them was written.
  void require_elements(const std::vector<std::byte>& expected, std::string_view what) {
    require(elements() == expected, "{}: wrong elements ({}, {})", what, name_of(view_.dtype),
            shape_text(view_.shape));
    set_elements(std::vector<std::byte>(expected.size(), kGap));
    const bool gaps = std::ranges::all_of(memory_, [](std::byte byte) { return byte == kGap; });
    require(gaps, "{}: bytes between the elements were written", what);
    set_elements(expected);
  }

 private:
  static constexpr std::byte kGap{0xEE};

  /// Calls body(pointer, offset in the dense bytes, bytes): for each element, or once where elements are
  /// dense.
  template <class Body>
  void for_each_run(Body body) const {
    if (is_sub_byte(view_.dtype)) return body(view_.data, 0, view_.bytes());
    const int64_t element = element_bytes(view_.dtype), count = numel(view_.shape);
    for (int64_t i = 0; i < count; ++i) {
      std::byte* here = view_.data;
      for (int64_t d = std::ssize(view_.shape), rest = i; d-- > 0;) {
        const auto dim = static_cast<size_t>(d);
        here += rest % view_.shape[dim] * view_.strides[dim];
        rest /= view_.shape[dim];
      }
      body(here, i * element, element);
    }
  }

  std::vector<std::byte> memory_;
  View view_;
};

}  // namespace spolia
