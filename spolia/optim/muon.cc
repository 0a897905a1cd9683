#include "spolia/optim/muon.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/optim/element_blocks.h"
#include "spolia/optim/kernels.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

int64_t rows_of(const RowPart& part) {
  int64_t rows = 0;
  for (const RowRange& range : part) rows = checked_add(rows, range.end - range.begin);
  return rows;
}

void check_parts(const std::vector<RowPart>& parts, int64_t rows) {
  std::vector<RowRange> all;
  for (const RowPart& part : parts) all.insert(all.end(), part.begin(), part.end());
  std::erase_if(all, [](const RowRange& range) { return range.begin == range.end; });
  std::sort(all.begin(), all.end(), [](const RowRange& a, const RowRange& b) { return a.begin < b.begin; });
  int64_t at = 0;
  for (const RowRange& range : all) {
    if (range.begin != at || range.end < range.begin)
      throw InvalidArgumentError(
          "the parts of a fused matrix have to cover each of its {} rows once: about row {} they do not",
          rows, std::min(at, range.begin));
    at = range.end;
  }
  if (at != rows)
    throw InvalidArgumentError(
        "the parts of a fused matrix have to cover each of its {} rows once, and end at {}", rows, at);
}

/// All rows, where the rule names no parts.
std::vector<RowPart> parts_of(const MatrixRule& rule, int64_t rows) {
  return rule.parts.empty() ? std::vector<RowPart>{{{0, rows}}} : rule.parts;
}

template <class Byte>
BasicView<Byte> as_batch(BasicView<Byte> view, const MatrixShape& shape) {
  return dense_view(view.data, view.dtype, std::array{shape.batch, shape.rows, shape.columns}, view.device);
}

template <class Byte>
BasicView<Byte> rows_at(BasicView<Byte> view, const RowRange& range) {
  view.data += range.begin * view.strides[1];
  view.shape[1] = range.end - range.begin;
  return view;
}

}  // namespace

std::vector<RowPart> stacked_rows(const std::vector<int64_t>& counts) { return interleaved_rows(1, counts); }

std::vector<RowPart> interleaved_rows(int64_t groups, const std::vector<int64_t>& counts) {
  if (groups < 1) throw InvalidArgumentError("fused rows lie in one group or more, not {}", groups);
  std::vector<RowPart> parts(counts.size());
  int64_t at = 0;
  for (int64_t group = 0; group < groups; ++group)
    for (size_t part = 0; part < counts.size(); ++part) {
      if (counts[part] < 0)
        throw InvalidArgumentError("a part of a fused matrix cannot have {} rows", counts[part]);
      parts[part].push_back({at, checked_add(at, counts[part])});
      at += counts[part];
    }
  return parts;
}

MatrixShape matrix_shape(const MatrixRule& rule, std::span<const int64_t> shape) {
  MatrixShape matrices;
  switch (rule.kind) {
    case MatrixKind::kMatrix:
      if (shape.size() != 2)
        throw InvalidArgumentError(
            "a matrix has two dims, and this is {}: say whether it is a batch or a convolution",
            shape_text(shape));
      matrices = {1, shape[0], shape[1]};
      break;
    case MatrixKind::kBatch:
      if (shape.size() < 3)
        throw InvalidArgumentError("a batch of matrices has three dims or more, not {}", shape_text(shape));
      matrices = {numel(shape.first(shape.size() - 2)), shape[shape.size() - 2], shape.back()};
      break;
    case MatrixKind::kConvolution:
      if (shape.size() < 2)
        throw InvalidArgumentError("a convolution has two dims or more, not {}", shape_text(shape));
      matrices = {1, shape[0], numel(shape.subspan(1))};
      break;
  }
  if (!rule.parts.empty()) check_parts(rule.parts, matrices.rows);
  return matrices;
}

int64_t muon_work(const MatrixRule& rule, std::span<const int64_t> shape) {
  const MatrixShape matrices = matrix_shape(rule, shape);
  int64_t work = 0;
  for (const RowPart& part : parts_of(rule, matrices.rows))
    work = checked_add(work, newton_schulz_work(rows_of(part), matrices.columns));
  return checked_mul(work, matrices.batch);
}

double momentum_conversion(MomentumRule from, MomentumRule to, double momentum) {
  if (from == to) return 1;
  return to == MomentumRule::kAverage ? 1 - momentum : 1 / (1 - momentum);
}

double muon_scale(MuonScale scale, int64_t rows, int64_t columns) {
  const double r = static_cast<double>(rows), c = static_cast<double>(columns);
  switch (scale) {
    case MuonScale::kOriginal:
      return std::sqrt(std::max(1., r / c));
    case MuonScale::kMatchRmsAdamW:
      return .2 * std::sqrt(std::max(r, c));
    case MuonScale::kSpectral:
      return std::sqrt(r / c);
  }
  return 1;
}

