// Tensors for tests of operations between ranks: on any device, at any strides, read and written element by
// element.
//
// The tests of this room are functions of a World that throw where something is wrong, so that ranks may be
// threads or processes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/device/buffer.h"
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

/// Bytes on a device. Those of the host's lie in a vector, whose ends sanitizers know.
class TestMemory {
 public:
  TestMemory(Device device, const std::vector<std::byte>& bytes) : device_(device) {
    if (device == Device{}) {
      host_ = bytes;
      return;
    }
    memory_ = Buffer(std::ssize(bytes), device);
    write(bytes);
  }
  TestMemory(Device device, int64_t bytes, std::byte value = {})
      : TestMemory(device, std::vector<std::byte>(static_cast<size_t>(bytes), value)) {}

  std::byte* data() { return device_ == Device{} ? host_.data() : memory_.data(); }
  Device device() const { return device_; }

  std::vector<std::byte> read() const {
    if (device_ == Device{}) return host_;
    std::vector<std::byte> bytes(static_cast<size_t>(memory_.size()));
    backend_of(device_).copy_to_host(bytes.data(), memory_.data(), memory_.size());
    return bytes;
  }
  void write(const std::vector<std::byte>& bytes) {
    if (device_ == Device{}) {
      std::copy(bytes.begin(), bytes.end(), host_.begin());
    } else {
      backend_of(device_).copy_from_host(memory_.data(), bytes.data(), memory_.size());
    }
  }

 private:
  Device device_;
  std::vector<std::byte> host_;
  Buffer memory_;
};

/// Numbers on a device.
template <class T>
class TestNumbers {
 public:
  TestNumbers(Device device, const std::vector<T>& numbers) : memory_(device, bytes_of(numbers)) {}

  /// `count` of them.
  View view(DType dtype, size_t first, size_t count) {
    const int64_t shape[] = {static_cast<int64_t>(count)};
    return dense_view(memory_.data() + first * sizeof(T), dtype, shape, memory_.device());
  }
  /// One, without dims.
  View at(DType dtype, size_t index) {
    return dense_view(memory_.data() + index * sizeof(T), dtype, {}, memory_.device());
  }
  std::vector<T> read() const {
    const std::vector<std::byte> bytes = memory_.read();
    std::vector<T> numbers(bytes.size() / sizeof(T));
    std::memcpy(numbers.data(), bytes.data(), bytes.size());
    return numbers;
  }

 private:
  static std::vector<std::byte> bytes_of(const std::vector<T>& numbers) {
    const auto bytes = std::as_bytes(std::span(numbers));
    return {bytes.begin(), bytes.end()};
  }

  TestMemory memory_;
};

enum class Arrangement { kDense, kGaps, kTransposed, kBackwards };
inline constexpr Arrangement kArrangements[] = {Arrangement::kDense, Arrangement::kGaps,
                                                Arrangement::kTransposed, Arrangement::kBackwards};

/// Elements in memory of its own.
class TestTensor {
 public:
  TestTensor(DType dtype, Dims shape, Arrangement arrangement = Arrangement::kDense, Device device = {})
      : TestTensor(dtype, shape, place(dtype, shape, arrangement), device) {}
  TestTensor(TestTensor&&) = default;

  const View& view() const { return view_; }

  /// The elements, row-major and dense.
  std::vector<std::byte> elements() const {
    const std::vector<std::byte> memory = memory_.read();
    std::vector<std::byte> bytes(static_cast<size_t>(view_.bytes()));
    for_each_run([&](int64_t here, int64_t at, int64_t count) {
      std::copy_n(memory.begin() + here, count, bytes.begin() + at);
    });
    return bytes;
  }
  void set_elements(const std::vector<std::byte>& bytes) {
    require(std::ssize(bytes) == view_.bytes(), "{} bytes for a tensor of {}", bytes.size(), view_.bytes());
    std::vector<std::byte> memory = memory_.read();
    for_each_run([&](int64_t here, int64_t at, int64_t count) {
      std::copy_n(bytes.begin() + at, count, memory.begin() + here);
    });
    memory_.write(memory);
  }

  /// Throws where the elements differ, or where a byte between them was written.
  void require_elements(const std::vector<std::byte>& expected, std::string_view what) {
    require(elements() == expected, "{}: wrong elements ({}, {})", what, name_of(view_.dtype),
            shape_text(view_.shape));
    set_elements(std::vector<std::byte>(expected.size(), kGap));
    const std::vector<std::byte> memory = memory_.read();
    const bool gaps = std::ranges::all_of(memory, [](std::byte byte) { return byte == kGap; });
    require(gaps, "{}: bytes between the elements were written", what);
    set_elements(expected);
  }

 private:
  static constexpr std::byte kGap{0xEE};

  /// Where elements lie in so many bytes.
  struct Place {
    Dims strides;
    int64_t first = 0, bytes = 0;
  };
  static Place place(DType dtype, const Dims& shape, Arrangement arrangement) {
    if (is_sub_byte(dtype)) arrangement = Arrangement::kDense;
    const int64_t element = element_bytes(dtype);
    Place place{Dims(shape.size()), 0, element};
    for (size_t i = 0; i < shape.size(); ++i) {
      const size_t d = arrangement == Arrangement::kTransposed ? i : shape.size() - 1 - i;
      if (arrangement == Arrangement::kGaps) place.bytes += element;
      place.strides[d] = place.bytes;
      place.bytes *= std::max<int64_t>(shape[d], 1);
    }
    if (arrangement == Arrangement::kDense) place.bytes = byte_size(dtype, shape);
    if (arrangement == Arrangement::kBackwards) {
      for (size_t d = 0; d < shape.size(); ++d) {
        place.first += place.strides[d] * std::max<int64_t>(shape[d] - 1, 0);
        place.strides[d] = -place.strides[d];
      }
    }
    return place;
  }

  TestTensor(DType dtype, const Dims& shape, const Place& place, Device device)
      : memory_(device, place.bytes, kGap),
        first_(place.first),
        view_{memory_.data() + first_, dtype, shape, place.strides, device} {}

  /// Calls body(offset in the memory, offset in the dense bytes, bytes): for each element, or once where
  /// elements are dense.
  template <class Body>
  void for_each_run(Body body) const {
    if (view_.is_dense()) return body(first_, 0, view_.bytes());
    const int64_t element = element_bytes(view_.dtype), count = numel(view_.shape);
    for (int64_t i = 0; i < count; ++i) {
      int64_t here = first_;
      for (int64_t d = std::ssize(view_.shape), rest = i; d-- > 0;) {
        const auto dim = static_cast<size_t>(d);
        here += rest % view_.shape[dim] * view_.strides[dim];
        rest /= view_.shape[dim];
      }
      body(here, i * element, element);
    }
  }

  TestMemory memory_;
  int64_t first_;
  View view_;
};

}  // namespace spolia
