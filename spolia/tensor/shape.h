// Dims: the sizes, strides or offsets of a tensor, one number a dimension, outermost first.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "spolia/base/inline_vector.h"

namespace spolia {

/// Up to five dims lie in place. A 0-d tensor has none.
using Dims = InlineVector<int64_t, 5>;

/// The number of elements, 1 for 0-d. CorruptError where a size is negative or the product overflows.
int64_t numel(std::span<const int64_t> sizes);

/// Row-major strides, in elements; sizes of 0 count as 1. CorruptError where a stride overflows, as it may
/// even where there are no elements.
Dims row_major_strides(std::span<const int64_t> sizes);

/// "2x3"; "scalar" for 0-d.
std::string shape_text(std::span<const int64_t> sizes);

/// "[2, 3]": offsets and shapes in messages.
std::string list_text(std::span<const int64_t> numbers);

}  // namespace spolia
