// Newton-Schulz: the nearest orthogonal matrix, nearly, by matrix products alone.
//
// X = G / ‖G‖, then for each step X ← (a I + b XXᵀ + c (XXᵀ)²) X: an odd polynomial of the singular values
// that moves them towards 1 and leaves the singular vectors alone. Source: K. Jordan and others, "Muon"
// (2024), from Björck and Bowie (1971). The Gram form iterates on R = XXᵀ and the product Q of all
// polynomials instead, and multiplies X once for several steps: for matrices that are much wider than high it
// takes a fraction of the operations. It starts again from QX every two or three steps, since what rounding
// makes of the small eigenvalues of R grows by a² a step.
//
// In bfloat16 all diagonals stay float32, and only what lies beside them is rounded: there the square
// matrices are small, for they tend to the identity. So what comes out is nearer to the exact result than
// what PyTorch's Muon computes, which rounds X, XXᵀ and the polynomial.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/optim/gemm.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// One step's polynomial: σ → a σ + b σ³ + c σ⁵.
struct NewtonSchulzCoefficients {
  double a = 0, b = 0, c = 0;
  friend bool operator==(const NewtonSchulzCoefficients&, const NewtonSchulzCoefficients&) = default;
};

/// How ε keeps the division by the norm from zero.
enum class EpsilonRule : uint8_t {
  kClamped,  // by max(‖G‖, ε), as PyTorch
  kAdded,    // by ‖G‖ + ε, as Keller Jordan and HyperParallel
};

/// What is computed with.
enum class NewtonSchulzPrecision : uint8_t {
  kInput,     // float64 for a float64 input, float32 for float32, else kBFloat16
  kFloat32,   // float32 throughout
  kBFloat16,  // kBFloat16Products where those are faster (gemm.h) and the coefficients can stand their
              // rounding, else float32; good to bfloat16 either way
  kBFloat16Products,  // products take bfloat16 operands; some of the Gram form stay float32 where steep
                      // coefficients or few rows want it
};

enum class NewtonSchulzForm : uint8_t { kByShape, kStandard, kGram };

struct NewtonSchulzOptions {
  /// One for each step; a list shorter than `steps` repeats its last entry.
  std::vector<NewtonSchulzCoefficients> coefficients = {{3.4445, -4.7750, 2.0315}};
  int steps = 5;
  double norm_factor = 1;  // the norm is multiplied by it before ε comes in
  double epsilon = 1e-7;
  EpsilonRule epsilon_rule = EpsilonRule::kClamped;
  NewtonSchulzPrecision precision = NewtonSchulzPrecision::kInput;
  NewtonSchulzForm form = NewtonSchulzForm::kByShape;
  friend bool operator==(const NewtonSchulzOptions&, const NewtonSchulzOptions&) = default;
};

/// The sets of the field by name, with as many steps as they have: "jordan" (the default), "quintic",
/// "polar_express" (divided by 1.02 ‖G‖ + ε), "cans", "ten_steps" (singular values within .0005 of 1).
/// NotFoundError for other names.
NewtonSchulzOptions newton_schulz_set(std::string_view name);

/// Operations, up to a factor, of five steps in the form that takes fewer (docs/decisions/0017): with r and l
/// the shorter and the longer side, min(15 r² l + 5 r³, 6 r² l + 14 r³). It follows from the shape alone, so
/// that ranks on unlike processors agree on it. CorruptError on overflow.
int64_t newton_schulz_work(int64_t rows, int64_t columns);

/// Which form kByShape takes for such a matrix. `bfloat16`: whether products take bfloat16.
NewtonSchulzForm newton_schulz_form(int64_t rows, int64_t columns, const NewtonSchulzOptions& options,
                                    bool bfloat16);

struct SmallProducts;

/// A calculator with its scratch memory, which grows to what the largest matrix needs and is kept. Not
/// thread-safe; may move between threads. The same input gives the same bits on the same kind of processor
/// and number of threads.
class NewtonSchulz {
 public:
  explicit NewtonSchulz(int threads = 1);

  /// Orthogonalises each matrix of `input`: its last two dims, where dims before them are a batch. `output`
  /// has the same shape and takes any dtype that casts; both are host memory with any strides. It may be
  /// `input` itself. Zero gives zero, NaN gives NaN; no other finite value gives a NaN, however large or
  /// small, unless kBFloat16Products is asked of coefficients that cannot stand it, as "cans" cannot. Empty
  /// matrices are left alone. InvalidArgumentError for fewer than two dims, unequal shapes, no coefficients,
  /// or steps outside [0, 100); UnsupportedError for dtypes that are no floats.
  void orthogonalise(const NewtonSchulzOptions& options, const ConstView& input, const View& output);

  /// The matrices orthogonalised since this was made.
  int64_t matrices() const { return matrices_; }
  /// The floating-point operations that the products took, of small triangles those of the triangle.
  int64_t operations() const { return gemm_.operations() + own_operations_; }

 private:
  template <class Real>
  struct Square;
  enum class TakenAs : uint8_t { kReal, kBFloat16, kBoth };
  template <class Real>
  void run(const NewtonSchulzOptions& options, DType wide, bool narrow, const ConstView& input,
           const View& output, bool tall);
  template <class Real>
  void gram_of(DType in, void* x, double factor, const Square<Real>& out, TakenAs as);
  template <class Real>
  void square_product(const NewtonSchulzCoefficients& of, const Square<Real>& a, const Square<Real>& b,
                      bool narrow, const Square<Real>& out, TakenAs as);
  template <class Real>
  void complete(const Square<Real>& out, TakenAs as);
  template <class Real>
  void multiply_by(const Square<Real>& factor, const void* x, void* out);
  const SmallProducts* small_kernels(DType in) const;

  Gemm gemm_;
  int64_t matrices_ = 0, own_operations_ = 0;
  int64_t rows_ = 0, columns_ = 0, stride_ = 0, square_stride_ = 0,
          narrow_stride_ = 0;  // of the matrix at hand, transposed to be wide
  Buffer loaded_, x_, next_x_, transposed_, sums_, diagonals_;
  std::array<Buffer, 4> squares_, narrow_squares_;
};

}  // namespace spolia
