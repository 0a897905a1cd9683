// The optimizers' arithmetic in float64 and plain loops, written from the formulas: what tests compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "spolia/optim/newton_schulz.h"

namespace spolia {

struct ReferenceMatrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;  // row-major

  ReferenceMatrix(int64_t r, int64_t c, std::vector<double> v = {})
      : rows(r), columns(c), values(std::move(v)) {
    values.resize(static_cast<size_t>(r * c));
  }
  double& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * columns + j)]; }
  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
};

inline ReferenceMatrix reference_transpose(const ReferenceMatrix& m) {
  ReferenceMatrix t(m.columns, m.rows);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.columns; ++j) t.at(j, i) = m.at(i, j);
  return t;
}

inline ReferenceMatrix reference_product(const ReferenceMatrix& a, const ReferenceMatrix& b) {
  ReferenceMatrix c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.columns; ++k) {
      const double factor = a.at(i, k);
      const double* from = b.values.data() + k * b.columns;
      double* to = c.values.data() + i * c.columns;
      for (int64_t j = 0; j < b.columns; ++j) to[j] += factor * from[j];
    }
  return c;
}

inline ReferenceMatrix reference_newton_schulz(const NewtonSchulzOptions& options, ReferenceMatrix x) {
  const bool tall = x.rows > x.columns;
  if (tall) x = reference_transpose(x);
  double norm = 0;
  for (double value : x.values) norm += value * value;
  norm = std::sqrt(norm) * options.norm_factor;
  norm =
      options.epsilon_rule == EpsilonRule::kAdded ? norm + options.epsilon : std::max(norm, options.epsilon);
  for (double& value : x.values) value = norm == 0 ? 0 : value / norm;
  for (int step = 0; step < options.steps; ++step) {
    const auto& set = options.coefficients;
    const NewtonSchulzCoefficients k =
        static_cast<size_t>(step) < set.size() ? set[static_cast<size_t>(step)] : set.back();
    const ReferenceMatrix gram = reference_product(x, reference_transpose(x)),
                          square = reference_product(gram, gram);
    ReferenceMatrix factor(x.rows, x.rows);
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < x.rows; ++j)
        factor.at(i, j) = k.b * gram.at(i, j) + k.c * square.at(i, j) + (i == j ? k.a : 0);
    x = reference_product(factor, x);
  }
  return tall ? reference_transpose(x) : x;
}

}  // namespace spolia