MuonOptions hyperparallel_muon_options() {
  MuonOptions options;
  options.lr = .02;
  options.momentum_rule = MomentumRule::kSum;
  options.scale = MuonScale::kMatchRmsAdamW;
  options.newton_schulz = newton_schulz_set("quintic");
  options.newton_schulz.epsilon = 1e-10;
  options.newton_schulz.epsilon_rule = EpsilonRule::kAdded;
  options.newton_schulz.precision = NewtonSchulzPrecision::kBFloat16;
  return options;
}

void check(const MuonOptions& options) {
  if (!(options.lr >= 0) || !(options.weight_decay >= 0))
    throw InvalidArgumentError("Muon's lr and weight_decay are not negative: {}, {}", options.lr,
                               options.weight_decay);
  if (!(options.momentum >= 0 && options.momentum < 1))
    throw InvalidArgumentError("Muon's momentum is in [0, 1), not {}", options.momentum);
  if (options.normuon && !(options.normuon->beta2 >= 0 && options.normuon->beta2 < 1))
    throw InvalidArgumentError("NorMuon's beta2 is in [0, 1), not {}", options.normuon->beta2);
}

void muon_momentum(const MuonOptions& options, const ConstView& gradient, const View& momentum,
                   const View& update) {
  check(options);
  const int64_t count = numel(momentum.shape);
  check_elements(gradient, count, "Muon's gradient", true);
  check_elements(momentum, count, "momentum_buffer");
  check_elements(update, count, "Muon's update");
  const double mu = options.momentum, add = options.momentum_rule == MomentumRule::kAverage ? 1 - mu : 1;
  const MomentumFactors factors{mu, add, options.nesterov ? add : 0, options.nesterov ? mu : 1};
  const std::array runs{read_run(gradient), update_run(momentum), write_run(update)};
  auto run = [&]<class Real>(Real) {
    for_each_block<Real>(count, runs, [&](const std::array<Real*, 3>& p, int64_t n) {
      kernels<Real>().momentum(n, factors, p[0], p[1], p[2]);
    });
  };
  if (momentum.dtype == DType::kFloat64) {
    run(double{});
  } else {
    run(float{});
  }
}

void MuonCalculator::update(const MuonOptions& options, const MatrixRule& rule, const ConstView& input,
                            const View& output, const View& row_moments) {
  check(options);
  const MatrixShape shape = matrix_shape(rule, input.shape);
  const int64_t count = numel(input.shape);
  check_elements(input, count, "the input of Muon's update");
  check_elements(output, count, "Muon's update");
  check_elements(row_moments, checked_mul(shape.batch, shape.rows), "NorMuon's state", !options.normuon);
  if (count == 0) return;
  View moments = row_moments;
  if (moments.data) moments = as_batch(moments, {shape.batch, shape.rows, 1});
  for (const RowPart& part : parts_of(rule, shape.rows)) {
    if (rows_of(part) == 0) continue;
    if (output.dtype == DType::kFloat64) {
      update_part<double>(options, part, as_batch(input, shape), as_batch(output, shape), moments);
    } else {
      update_part<float>(options, part, as_batch(input, shape), as_batch(output, shape), moments);
    }
  }
}

template <class Real>
void MuonCalculator::update_part(const MuonOptions& options, const RowPart& part, const ConstView& input,
                                 const View& output, const View& row_moments) {
  constexpr DType kComputed = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
  const int64_t batch = input.shape[0], rows = rows_of(part), columns = input.shape[2];
  const Kernels<Real>& kernel = kernels<Real>();
  // Rows that lie apart, or a result of another dtype, pass through memory of our own.
  const bool direct = part.size() == 1 && output.dtype == kComputed &&
                      reinterpret_cast<uintptr_t>(output.data) % sizeof(Real) == 0;
  View work = direct ? rows_at(output, part[0]) : View{};
  if (!direct) {
    const std::array shape{batch, rows, columns};
    if (rows_.size() < byte_size(kComputed, shape)) rows_ = Buffer(byte_size(kComputed, shape));
    work = dense_view(rows_.data(), kComputed, shape);
  }
  auto for_each_range = [&](auto body) {  // body(of the whole, of `work`)
    int64_t at = 0;
    for (const RowRange& range : part) {
      body(range, RowRange{at, at + range.end - range.begin});
      at += range.end - range.begin;
    }
  };
  if (part.size() == 1) {
    newton_schulz_.orthogonalise(options.newton_schulz, rows_at(input, part[0]), work);
  } else {
    for_each_range([&](const RowRange& whole, const RowRange& own) {
      View to = rows_at(work, own);
      ConstView from = rows_at(input, whole);
      cast_strided(to.shape, to.dtype, to.data, to.strides, from.dtype, from.data, from.strides);
    });
    NewtonSchulzOptions chosen = options.newton_schulz;
    if (chosen.precision == NewtonSchulzPrecision::kInput && input.dtype != kComputed)
      chosen.precision =
          input.dtype == DType::kFloat32 ? NewtonSchulzPrecision::kFloat32 : NewtonSchulzPrecision::kBFloat16;
    newton_schulz_.orthogonalise(chosen, work, work);
  }

  const double scale = muon_scale(options.scale, rows, columns);
  std::vector<double> factors(static_cast<size_t>(rows), scale);
  for (int64_t matrix = 0; matrix < batch; ++matrix) {
    auto row = [&](int64_t i) {
      return reinterpret_cast<Real*>(work.data + matrix * work.strides[0] + i * work.strides[1]);
    };
    if (options.normuon) {
      double before = 0, after = 0;
      for_each_range([&](const RowRange& whole, const RowRange& own) {
        for (int64_t i = own.begin; i < own.end; ++i) {
          const double sum = kernel.sum_of_squares(columns, row(i));
          std::byte* at = row_moments.data + matrix * row_moments.strides[0] +
                          (whole.begin + i - own.begin) * row_moments.strides[1];
          double moment;
          cast(DType::kFloat64, &moment, row_moments.dtype, at, 1);
          const double beta2 = options.normuon->beta2;
          moment = beta2 * moment + (1 - beta2) * sum / static_cast<double>(columns);
          cast(row_moments.dtype, at, DType::kFloat64, &moment, 1);
          const double factor = 1 / (std::sqrt(moment) + options.normuon->epsilon);
          factors[static_cast<size_t>(i)] = factor;
          before += sum;
          after += sum * factor * factor;
        }
      });
      // The matrix keeps its norm.
      const double restored = after > 0 ? scale * std::sqrt(before) / std::sqrt(after) : scale;
      for (double& factor : factors) factor *= restored;
    }
    for (int64_t i = 0; i < rows; ++i)
      if (factors[static_cast<size_t>(i)] != 1)
        kernel.scale(columns, factors[static_cast<size_t>(i)], row(i));
  }
  if (direct) return;
  for_each_range([&](const RowRange& whole, const RowRange& own) {
    View to = rows_at(output, whole), from = rows_at(work, own);
    cast_strided(to.shape, to.dtype, to.data, to.strides, from.dtype, from.data, from.strides);
  });
}

