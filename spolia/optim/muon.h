// Muon on one parameter, in phases that can run apart: on a mesh the first and the last run on shards, the
// second on the owner of the whole matrix.
//
//   1. muon_momentum():        B and U from the gradient. Elementwise.
//   2. MuonCalculator::update(): O = scale · orthogonalised(U), matrix by matrix. Needs the whole matrix.
//   3. muon_apply():           p ← p (1 − lr λ) − lr O. Elementwise.
//
// Source: K. Jordan and others, "Muon" (2024); the scale that matches AdamW's from Liu and others, "Muon is
// Scalable" (2025); NorMuon from Li and others (2025); QK-clip from the report on Kimi K2 (2025).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/optim/newton_schulz.h"
#include "spolia/tensor/view.h"

namespace spolia {

// How a parameter is one matrix or several.

struct RowRange {
  int64_t begin = 0, end = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
/// The rows that make one matrix of a fused one, one range after the other.
using RowPart = std::vector<RowRange>;

enum class MatrixKind : uint8_t {
  kMatrix,       // two dims: rows (out) and columns (in)
  kBatch,        // three dims or more: the last two are a matrix, as of experts
  kConvolution,  // two dims or more: the first is the rows, all others together the columns
};

struct MatrixRule {
  MatrixKind kind = MatrixKind::kMatrix;
  /// Parts of the rows that are matrices of their own; none: all rows are one. They cover each row once.
  std::vector<RowPart> parts;
  friend bool operator==(const MatrixRule&, const MatrixRule&) = default;
};

/// Parts of these numbers of rows, one below the other: {q, k, v} or {gate, up}.
std::vector<RowPart> stacked_rows(const std::vector<int64_t>& counts);
/// The same where the parts lie interleaved, group by group: `groups` times counts[0] rows of the first part,
/// counts[1] of the second ... as Megatron fuses QKV for grouped-query attention.
std::vector<RowPart> interleaved_rows(int64_t groups, const std::vector<int64_t>& counts);

/// A parameter of `shape` as a batch of matrices. InvalidArgumentError where the rule does not fit the shape.
struct MatrixShape {
  int64_t batch = 1, rows = 0, columns = 0;
};
MatrixShape matrix_shape(const MatrixRule& rule, std::span<const int64_t> shape);
/// What orthogonalising costs (newton_schulz_work) for all its matrices together.
int64_t muon_work(const MatrixRule& rule, std::span<const int64_t> shape);

// Options.

enum class MomentumRule : uint8_t {
  kAverage,  // B ← μ B + (1 − μ) g, with nesterov U = (1 − μ) g + μ B: Keller Jordan, PyTorch
  kSum,      // B ← μ B + g, with nesterov U = g + μ B: Moonlight, HyperParallel
};
/// What a stored momentum of one rule is multiplied by to become the other's.
double momentum_conversion(MomentumRule from, MomentumRule to, double momentum);

enum class MuonScale : uint8_t {
  kOriginal,       // √max(1, rows / columns)
  kMatchRmsAdamW,  // 0.2 √max(rows, columns)
  kSpectral,       // √(rows / columns)
};
double muon_scale(MuonScale scale, int64_t rows, int64_t columns);

struct NorMuonOptions {
  double beta2 = .95;
  double epsilon = 1e-10;
  friend bool operator==(const NorMuonOptions&, const NorMuonOptions&) = default;
};

struct MuonOptions {  // with PyTorch's defaults
  double lr = 1e-3;
  double weight_decay = .1;
  double momentum = .95;
  bool nesterov = true;
  MomentumRule momentum_rule = MomentumRule::kAverage;
  MuonScale scale = MuonScale::kOriginal;
  NewtonSchulzOptions newton_schulz = {.precision = NewtonSchulzPrecision::kBFloat16};
  std::optional<NorMuonOptions> normuon;
  friend bool operator==(const MuonOptions&, const MuonOptions&) = default;
};
/// HyperParallel's defaults: lr .02, the sum rule, the scale that matches AdamW's, five quintic steps, ε
/// 1e-10 added.
MuonOptions hyperparallel_muon_options();
void check(const MuonOptions& options);  // InvalidArgumentError for what makes no sense

// Phases.

/// Phase 1. Dense host memory of equally many elements of any floating-point dtypes; `gradient` without data
/// stands for zeros; `update` may be the gradient's memory. Computed in float32, in float64 where the
/// momentum is float64.
void muon_momentum(const MuonOptions& options, const ConstView& gradient, const View& momentum,
                   const View& update);

/// Phase 2, with its scratch memory. Not thread-safe; may move between threads.
class MuonCalculator {
 public:
  explicit MuonCalculator(int threads = 1) : newton_schulz_(threads) {}

  /// Whole matrices: `input` and `output` have the parameter's shape (dense, host memory), and may be the
  /// same memory. `row_moments` is NorMuon's state, [..., rows, 1] dense, and without data where
  /// options.normuon is not set. InvalidArgumentError where shapes and rule do not fit.
  void update(const MuonOptions& options, const MatrixRule& rule, const ConstView& input, const View& output,
              const View& row_moments = {});

  const NewtonSchulz& newton_schulz() const { return newton_schulz_; }

 private:
  template <class Real>
  void update_part(const MuonOptions& options, const RowPart& part, const ConstView& input,
                   const View& output, const View& row_moments);

  NewtonSchulz newton_schulz_;
  Buffer rows_;
};

/// The shape of NorMuon's state: the parameter's matrices with one column.
Dims row_moments_shape(const MatrixRule& rule, std::span<const int64_t> shape);

/// Phase 3. As adamw_step() about `master`; dense host memory of equally many elements.
void muon_apply(const MuonOptions& options, const View& parameter, const View& master,
                const ConstView& update);

// QK-clip.

/// For each group of `heads_per_group` query heads that share a key head: min(1, threshold / largest logit of
/// the group's heads). `largest_logits` has one entry a query head.
std::vector<double> qk_clip_factors(std::span<const double> largest_logits, int64_t heads_per_group = 1,
                                    double threshold = 100);
/// Multiplies the rows of `part` of a dense matrix by `factor`. With Wq's and Wk's rows of a group and the
/// square root of the group's factor, its logits come below the threshold.
void scale_rows(const View& matrix, const RowPart& part, double factor);

}  // namespace spolia
