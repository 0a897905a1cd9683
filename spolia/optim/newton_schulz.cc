#include "spolia/optim/newton_schulz.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/kernels.h"
#include "spolia/optim/small_products.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/strided.h"

namespace spolia {
namespace {

/// How many steps the next stretch of the Gram form takes before it starts again from QX.
int stretch(int done, int steps) { return std::min(done == 0 ? 2 : 3, steps - done); }

/// What the forms cost, in r³ operations of the large products, where the short side is r and the long one
/// wide · r.
double standard_cost(double wide, int steps) { return steps * (3 * wide + 1); }
double gram_cost(double wide, int steps, double square_cost) {
  double cost = 0;
  for (int done = 0; done < steps;) {
    int length = stretch(done, steps);
    cost += 3 * wide + square_cost * (4 * length - 3);
    done += length;
  }
  return cost;
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
  int64_t small = std::min(rows, columns), large = std::max(rows, columns);
  return checked_mul(checked_mul(small, small), large);
}

NewtonSchulzForm newton_schulz_form(int64_t rows, int64_t columns, int steps, bool bfloat16) {
  int64_t small = std::min(rows, columns), large = std::max(rows, columns);
  if (small == 0) return NewtonSchulzForm::kStandard;
  double wide = static_cast<double>(large) / static_cast<double>(small);
  // The Gram form's square products are float32 in any case, at half the rate of bfloat16; a small gain is
  // none.
  return gram_cost(wide, steps, bfloat16 ? 2 : 1) < .95 * standard_cost(wide, steps)
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
  const bool narrow = options.precision == NewtonSchulzPrecision::kBFloat16Products ||
                      (!reference && !full && bfloat16_products_are_fast());
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

/// Copies what lies below the diagonal to above it.
template <class Real>
void NewtonSchulz::mirror(Real* square) {
  if constexpr (sizeof(Real) == 4)
    if (const SmallProducts* small = small_products()) {
      constexpr int64_t kStrip = kSmallLanes;
      for (int64_t at = 0; at < rows_; at += kStrip) {
        small->transpose(std::min(kStrip, rows_ - at), at, {square + at * square_stride_, square_stride_},
                         {square + at, square_stride_});
        for (int64_t i = at; i < std::min(at + kStrip, rows_); ++i)
          for (int64_t j = at; j < i; ++j) square[j * square_stride_ + i] = square[i * square_stride_ + j];
      }
      return;
    }
  kernels<Real>().mirror(rows_, square, square_stride_);
}

/// out = left · right, rows_ x rows_, known to be symmetric: block columns of the lower triangle are
/// computed, the rest is mirrored.
template <class Real>
void NewtonSchulz::symmetric_product(DType in, MatrixIn left, MatrixIn right, int64_t columns, Real* out) {
  const int64_t block = std::clamp(align_up(ceil_div(rows_, 8), 16), int64_t{48}, int64_t{256});
  const int64_t width = element_bytes(in);
  for (int64_t at = 0; at < rows_; at += block) {
    MatrixIn rows = left, column = right;
    rows.data = static_cast<const std::byte*>(left.data) + at * left.stride * width;
    column.data = static_cast<const std::byte*>(right.data) +
                  at * (right.transposed ? right.stride : int64_t{1}) * width;
    gemm_.multiply(in, kDTypeOf<Real>, rows_ - at, std::min(block, rows_ - at), columns, rows, column,
                   out + at * square_stride_ + at, square_stride_);
  }
  mirror(out);
}

/// out = X Xᵀ.
template <class Real>
void NewtonSchulz::gram_of(DType in, void* x, Real* out) {
  if constexpr (sizeof(Real) == 4)
    if (const SmallProducts* small = small_kernels(in); small && rows_ * columns_ <= kSmallElements) {
      const SmallMatrix wide{static_cast<float*>(x), stride_};
      const SmallMatrix tall{static_cast<float*>(room(transposed_, columns_, square_stride_, 4)),
                             square_stride_};
      small->transpose(rows_, columns_, wide, tall);
      small->lower(rows_, columns_, wide, tall, {out, square_stride_});
      own_operations_ += rows_ * rows_ * columns_;
      return mirror(out);
    }
  symmetric_product<Real>(in, {x, stride_}, {x, stride_, true}, columns_, out);
}

/// out = a b, all three symmetric.
template <class Real>
void NewtonSchulz::square_product(DType in, const void* a, const void* b, Real* out) {
  if constexpr (sizeof(Real) == 4)
    if (const SmallProducts* small = small_kernels(in)) {
      auto matrix = [&](const void* data) {
        return SmallMatrix{static_cast<float*>(const_cast<void*>(data)), square_stride_};
      };
      small->lower(rows_, rows_, matrix(a), matrix(b), {out, square_stride_});
      own_operations_ += rows_ * rows_ * rows_;
      return mirror(out);
    }
  symmetric_product<Real>(in, {a, square_stride_}, {b, square_stride_, true}, rows_, out);
}

template <class Real>
void NewtonSchulz::run(const NewtonSchulzOptions& options, DType wide, bool narrow, const ConstView& input,
                       const View& output, bool tall) {
  const Kernels<Real>& kernel = kernels<Real>();
  const int64_t r = rows_, width = sizeof(Real);
  const DType x_type = narrow ? DType::kBFloat16 : wide;
  stride_ = row_stride(columns_, element_bytes(x_type));
  square_stride_ = row_stride(r, width);
  auto* gram = static_cast<Real*>(room(gram_, r, square_stride_, width));
  auto* square = static_cast<Real*>(room(square_, r, square_stride_, width));
  auto* loaded = static_cast<Real*>(room(narrow ? loaded_ : x_, r, stride_, width));
  void* x = narrow ? room(x_, r, stride_, 2) : loaded;
  void* next = room(next_x_, r, stride_, element_bytes(x_type));
  std::byte* narrowed =
      narrow ? static_cast<std::byte*>(room(narrow_square_, r, square_stride_, 2)) : nullptr;

  // X = G / ‖G‖, wide.
  const std::array sizes{input.shape[0], input.shape[1]};
  auto strides = [&](int64_t stride, int64_t element) {
    return tall ? std::array{element, stride * element} : std::array{stride * element, element};
  };
  cast_strided(sizes, wide, loaded, strides(stride_, width), input.dtype, input.data, input.strides);
  double sum = 0;
  for (int64_t i = 0; i < r; ++i) sum += kernel.sum_of_squares(columns_, loaded + i * stride_);
  double norm = std::sqrt(sum) * options.norm_factor;
  norm = options.epsilon_rule == EpsilonRule::kAdded ? norm + options.epsilon
         : norm < options.epsilon                    ? options.epsilon
                                                     : norm;
  for (int64_t i = 0; i < r; ++i) kernel.scale(columns_, norm == 0 ? 0 : 1 / norm, loaded + i * stride_);
  auto narrow_rows = [&](int64_t columns, int64_t stride, const void* from, void* to) {
    cast_strided(std::array{r, columns}, DType::kBFloat16, to, std::array{stride * 2, int64_t{2}}, wide, from,
                 std::array{stride * width, width});
  };
  if (narrow) narrow_rows(columns_, stride_, loaded, x);

  auto coefficients = [&](int step) {
    return options.coefficients[std::min(static_cast<size_t>(step), options.coefficients.size() - 1)];
  };
  /// square = a I + b gram + c square, mirrored.
  auto polynomial = [&](const NewtonSchulzCoefficients& step) {
    for (int64_t i = 0; i < r; ++i) {
      kernel.combine(r, step.b, gram + i * square_stride_, step.c, square + i * square_stride_);
      square[i * square_stride_ + i] += static_cast<Real>(step.a);
    }
  };
  auto multiply_x_by = [&](const Real* factor) {
    if (narrow) narrow_rows(r, square_stride_, factor, narrowed);
    gemm_.multiply(x_type, x_type, r, columns_, r,
                   {narrow ? static_cast<const void*>(narrowed) : factor, square_stride_}, {x, stride_}, next,
                   stride_);
    std::swap(x, next);
  };

  const bool gram_form = options.form == NewtonSchulzForm::kGram ||
                         (options.form == NewtonSchulzForm::kByShape &&
                          newton_schulz_form(r, columns_, options.steps, narrow) == NewtonSchulzForm::kGram);
  if (!gram_form) {
    for (int step = 0; step < options.steps; ++step) {
      gram_of<Real>(x_type, x, gram);
      const void* factor = gram;
      if (narrow) {
        narrow_rows(r, square_stride_, gram, narrowed);
        factor = narrowed;
      }
      square_product<Real>(x_type, factor, factor, square);
      polynomial(coefficients(step));
      multiply_x_by(square);
    }
  } else {
    // All square matrices are polynomials of one R: they are symmetric and commute, and so their products are
    // symmetric.
    auto* q = static_cast<Real*>(room(q_, r, square_stride_, width));
    auto* product = static_cast<Real*>(room(product_, r, square_stride_, width));
    auto multiply = [&](const Real* a, const Real* b, Real* out) { square_product<Real>(wide, a, b, out); };
    for (int done = 0; done < options.steps;) {
      const int length = stretch(done, options.steps);
      gram_of<Real>(x_type, x, gram);
      for (int step = 0; step < length; ++step) {
        multiply(gram, gram, square);
        polynomial(coefficients(done + step));
        if (step > 0) {
          multiply(square, q, product);
          std::swap(q, product);
        }
        if (step + 1 < length) {  // R ← P R P
          multiply(square, gram, step > 0 ? product : q);
          multiply(square, step > 0 ? product : q, gram);
        }
        if (step == 0) std::swap(q, square);
      }
      multiply_x_by(q);
      done += length;
    }
  }
  cast_strided(sizes, output.dtype, output.data, output.strides, x_type, x,
               strides(stride_, element_bytes(x_type)));
}

}  // namespace spolia
