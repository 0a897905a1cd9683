#include "spolia/tensor/shape.h"

#include <algorithm>

#include <fmt/format.h>

#include "spolia/base/checked.h"

namespace spolia {

int64_t numel(std::span<const int64_t> sizes) {
  int64_t count = 1;
  bool empty = false;
  for (int64_t size : sizes) {
    if (size < 0) throw CorruptError("the shape {} has a negative size", list_text(sizes));
    empty = empty || size == 0;
  }
  if (empty) return 0;
  for (int64_t size : sizes) count = checked_mul(count, size, "the number of elements of a shape");
  return count;
}

Dims row_major_strides(std::span<const int64_t> sizes) {
  Dims strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = checked_mul(strides[d], std::max<int64_t>(sizes[d], 1), "a stride");
  }
  return strides;
}

std::string shape_text(std::span<const int64_t> sizes) {
  return sizes.empty() ? "scalar" : fmt::format("{}", fmt::join(sizes, "x"));
}

std::string list_text(std::span<const int64_t> numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

}  // namespace spolia
