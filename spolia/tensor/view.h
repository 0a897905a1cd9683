// Views: elements in memory that somebody else owns, at any strides.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include "spolia/device/device.h"
#include "spolia/tensor/dtype.h"
#include "spolia/tensor/shape.h"

namespace spolia {

/// Element (i0, i1, ...) lies at data + sum of i_d * strides[d], in bytes. A plain value; the memory is
/// borrowed. `Byte`: std::byte, or const std::byte for memory that is only read.
template <class Byte>
struct BasicView {
  Byte* data = nullptr;
  DType dtype = DType::kUInt8;
  Dims shape;
  Dims strides;  // in bytes, one a dim
  Device device;

  int64_t bytes() const { return byte_size(dtype, shape); }
  /// Whether the elements lie one after the other in row-major order.
  bool is_dense() const {
    int64_t width = element_bytes(dtype);
    for (size_t d = shape.size(); d-- > 0;) {
      if (shape[d] != 1 && strides[d] != width) return false;
      width *= shape[d];
    }
    return true;
  }
  /// A view that may be written can be read.
  operator BasicView<const std::byte>() const
    requires(!std::is_const_v<Byte>)
  {
    return {data, dtype, shape, strides, device};
  }
};
using View = BasicView<std::byte>;
using ConstView = BasicView<const std::byte>;

/// Dense elements of host memory, row-major. Precondition: `data` holds byte_size(dtype, shape) bytes.
template <class Byte>
BasicView<Byte> dense_view(Byte* data, DType dtype, std::span<const int64_t> shape, Device device = {}) {
  Dims strides = row_major_strides(shape);
  for (int64_t& stride : strides) stride *= element_bytes(dtype);
  return {data, dtype, Dims(shape), std::move(strides), device};
}

/// Bytes of host memory.
inline View byte_view(std::span<std::byte> bytes) {
  const int64_t shape[] = {std::ssize(bytes)};
  return dense_view(bytes.data(), DType::kUInt8, shape);
}
inline ConstView byte_view(std::span<const std::byte> bytes) {
  const int64_t shape[] = {std::ssize(bytes)};
  return dense_view(bytes.data(), DType::kUInt8, shape);
}

}  // namespace spolia
