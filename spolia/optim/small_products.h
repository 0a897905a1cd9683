// Products of small float32 matrices, of which the matrix library computes a triangle no faster than the
// whole: there, packing and calls cost as much as the arithmetic. For r of a few hundred everything lies in
// the second cache and needs no packing.
#pragma once

#include <cstdint>

namespace spolia {

/// A row-major float32 matrix with `stride` elements a row, a multiple of kSmallLanes: a row's memory reaches
/// to its next multiple.
struct SmallMatrix {
  float* data = nullptr;
  int64_t stride = 0;
};
inline constexpr int64_t kSmallLanes = 16;
/// Up to how many rows the square products are taken here.
inline constexpr int64_t kSmallRows = 256;

/// Kernels for this processor; results depend on it. What lies between a matrix's columns and the next
/// multiple of kSmallLanes is read, has no influence on columns that exist, and is overwritten in results.
struct SmallProducts {
  /// The lower triangle of c = a b, size x size, with the diagonal; a is size x depth, b is depth x size.
  /// What lies above the diagonal is unspecified. c is neither a nor b.
  void (*lower)(int64_t size, int64_t depth, SmallMatrix a, SmallMatrix b, SmallMatrix c);
  /// c = a b, rows x columns.
  void (*product)(int64_t rows, int64_t columns, int64_t depth, SmallMatrix a, SmallMatrix b, SmallMatrix c);
  /// to = the transpose of from, which is rows x columns.
  void (*transpose)(int64_t rows, int64_t columns, SmallMatrix from, SmallMatrix to);
  /// Copies the part below the diagonal of a size x size matrix, which may be large, to the part above it.
  void (*mirror)(int64_t size, SmallMatrix matrix);
};

/// nullptr where the processor has neither AVX-512 nor AVX2 with fused multiply-adds.
const SmallProducts* small_products();

}  // namespace spolia
