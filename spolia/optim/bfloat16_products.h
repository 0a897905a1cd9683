// Products of bfloat16 matrices with the processor's dot products of pairs (AVX512_BF16), summed in float32.
// They take a triangle at the rate of the whole, which the matrix library cannot, and take it at every size.
#pragma once

#include <cstdint>

#include "spolia/optim/gemm.h"

namespace spolia {

/// What a kernel packs into: aligned to a cache line.
inline constexpr int64_t kBFloat16PanelBytes = int64_t{1} << 16;

/// As the dot products do, all take subnormal numbers for zero.
struct BFloat16Products {
  /// c = a b in float32, where c is m x n, a (not transposed) is m x k and b is k x n. `lower`: of a c with
  /// m = n the triangle with the diagonal; what lies above is unspecified. c overlaps neither a nor b.
  void (*product)(bool lower, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, float* c,
                  int64_t c_stride, void* panel);
  /// to = the symmetric matrix whose lower triangle is in `from`, in bfloat16, with zeros on the diagonal.
  /// Rows of both reach to the next multiple of 16 elements; what `to` has there is overwritten.
  void (*narrow_symmetric)(int64_t size, const float* from, int64_t from_stride, void* to, int64_t to_stride);
};

/// nullptr where the processor has no such instructions.
const BFloat16Products* bfloat16_products();

}  // namespace spolia
