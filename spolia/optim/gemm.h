// Matrix products: the thin seam to the matrix library (docs/decisions/0017-matrix-library.md says which and
// why).
//
// All matrices are row-major, each with its own leading dimension. What is computed depends on the shapes,
// the dtypes, the number of threads and the kind of processor alone, so that one machine gives the same bits
// each time.
#pragma once

#include <cstdint>
#include <memory>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// A matrix of a product: element (i, j) lies at data + (i * stride + j) elements.
struct MatrixIn {
  const void* data = nullptr;
  int64_t stride = 0;
  bool transposed = false;  // what is multiplied is the transpose of what lies there
};

/// Whether this processor multiplies bfloat16 faster than float32. It follows from the processor's kind and
/// is not measured, so that every run on a machine takes the same way: bfloat16 dot products alone are no
/// faster than float32 on Intel's processors, where it takes AMX; on others they are.
bool bfloat16_products_are_fast();

/// A calculator of products that keeps the library's prepared kernels and scratch memory between calls. Not
/// thread-safe; it may move between threads.
class Gemm {
 public:
  /// `threads` (>= 1) work on a product. InvalidArgumentError where it is less.
  explicit Gemm(int threads = 1);
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;
  ~Gemm();

  /// c = a b, where c is m x n, a is m x k and b is k x n. `in` is the dtype of a and b, `out` of c: float32
  /// to float32, bfloat16 to bfloat16 or float32 (always accumulated in float32), float64 to float64 (plain
  /// loops, for checking). UnsupportedError for other dtypes. Pointers are aligned to their elements; c
  /// overlaps neither a nor b. An error of the library is thrown as an Error.
  void multiply(DType in, DType out, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c,
                int64_t c_stride);

  int threads() const { return threads_; }
  /// The floating-point operations asked for since this was made: 2 m n k a product.
  int64_t operations() const { return operations_; }

 private:
  struct Library;
  int threads_;
  int64_t operations_ = 0;
  std::unique_ptr<Library> library_;
};

}  // namespace spolia
