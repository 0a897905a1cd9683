// One step of AdamW on one tensor, or on any shard of it: it is elementwise.
//
//   p ← p (1 − lr λ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  p ← p − lr / (1 − β₁ᵗ) · m / (√v /
//   √(1 − β₂ᵗ) + ε)
//
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); amsgrad, whose maximum is of
// v as it is, from Reddi and others (2018). The order of operations is PyTorch's, but for fused
// multiply-adds.
#pragma once

#include <cstdint>

#include "spolia/tensor/view.h"

namespace spolia {

struct AdamWOptions {  // with PyTorch's defaults
  double lr = 1e-3;
  double beta1 = .9;
  double beta2 = .999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  friend bool operator==(const AdamWOptions&, const AdamWOptions&) = default;
};

/// Throws InvalidArgumentError for what makes no sense: negative rates, betas outside [0, 1).
void check(const AdamWOptions& options);

/// What a step reads and writes: dense host memory of equally many elements, each of any floating-point
/// dtype.
struct AdamWTensors {
  View parameter;
  View master;  // may have no data; else the step is taken on it, and the parameter is its rounding
  ConstView gradient;
  View mean;     // exp_avg
  View square;   // exp_avg_sq
  View maximum;  // max_exp_avg_sq; for amsgrad alone
};

/// Takes step number `step` (from 1 on). Computed in float32, or in float64 where the parameter (or its
/// master) is float64; each result is rounded once to its dtype. In one pass over memory.
/// InvalidArgumentError where a tensor is missing, has gaps or another number of elements; UnsupportedError
/// for dtypes that are no floats. Thread-safe for disjoint tensors.
void adamw_step(const AdamWOptions& options, int64_t step, const AdamWTensors& tensors);

}  // namespace spolia
