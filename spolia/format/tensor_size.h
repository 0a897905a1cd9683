// The size of a tensor whose shape a stranger wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// Tensors of more dims are refused: PyTorch and NumPy compute with up to 64, and a pickle that refers to one
/// long shape again and again must not fill the memory.
inline constexpr size_t kMaxDims = 64;

/// byte_size(), which also refuses an empty shape whose other sizes overflow: strides are products of them.
/// CorruptError.
int64_t checked_tensor_size(DType dtype, std::span<const int64_t> shape);

}  // namespace spolia
