// The inner loops of cast.h, with and without SIMD.
#pragma once

#include <cstdint>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// Casts `count` elements; no alignment, no overlap.
using CastKernel = void (*)(void* dst, const void* src, int64_t count);

/// Portable C++. Null where can_cast() is false.
CastKernel scalar_cast_kernel(DType to, DType from);

/// AVX2 and F16C. Null where can_cast() is false, or where the processor has neither.
CastKernel simd_cast_kernel(DType to, DType from);

}  // namespace spolia
