#include "spolia/optim/newton_schulz.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/bfloat16_products.h"
#include "spolia/optim/kernels.h"
#include "spolia/optim/small_products.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/strided.h"

namespace spolia {
namespace {

NewtonSchulzCoefficients coefficients_of(const NewtonSchulzOptions& options, int step) {
  return options.coefficients[std::min(static_cast<size_t>(step), options.coefficients.size() - 1)];
}

/// How the Gram form goes about its steps: in stretches, each of which starts from XXᵀ. What rounding makes
/// of its small eigenvalues grows by a² with each step of a stretch.
class GramPlan {
 public:
  GramPlan(const NewtonSchulzOptions& options, int64_t rows, bool bfloat16)
      : steps_(options.steps), bfloat16_(bfloat16) {
    const double a = coefficients_of(options, 0).a * coefficients_of(options, 1).a;
    gentle_ = bfloat16 && rows >= 128 && a * a < 150;
  }
  /// The length of the stretch after `done` steps. The first X is the smallest, and can stand the longest
  /// where the coefficients are gentle; else two steps are safe, and later three where float32 helps.
  int length(int done) const { return std::min((done == 0) == gentle_ ? 3 : 2, steps_ - done); }
  /// Whether R² takes bfloat16 at a step of a stretch, and whether the products by which R becomes PRP do:
  /// later stretches of three are float32 but for what no further step multiplies.
  bool narrow_square(int step, int length) const { return bfloat16_ && (gentle_ || length < 3 || step > 0); }
  bool narrow_update(int length) const { return bfloat16_ && (gentle_ || length < 3); }

