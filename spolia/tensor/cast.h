// Casts between float64, float32, float16 and bfloat16: the values of PyTorch's `.to(dtype)`.
//
// Every cast goes through float32, as PyTorch's do: float64 to float16 or bfloat16 rounds twice, to float32
// first. Each rounding is IEEE 754's to nearest, ties to even; what is too large becomes infinity, subnormals
// are kept. A NaN stays a NaN: in bfloat16 it is always 0x7FC0; elsewhere its sign and the payload bits that
// fit are kept. It is made quiet, except from bfloat16 to float32, which moves bits. A cast from a dtype to
// itself copies bits.
//
// The caller's floating-point environment must be the default one (round to nearest, no flushing of
// subnormals). Results are the same with and without SIMD.
#pragma once

#include <cstdint>
#include <span>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// Whether values of `from` can become `to`: both are among the four.
bool can_cast(DType to, DType from);

/// Casts `count` (>= 0) contiguous elements. Pointers need no alignment and must not overlap.
/// UnsupportedError where can_cast() is false. Thread-safe for disjoint dst.
void cast(DType to, void* dst, DType from, const void* src, int64_t count);

/// The same for the element at every index of `sizes`; strides in bytes, as in copy_strided (copy.h).
void cast_strided(std::span<const int64_t> sizes, DType to, void* dst, std::span<const int64_t> dst_strides,
                  DType from, const void* src, std::span<const int64_t> src_strides);

}  // namespace spolia