Dims row_moments_shape(const MatrixRule& rule, std::span<const int64_t> shape) {
  const MatrixShape matrices = matrix_shape(rule, shape);
  if (rule.kind != MatrixKind::kBatch) return {matrices.rows, 1};
  Dims dims(shape);
  dims.back() = 1;
  return dims;
}

void muon_apply(const MuonOptions& options, const View& parameter, const View& master,
                const ConstView& update) {
  const int64_t count = numel(parameter.shape);
  check_elements(parameter, count, "Muon's parameter");
  check_elements(master, count, "the parameter's master", true);
  check_elements(update, count, "Muon's update");
  const bool mastered = master.data != nullptr;
  const std::array runs{mastered ? update_run(master) : update_run(parameter), read_run(update),
                        mastered ? write_run(parameter) : ElementRun{}};
  auto run = [&]<class Real>(Real) {
    for_each_block<Real>(count, runs, [&](const std::array<Real*, 3>& p, int64_t n) {
      kernels<Real>().scale_add(n, 1 - options.lr * options.weight_decay, p[0], -options.lr, p[1]);
      if (p[2]) std::copy_n(p[0], n, p[2]);
    });
  };
  if (runs[0].dtype == DType::kFloat64) {
    run(double{});
  } else {
    run(float{});
  }
}

std::vector<double> qk_clip_factors(std::span<const double> largest_logits, int64_t heads_per_group,
                                    double threshold) {
  if (heads_per_group < 1 || std::ssize(largest_logits) % heads_per_group != 0 || !(threshold > 0))
    throw InvalidArgumentError("{} heads are not groups of {}, or the threshold {} is not above zero",
                               largest_logits.size(), heads_per_group, threshold);
  std::vector<double> factors(largest_logits.size() / static_cast<size_t>(heads_per_group), 1);
  for (size_t head = 0; head < largest_logits.size(); ++head) {
    double& factor = factors[head / static_cast<size_t>(heads_per_group)];
    if (largest_logits[head] > threshold) factor = std::min(factor, threshold / largest_logits[head]);
  }
  return factors;
}

void scale_rows(const View& matrix, const RowPart& part, double factor) {
  if (matrix.shape.size() != 2)
    throw InvalidArgumentError("rows are scaled in a matrix, not in {}", shape_text(matrix.shape));
  check_elements(matrix, numel(matrix.shape), "the matrix");
  auto run = [&]<class Real>(Real) {
    for (const RowRange& range : part) {
      if (range.begin < 0 || range.end < range.begin || range.end > matrix.shape[0])
        throw InvalidArgumentError("there are no rows {} to {} in a matrix of {}", range.begin, range.end,
                                   matrix.shape[0]);
      View rows = matrix;
      rows.data += range.begin * matrix.strides[0];
      for_each_block<Real>(
          (range.end - range.begin) * matrix.shape[1], std::array{update_run(rows)},
          [&](const std::array<Real*, 1>& p, int64_t n) { kernels<Real>().scale(n, factor, p[0]); });
    }
  };
  if (matrix.dtype == DType::kFloat64) {
    run(double{});
  } else {
    run(float{});
  }
}

}  // namespace spolia