 private:
  int steps_;
  bool bfloat16_, gentle_;
};

/// What the forms cost, in r³ operations of the large products, where the short side is r and the long one
/// wide · r. A product of float32 takes as long as two of bfloat16.
double standard_cost(double wide, int steps) { return steps * (3 * wide + 1); }
double gram_cost(double wide, int steps, const GramPlan& plan, bool bfloat16) {
  auto cost_of = [&](bool narrow) { return narrow || !bfloat16 ? 1 : 2; };
  double cost = 0;
  for (int done = 0; done < steps;) {
    const int length = plan.length(done);
    cost += 3 * wide;
    for (int step = 0; step < length; ++step) {
      cost += cost_of(plan.narrow_square(step, length));
      if (step + 1 < length) cost += 2 * cost_of(plan.narrow_update(length));
      if (step > 0) cost += 1;  // Q
    }
    done += length;
  }
  return cost;
}

/// Whether no singular value leaves the polynomials' range where each step's result is off by a rounding to
/// bfloat16. Some sets cannot stand that for matrices of rank one: what comes out at 1.97 instead of 1.96
/// grows without bound.
bool stands_bfloat16(const NewtonSchulzOptions& options) {
  constexpr double kOff = 1 + 1. / 256;
  double largest = kOff / options.norm_factor;
  for (int step = 0; step < options.steps; ++step) {
    const NewtonSchulzCoefficients k = coefficients_of(options, step);
    auto image = [&k](double x) { return std::abs(x * (k.a + x * x * (k.b + x * x * k.c))); };
    double most = image(largest);
    // Where it is flat: a + 3 b x² + 5 c x⁴ = 0.
    const double root = std::sqrt(std::max(0., 9 * k.b * k.b - 20 * k.a * k.c));
    const double half = -(3 * k.b + std::copysign(root, k.b)) / 2;
    for (double square : {half / (5 * k.c), k.a / half})
      if (square > 0 && square < largest * largest) most = std::max(most, image(std::sqrt(square)));
    largest = most * kOff;
  }
  return largest < 2;
}

/// A row length for `columns` elements: whole cache lines, and not a multiple of a page, where all rows would
/// share the few places of the caches.
int64_t row_stride(int64_t columns, int64_t width) {
  int64_t bytes = align_up(checked_mul(columns, width), 64);
  return (bytes % 4096 == 0 ? bytes + 64 : bytes) / width;
}

void* room(Buffer& buffer, int64_t rows, int64_t stride, int64_t width) {
  int64_t bytes = checked_mul(checked_mul(rows, stride), width);
  if (buffer.size() < bytes) buffer = Buffer(bytes);
  return buffer.data();
}

template <class Real>
constexpr DType kDTypeOf = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;

/// How large X may be for its Gram matrix to be taken as a small product: what stays in the second cache,
/// twice.
constexpr int64_t kSmallElements = int64_t{1} << 17;

void check(const NewtonSchulzOptions& options, const ConstView& input, const ConstView& output) {
  if (input.shape.size() < 2 || input.shape != output.shape)
    throw InvalidArgumentError(
        "what is orthogonalised has two dims or more, and the result its shape, not {} and {}",
        shape_text(input.shape), shape_text(output.shape));
  if (options.coefficients.empty()) throw InvalidArgumentError("Newton-Schulz is given no coefficients");
  if (options.steps < 0 || options.steps >= 100)
    throw InvalidArgumentError("Newton-Schulz takes 0 to 99 steps, not {}", options.steps);
  if (!can_cast(DType::kFloat32, input.dtype) || !can_cast(output.dtype, DType::kFloat32))
    throw UnsupportedError("Newton-Schulz takes floating-point numbers, not {} to {}", name_of(input.dtype),
                           name_of(output.dtype));
}

}  // namespace

NewtonSchulzOptions newton_schulz_set(std::string_view name) {
  NewtonSchulzOptions options;
  const NewtonSchulzCoefficients jordan = options.coefficients.front();
  if (name == "jordan") return options;
  if (name == "quintic") {
    options.coefficients = {{4.0848, -6.8946, 2.9270},
                            {3.9505, -6.3029, 2.6377},
                            {3.7418, -5.5913, 2.3037},
                            {2.8769, -3.1427, 1.2046},
                            {2.8366, -3.0525, 1.2012}};
  } else if (name == "polar_express") {
    options.coefficients = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                            {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                            {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                            {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
                            {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
    options.norm_factor = 1.02;
    options.epsilon_rule = EpsilonRule::kAdded;
  } else if (name == "cans") {
    options.coefficients = {{8.4703, -25.1081, 18.6293},
                            {4.1828, -3.1087, .5806},
                            {3.9619, -2.9541, .5630},
                            {3.2866, -2.4647, .5074},
                            {2.2737, -1.6447, .4162}};
  } else if (name == "ten_steps") {
    options.coefficients.assign(8, jordan);
    options.coefficients.resize(10, {2, -1.5, .5});
  } else {
    throw NotFoundError(
        "there is no set of Newton-Schulz coefficients {}: jordan, quintic, polar_express, cans, ten_steps",
        quote(name));
  }
  options.steps = static_cast<int>(options.coefficients.size());
  return options;
}

int64_t newton_schulz_work(int64_t rows, int64_t columns) {
  const int64_t r = std::min(rows, columns), l = std::max(rows, columns);
  const int64_t wide = checked_mul(checked_mul(r, r), l), square = checked_mul(checked_mul(r, r), r);
  const int64_t standard = checked_add(checked_mul(15, wide), checked_mul(5, square));
  const int64_t gram = checked_add(checked_mul(6, wide), checked_mul(14, square));
  return std::min(standard, gram);
}

NewtonSchulzForm newton_schulz_form(int64_t rows, int64_t columns, const NewtonSchulzOptions& options,
                                    bool bfloat16) {
  const int64_t small = std::min(rows, columns), large = std::max(rows, columns);
  if (small == 0 || options.steps == 0) return NewtonSchulzForm::kStandard;
  const double wide = static_cast<double>(large) / static_cast<double>(small);
  const double gram = gram_cost(wide, options.steps, GramPlan(options, small, bfloat16), bfloat16);
  return gram < .95 * standard_cost(wide, options.steps)  // a small gain is none
             ? NewtonSchulzForm::kGram
             : NewtonSchulzForm::kStandard;
}

NewtonSchulz::NewtonSchulz(int threads) : gemm_(threads) {}

/// The kernels of small products, where `in` and the matrix at hand are theirs.
const SmallProducts* NewtonSchulz::small_kernels(DType in) const {
  return in == DType::kFloat32 && rows_ <= kSmallRows ? small_products() : nullptr;
}

void NewtonSchulz::orthogonalise(const NewtonSchulzOptions& options, const ConstView& input,
                                 const View& output) {
  check(options, input, output);
  const size_t dims = input.shape.size();
  const int64_t rows = input.shape[dims - 2], columns = input.shape[dims - 1];
  const bool tall = rows > columns;
  rows_ = tall ? columns : rows;
  columns_ = tall ? rows : columns;
  if (numel(input.shape) == 0) return;

  const bool reference = options.precision == NewtonSchulzPrecision::kInput && input.dtype == DType::kFloat64;
  const bool full = options.precision == NewtonSchulzPrecision::kFloat32 ||
                    (options.precision == NewtonSchulzPrecision::kInput && input.dtype == DType::kFloat32);
  const bool narrow = options.steps > 0 &&
                      (options.precision == NewtonSchulzPrecision::kBFloat16Products ||
                       (!reference && !full && bfloat16_products_are_fast() && stands_bfloat16(options)));
  auto matrix = [&](auto view, int64_t offset) {
    view.data += offset;
    Dims shape = view.shape, strides = view.strides;
    view.shape.assign(shape.end() - 2, shape.end());
    view.strides.assign(strides.end() - 2, strides.end());
    return view;
  };
  InlineVector<PairDim, 5> batch;
  for (size_t d = 0; d + 2 < dims; ++d)
    batch.push_back({input.shape[d], output.strides[d], input.strides[d]});
  for_each_offset(batch, [&](int64_t to, int64_t from) {
    if (reference) {
      run<double>(options, DType::kFloat64, false, matrix(input, from), matrix(output, to), tall);
    } else {
      run<float>(options, DType::kFloat32, narrow, matrix(input, from), matrix(output, to), tall);
    }
    ++matrices_;
  });
}

/// A symmetric matrix. `narrow`, where there are products that take bfloat16: what lies beside its diagonal,
/// rounded, and zeros on it. The diagonal is where these matrices are large, and stays as exact as it is.
/// TakenAs says which of the two are whole: taken as bfloat16 alone, `values` has its lower triangle only.
template <class Real>
struct NewtonSchulz::Square {
  Real* values = nullptr;
  std::byte* narrow = nullptr;
};

/// The lower triangle of `out` is there: makes the whole of it, as the products to come take it.
template <class Real>
void NewtonSchulz::complete(const Square<Real>& out, TakenAs as) {
  if constexpr (sizeof(Real) == 4) {
    const SmallProducts* small = small_products();
    const BFloat16Products* own = bfloat16_products();
    if (as != TakenAs::kReal && own)
      own->narrow_symmetric(rows_, out.values, square_stride_, out.narrow, narrow_stride_);
    if (as == TakenAs::kBFloat16 && own) return;
    small ? small->mirror(rows_, {out.values, square_stride_})
          : kernels<Real>().mirror(rows_, out.values, square_stride_);
    if (as == TakenAs::kReal || own) return;
    for (int64_t i = 0; i < rows_; ++i) {
      std::byte* row = out.narrow + i * narrow_stride_ * 2;
      bfloat16_kernels().narrow(rows_, out.values + i * square_stride_, row);
      std::memset(row + i * 2, 0, 2);
    }
  } else {
    kernels<Real>().mirror(rows_, out.values, square_stride_);
  }
}

/// out = factor · X Xᵀ.
template <class Real>
void NewtonSchulz::gram_of(DType in, void* x, double factor, const Square<Real>& out, TakenAs as) {
  const SmallProducts* small = small_kernels(in);
  if (sizeof(Real) == 4 && small && rows_ * columns_ <= kSmallElements) {
    const SmallMatrix wide{static_cast<float*>(x), stride_};
    const SmallMatrix tall{static_cast<float*>(room(transposed_, columns_, square_stride_, 4)),
                           square_stride_};
    small->transpose(rows_, columns_, wide, tall);
    small->lower(rows_, columns_, wide, tall, {reinterpret_cast<float*>(out.values), square_stride_});
    own_operations_ += rows_ * rows_ * columns_;
  } else {
    gemm_.multiply_lower(in, rows_, columns_, {x, stride_}, {x, stride_, true}, out.values, square_stride_);
  }
  for (int64_t i = 0; factor != 1 && i < rows_; ++i)
    kernels<Real>().scale(i + 1, factor, out.values + i * square_stride_);
  complete(out, as);
}

/// out = α I + β a + γ a b, where all are polynomials of one matrix: symmetric, and so are their products.
template <class Real>
void NewtonSchulz::square_product(const NewtonSchulzCoefficients& of, const Square<Real>& a,
                                  const Square<Real>& b, bool narrow, const Square<Real>& out, TakenAs as) {
  const Kernels<Real>& kernel = kernels<Real>();
  const int64_t r = rows_, stride = square_stride_;
  const SmallProducts* small = small_kernels(kDTypeOf<Real>);
  if (narrow) {
    gemm_.multiply_lower(DType::kBFloat16, r, r, {a.narrow, narrow_stride_}, {b.narrow, narrow_stride_},
                         out.values, stride);
    auto* diagonals = static_cast<Real*>(room(diagonals_, 2, r, sizeof(Real)));
    for (int64_t i = 0; i < r; ++i) {
      diagonals[i] = a.values[i * (stride + 1)];
      diagonals[r + i] = b.values[i * (stride + 1)];
    }
    kernel.add_diagonals(r, diagonals, a.values, b.values, out.values, stride);
  } else if (sizeof(Real) == 4 && small) {
    auto matrix = [&](const Square<Real>& square) {
      return SmallMatrix{reinterpret_cast<float*>(square.values), stride};
    };
    small->lower(r, r, matrix(a), matrix(b), matrix(out));
    own_operations_ += r * r * r;
  } else {
    gemm_.multiply_lower(kDTypeOf<Real>, r, r, {a.values, stride}, {b.values, stride, true}, out.values,
                         stride);
  }
  if (of != NewtonSchulzCoefficients{0, 0, 1})
    kernel.combine(r, of.a, of.b, a.values, of.c, out.values, stride);
  complete(out, as);
}

/// out = factor · X.
template <class Real>
void NewtonSchulz::multiply_by(const Square<Real>& factor, const void* x, void* out) {
  const int64_t r = rows_;
  if constexpr (sizeof(Real) == 4)
    if (factor.narrow) {
      constexpr int64_t kBlock = 512, kStride = kBlock + 16;  // sums that stay in the caches
      auto* sums = static_cast<float*>(room(sums_, r, kStride, 4));
      for (int64_t at = 0; at < columns_; at += kBlock) {
        const int64_t columns = std::min(kBlock, columns_ - at);
        auto* from = static_cast<const std::byte*>(x) + at * 2;
        auto* to = static_cast<std::byte*>(out) + at * 2;
        gemm_.multiply(DType::kBFloat16, r, columns, r, {factor.narrow, narrow_stride_}, {from, stride_},
                       sums, kStride);
        for (int64_t i = 0; i < r; ++i)
          bfloat16_kernels().scale_add(columns, factor.values[i * (square_stride_ + 1)],
                                       from + i * stride_ * 2, sums + i * kStride, to + i * stride_ * 2);
      }
      return;
    }
  gemm_.multiply(kDTypeOf<Real>, r, columns_, r, {factor.values, square_stride_}, {x, stride_}, out, stride_);
}

template <class Real>
void NewtonSchulz::run(const NewtonSchulzOptions& options, DType wide, bool narrow, const ConstView& input,
                       const View& output, bool tall) {
  const Kernels<Real>& kernel = kernels<Real>();
  const int64_t r = rows_, width = sizeof(Real);
  const DType x_type = narrow ? DType::kBFloat16 : wide;
  stride_ = row_stride(columns_, element_bytes(x_type));
  square_stride_ = row_stride(r, width);
  narrow_stride_ = row_stride(r, 2);
  auto square_at = [&](size_t i) {
    return Square<Real>{
        static_cast<Real*>(room(squares_[i], r, square_stride_, width)),
        narrow ? static_cast<std::byte*>(room(narrow_squares_[i], r, narrow_stride_, 2)) : nullptr};
  };
  Square<Real> gram = square_at(0), square = square_at(1);
  void *x = room(x_, r, stride_, element_bytes(x_type)),
       *next = room(next_x_, r, stride_, element_bytes(x_type));

  // X = G / ‖G‖, wide. In bfloat16 X stays G, and its factor of 1 / ‖G‖ comes into the first products: so G
  // is not rounded once more, and X has the norm that it should have.
  auto strides = [&](int64_t stride, int64_t element) {
    return tall ? std::array{element, stride * element} : std::array{stride * element, element};
  };
  /// X ← scale · G; returns its norm.
  auto load = [&](double scale) {
    auto* row_buffer = static_cast<Real*>(room(loaded_, 1, stride_, width));
    if (scale == 1)
      cast_strided(input.shape, x_type, x, strides(stride_, element_bytes(x_type)), input.dtype, input.data,
                   input.strides);
    double sum = 0;
    for (int64_t i = 0; i < r; ++i) {
      std::byte* at = static_cast<std::byte*>(x) + i * stride_ * element_bytes(x_type);
      auto* row = narrow ? row_buffer : reinterpret_cast<Real*>(at);
      if constexpr (sizeof(Real) == 4)
        if (narrow) {
          if (scale != 1) {
            cast_strided(std::array{columns_}, wide, row, std::array{width}, input.dtype,
                         input.data + i * input.strides[tall ? 1 : 0],
                         std::array{input.strides[tall ? 0 : 1]});
            kernel.scale(columns_, scale, row);
            bfloat16_kernels().narrow(columns_, row, at);
          }
          bfloat16_kernels().widen(columns_, at, row);
        }
      sum += kernel.sum_of_squares(columns_, row);
    }
    return std::sqrt(sum);
  };
  double scale = 1, norm = load(scale);
  if (narrow && norm > 0 && !(norm > 0x1p-40 && norm < 0x1p40)) {  // its squares leave float32's range
    scale = std::isinf(norm) ? 0x1p-100 : std::exp2(-std::ilogb(norm));
    norm = load(scale) / scale;
  }
  norm *= options.norm_factor;
  norm = options.epsilon_rule == EpsilonRule::kAdded ? norm + options.epsilon
         : norm < options.epsilon                    ? options.epsilon
                                                     : norm;
  double factor = norm == 0 ? 0 : 1 / norm / scale;  // of X, until X is multiplied
  if (!narrow) {
    for (int64_t i = 0; i < r; ++i) kernel.scale(columns_, factor, static_cast<Real*>(x) + i * stride_);
    factor = 1;
  }

  auto coefficients = [&](int step, double times) {
    const auto [a, b, c] = coefficients_of(options, step);
    return NewtonSchulzCoefficients{a * times, b * times, c * times};
  };
  auto multiply_x_by = [&](const Square<Real>& polynomial) {  // which has the factor
    multiply_by(polynomial, x, next);
    std::swap(x, next);
    factor = 1;
  };

  const bool gram_form = options.form == NewtonSchulzForm::kGram ||
                         (options.form == NewtonSchulzForm::kByShape &&
                          newton_schulz_form(r, columns_, options, narrow) == NewtonSchulzForm::kGram);
  const TakenAs taken = narrow ? TakenAs::kBFloat16 : TakenAs::kReal;
  if (!gram_form) {
    for (int step = 0; step < options.steps; ++step) {
      gram_of(x_type, x, factor * factor, gram, taken);
      square_product(coefficients(step, factor), gram, gram, narrow, square, taken);
      multiply_x_by(square);
    }
  } else {
    // All square matrices are polynomials of one R: they are symmetric and commute, and so their products are
    // symmetric.
    Square<Real> q = square_at(2), product = square_at(3);
    const GramPlan plan(options, r, narrow);
    for (int done = 0; done < options.steps;) {
      const int length = plan.length(done);
      const bool narrow_update = plan.narrow_update(length);
      const TakenAs in_update = narrow_update ? TakenAs::kBFloat16 : TakenAs::kReal,
                    in_both = narrow == narrow_update ? taken : TakenAs::kBoth;
      auto gram_taken = [&](int step) {
        const bool narrow_square = plan.narrow_square(step, length);
        return step + 1 == length ? taken : narrow_square == narrow_update ? in_update : TakenAs::kBoth;
      };
      gram_of(x_type, x, factor * factor, gram, gram_taken(0));
      for (int step = 0; step < length; ++step) {
        square_product(coefficients(done + step, length == 1 ? factor : 1), gram, gram,
                       plan.narrow_square(step, length), square, step + 1 == length ? taken : in_both);
        if (step > 0) {
          square_product({0, 0, step + 1 == length ? factor : 1}, square, q, narrow, product, taken);
          std::swap(q, product);
        }
        if (step + 1 < length) {  // R ← P R P
          const Square<Real>& half = step > 0 ? product : q;
          square_product({0, 0, 1}, square, gram, narrow_update, half, in_update);
          square_product({0, 0, 1}, square, half, narrow_update, gram, gram_taken(step + 1));
        }
        if (step == 0) std::swap(q, square);
      }
      multiply_x_by(q);
      done += length;
    }
  }
  cast_strided(output.shape, output.dtype, output.data, output.strides, x_type, x,
               strides(stride_, element_bytes(x_type)));
}

}  // namespace spolia
