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

/// A calculator of products that keeps the library's prepared kernels, scratch memory and packed panels
/// between calls. Not thread-safe; it may move between threads.
///
/// Operands are float32 or bfloat16, and results float32; or both are float64 (plain loops, for checking).
/// UnsupportedError for other dtypes. Pointers are aligned to their elements; a result overlaps neither
/// operand. An error of the library is thrown as an Error.
class Gemm {
 public:
  /// `threads` (>= 1) work on a product. InvalidArgumentError where it is less. `library_alone`: bfloat16
  /// products are the library's where kernels of our own would take them, to compare with.
  explicit Gemm(int threads = 1, bool library_alone = false);
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;
  ~Gemm();

  /// c = a b, where c is m x n, a is m x k and b is k x n.
  void multiply(DType in, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c, int64_t c_stride);
  /// The lower triangle of c = a b with its diagonal, where c is n x n, a is n x k, not transposed, and b is
  /// k x n. What lies above is unspecified.
  void multiply_lower(DType in, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c, int64_t c_stride);

  int threads() const { return threads_; }
  /// The floating-point operations that were computed since this was made: 2 m n k a product.
  int64_t operations() const { return operations_; }

 private:
  struct Library;
  bool multiply_here(DType in, bool lower, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c,
                     int64_t c_stride);
  int threads_;
  int64_t operations_ = 0;
  std::unique_ptr<Library> library_;
};

}  // namespace spolia
