// The elementwise loops of the optimizers, compiled for several vector widths and chosen when the program
// runs.
//
// Pointers are aligned to their elements; what is written overlaps nothing else. Results may differ in the
// last bits between kinds of processors, for some fuse a product with a sum.
#pragma once

#include <cstdint>

namespace spolia {

/// buffer ← keep · buffer + add · gradient; update = of_gradient · gradient + of_buffer · buffer.
struct MomentumFactors {
  double keep, add, of_gradient, of_buffer;
};

/// The factors of one AdamW step, after Loshchilov and Hutter (2019).
struct AdamWFactors {
  double decay;  // 1 − lr · weight decay
  double beta1, beta2;
  double step_size;          // lr / (1 − β₁ᵗ)
  double second_correction;  // 1 / √(1 − β₂ᵗ)
  double epsilon;
  bool maximize;
};

/// `maximum` null: no amsgrad. `rounded`: bfloat16 that becomes the parameter, or null. All are computed as
/// Real, so that casts to it before a step and from it after one give the same bits.
using AdamWKernel = void (*)(int64_t count, const AdamWFactors&, const void* gradient, void* parameter,
                             void* mean, void* square, void* maximum, void* rounded);

template <class Real>
struct Kernels {
  /// `gradient` null: zeros. `update` may be null, and may be `gradient`.
  void (*momentum)(int64_t count, const MomentumFactors&, const Real* gradient, Real* buffer, Real* update);
  /// values ← factor · values + add · update.
  void (*scale_add)(int64_t count, double factor, Real* values, double add, const Real* update);
  /// Steps for tensors of Real, or in their place of bfloat16 where Real is float: [whether the gradient is],
  /// [the parameter], [the state].
  AdamWKernel adamw[2][2][2];
  /// In float64, in an order that depends on the count alone.
  double (*sum_of_squares)(int64_t count, const Real*);
  /// values ← values · factor, multiplied in float64.
  void (*scale)(int64_t count, double factor, Real* values);
  /// out ← alpha I + beta a + gamma out, in the lower triangles of `size` x `size` matrices.
  void (*combine)(int64_t size, double alpha, double beta, const Real* a, double gamma, Real* out,
                  int64_t stride);
  /// out ← out + D b + a E, in the same, where D and E are a's and b's diagonals, one after the other in
  /// `diagonals`: what lacks where `out` is the product of what lies beside them.
  void (*add_diagonals)(int64_t size, const Real* diagonals, const Real* a, const Real* b, Real* out,
                        int64_t stride);
  /// Copies the part below the diagonal of a `size` x `size` matrix to the part above it.
  void (*mirror)(int64_t size, Real* matrix, int64_t stride);
};

/// Defined for float and double.
template <class Real>
const Kernels<Real>& kernels();

/// bfloat16 to float32 and back, with the bits that cast() (tensor/cast.h) has, at the width of the loops
/// here: in a step over narrow parameters the casts are half of the work. No alignment.
struct BFloat16Kernels {
  void (*widen)(int64_t count, const void* from, float* to);
  void (*narrow)(int64_t count, const float* from, void* to);
  /// to ← factor · x + sums, where x and `to` are bfloat16.
  void (*scale_add)(int64_t count, float factor, const void* x, const float* sums, void* to);
};
const BFloat16Kernels& bfloat16_kernels();

}  // namespace spolia
