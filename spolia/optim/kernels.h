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

template <class Real>
struct Kernels {
  /// `gradient` null: zeros. `update` may be null, and may be `gradient`.
  void (*momentum)(int64_t count, const MomentumFactors&, const Real* gradient, Real* buffer, Real* update);
  /// values ← factor · values + add · update.
  void (*scale_add)(int64_t count, double factor, Real* values, double add, const Real* update);
  /// `maximum` null: no amsgrad.
  void (*adamw)(int64_t count, const AdamWFactors&, const Real* gradient, Real* parameter, Real* mean,
                Real* square, Real* maximum);
  /// In float64, in an order that depends on the count alone.
  double (*sum_of_squares)(int64_t count, const Real*);
  /// values ← values · factor, multiplied in float64.
  void (*scale)(int64_t count, double factor, Real* values);
  /// square ← b · linear + c · square, in a row of a matrix.
  void (*combine)(int64_t count, double b, const Real* linear, double c, Real* square);
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
};
const BFloat16Kernels& bfloat16_kernels();

}  // namespace spolia
