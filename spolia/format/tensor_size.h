// The size of a tensor whose shape a stranger wrote.
#pragma once

#include <cstdint>
#include <span>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// byte_size(), which also refuses an empty shape whose other sizes overflow: strides are products of them.
/// CorruptError.
int64_t checked_tensor_size(DType dtype, std::span<const int64_t> shape);

}  // namespace spolia
