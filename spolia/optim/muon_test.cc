#include "spolia/optim/muon.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_reference.h"

namespace spolia {
namespace {

/// All three phases on one rank.
void step(MuonCalculator& calculator, const MuonOptions& options, const MatrixRule& rule, Elements& p,
          Elements& g, Elements& momentum) {
  Elements update(momentum.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, p.shape);
  muon_momentum(options, g.view(), momentum.view(), update.view());
  calculator.update(options, rule, update.view(), update.view());
  muon_apply(options, p.view(), {}, update.view());
}

TEST(Muon, TwoStepsOfTheVector) {
  for (DType dtype : {DType::kFloat64, DType::kFloat32}) {
    MuonOptions options{.lr = .02, .scale = MuonScale::kMatchRmsAdamW};
    options.newton_schulz.precision = NewtonSchulzPrecision::kInput;
    Elements w(dtype, {2, 3}, {.5, -.5, .25, .1, .2, -.3}), momentum(dtype, {2, 3});
    Elements g1(dtype, {2, 3}, {1, 2, 3, 4, 5, 6}), g2(dtype, {2, 3}, {-1, 0, 1, 0, 2, 0});
    MuonCalculator calculator;
    auto near = [&](const std::vector<double>& wanted) {
      for (size_t i = 0; i < 6; ++i)
        EXPECT_NEAR(w.values()[i], wanted[i], dtype == DType::kFloat64 ? 1e-8 : 1e-7) << i;
    };
    step(calculator, options, {}, w, g1, momentum);
    near({.50293723, -.49940005, .24476267, .09589696, .19678983, -.30111730});
    step(calculator, options, {}, w, g2, momentum);
    near({.50588232, -.49738694, .23818113, .09276800, .19182148, -.30159111});
    EXPECT_EQ(calculator.newton_schulz().matrices(), 2);
  }
}

TEST(Muon, PyTorchsTraces) {
  for (const std::string name : {"muon-wide", "muon-tall-match", "muon-square-plain-momentum"}) {
    auto trace = read_trace(name);
    MuonOptions options{.lr = .02};
    if (name == "muon-tall-match") {
      options.scale = MuonScale::kMatchRmsAdamW;
      options.weight_decay = .05;
    }
    if (name == "muon-square-plain-momentum") {
      options.lr = .01;
      options.momentum = .9;
      options.nesterov = false;
    }
    Elements p = trace.at("p0"), momentum(p.dtype, p.shape);
    const std::vector<double> start = p.values();
    MuonCalculator calculator;
    for (int i = 1; i <= 5; ++i) {
      step(calculator, options, {}, p, trace.at("g" + std::to_string(i)), momentum);
      // PyTorch orthogonalises in bfloat16: what differs is a hundredth of what moved.
      std::vector<double> found = p.values(), wanted = trace.at("p" + std::to_string(i)).values();
      for (size_t k = 0; k < found.size(); ++k) {
        found[k] -= start[k];
        wanted[k] -= start[k];
      }
      EXPECT_LT(distance(found, wanted), 1.5e-2) << name << i;
    }
    EXPECT_LT(distance(momentum.values(), trace.at("state.momentum_buffer").values()), 2e-7);
  }
}

TEST(Muon, MomentumRulesAreTheFormulas) {
  for (MomentumRule rule : {MomentumRule::kAverage, MomentumRule::kSum})
    for (bool nesterov : {false, true})
      for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
        MuonOptions options{.momentum = .9, .nesterov = nesterov, .momentum_rule = rule};
        const int64_t count = 2500;
        Elements momentum(dtype, {count}), update(DType::kFloat32, {count});
        std::vector<double> b(2500), u(2500);
        for (uint64_t i = 1; i < 4; ++i) {
          Elements g(DType::kBFloat16, {count}, random_values(2500, i));
          const std::vector<double> gradient = g.values();
          const bool missing = i == 2;
          muon_momentum(options, missing ? View{} : g.view(), momentum.view(), update.view());
          for (size_t k = 0; k < b.size(); ++k) {
            const double x = missing ? 0 : gradient[k], weight = rule == MomentumRule::kAverage ? .1 : 1;
            b[k] = .9 * b[k] + weight * x;
            u[k] = nesterov ? weight * x + .9 * b[k] : b[k];
          }
          const double tolerance = dtype == DType::kBFloat16 ? 1e-2 : 1e-6;
          EXPECT_LT(distance(momentum.values(), b), tolerance);
          EXPECT_LT(distance(update.values(), u), tolerance);
        }
      }
  EXPECT_DOUBLE_EQ(momentum_conversion(MomentumRule::kSum, MomentumRule::kAverage, .95), 1 - .95);
  EXPECT_DOUBLE_EQ(momentum_conversion(MomentumRule::kAverage, MomentumRule::kSum, .75), 4);
  EXPECT_EQ(momentum_conversion(MomentumRule::kSum, MomentumRule::kSum, .95), 1);
}

TEST(Muon, Scales) {
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kOriginal, 8, 2), 2);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kOriginal, 2, 8), 1);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kMatchRmsAdamW, 9, 4), .2 * 3);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kSpectral, 2, 8), .5);
}

/// Fused rows, batches and convolutions, against matrices taken out by hand.
TEST(Muon, EveryRuleIsTheReferenceMatrixByMatrix) {
  EXPECT_TRUE(rc::check([] {
    const auto kind = static_cast<MatrixKind>(pick(0, 3));
    const int64_t batch = kind == MatrixKind::kBatch ? pick(0, 4) : 1, columns = pick(0, 13) * 2,
                  groups = pick(1, 4);
    std::vector<int64_t> counts;
    for (int64_t i = pick(1, 4); i-- > 0;) counts.push_back(pick(0, 6));
    MatrixRule rule{kind, interleaved_rows(groups, counts)};
    int64_t rows = 0;
    for (int64_t count : counts) rows += count * groups;
    Dims shape = kind == MatrixKind::kBatch         ? Dims{batch, rows, columns}
                 : kind == MatrixKind::kConvolution ? Dims{rows, 2, columns / 2}
                                                    : Dims{rows, columns};
    MuonOptions options;
    options.scale = static_cast<MuonScale>(pick(0, 3));
    options.newton_schulz.precision = NewtonSchulzPrecision::kFloat32;
    const auto in_type = static_cast<DType>(pick(0, 4)), out_type = static_cast<DType>(pick(0, 4));
    Elements input(in_type, shape, random_values(static_cast<size_t>(numel(shape)))), output(out_type, shape);
    MuonCalculator calculator;
    calculator.update(options, rule, input.view(), output.view());

    const std::vector<double> in = input.values(), out = output.values();
    std::vector<double> wanted(in.size());
    int64_t matrices = 0, work = 0;
    for (int64_t b = 0; b < batch; ++b)
      for (const RowPart& part : rule.parts) {
        std::vector<int64_t> own;
        for (const RowRange& range : part)
          for (int64_t i = range.begin; i < range.end; ++i) own.push_back(i);
        ReferenceMatrix matrix(std::ssize(own), columns);
        auto at = [&](int64_t i, int64_t j) {
          return static_cast<size_t>((b * rows + own[static_cast<size_t>(i)]) * columns + j);
        };
        for (int64_t i = 0; i < matrix.rows; ++i)
          for (int64_t j = 0; j < columns; ++j) matrix.at(i, j) = in[at(i, j)];
        if (matrix.values.empty()) continue;
        ++matrices;
        work += newton_schulz_work(matrix.rows, columns);
        const ReferenceMatrix result = reference_newton_schulz(options.newton_schulz, matrix);
        for (int64_t i = 0; i < matrix.rows; ++i)
          for (int64_t j = 0; j < columns; ++j)
            wanted[at(i, j)] = result.at(i, j) * muon_scale(options.scale, matrix.rows, columns);
      }
    RC_ASSERT(calculator.newton_schulz().matrices() == matrices);
    RC_ASSERT(muon_work(rule, shape) == work);
    RC_ASSERT(distance(out, wanted) < (out_type == DType::kBFloat16  ? 5e-3
                                       : out_type == DType::kFloat16 ? 1e-3
                                                                     : 1e-4));
  }));
}

TEST(Muon, FusedRowsAreNotOneMatrix) {
  // q, k and v of [6, 4] interleaved by two groups of 1 + 1 + 1 rows.
  Elements input(DType::kFloat32, {6, 4}, random_values(24)), split(input), whole(input);
  MuonCalculator calculator;
  calculator.update({}, {MatrixKind::kMatrix, interleaved_rows(2, {1, 1, 1})}, input.view(), split.view());
  calculator.update({}, {}, input.view(), whole.view());
  EXPECT_GT(distance(split.values(), whole.values()), .05);
  EXPECT_EQ(interleaved_rows(2, {3, 1}), (std::vector<RowPart>{{{0, 3}, {4, 7}}, {{3, 4}, {7, 8}}}));
  EXPECT_EQ(stacked_rows({3, 1}), (std::vector<RowPart>{{{0, 3}}, {{3, 4}}}));
}

TEST(Muon, NorMuonEvensRowsAndKeepsTheNorm) {
  for (bool batched : {false, true}) {
    MuonOptions options;
    options.normuon = NorMuonOptions{};
    options.newton_schulz.precision = NewtonSchulzPrecision::kFloat32;
    const Dims shape = batched ? Dims{3, 6, 4} : Dims{6, 4};
    const MatrixRule rule{batched ? MatrixKind::kBatch : MatrixKind::kMatrix, stacked_rows({4, 2})};
    Elements moments(DType::kFloat32, row_moments_shape(rule, shape));
    std::vector<double> expected_moments(moments.values().size());
    for (uint64_t i = 0; i < 3; ++i) {
      Elements input(DType::kFloat32, shape, random_values(static_cast<size_t>(numel(shape)), i)),
          plain(input), output(input);
      MuonCalculator calculator;
      calculator.update(options, rule, input.view(), output.view(), moments.view());
      MuonOptions without = options;
      without.normuon.reset();
      calculator.update(without, rule, input.view(), plain.view());
      std::vector<double> wanted = plain.values();
      for (size_t first = 0; first < expected_moments.size(); first += (first % 6 == 0 ? 4 : 2)) {
        const size_t last = first + (first % 6 == 0 ? 4 : 2);
        const double scale = muon_scale(options.scale, static_cast<int64_t>(last - first), 4);
        double before = 0, after = 0;
        for (size_t row = first; row < last; ++row) {
          double sum = 0;
          for (size_t k = 0; k < 4; ++k) sum += wanted[row * 4 + k] * wanted[row * 4 + k] / (scale * scale);
          expected_moments[row] = .95 * expected_moments[row] + .05 * sum / 4;
          before += sum;
          for (size_t k = 0; k < 4; ++k) wanted[row * 4 + k] /= std::sqrt(expected_moments[row]) + 1e-10;
          for (size_t k = 0; k < 4; ++k) after += wanted[row * 4 + k] * wanted[row * 4 + k];
        }
        for (size_t k = first * 4; k < last * 4; ++k) wanted[k] *= scale * std::sqrt(before / after);
      }
      EXPECT_LT(distance(moments.values(), expected_moments), 1e-5);
      EXPECT_LT(distance(output.values(), wanted), 1e-5);
    }
  }
}

TEST(Muon, MastersAreStepped) {
  MuonOptions options{.lr = .1};
  Elements p(DType::kBFloat16, {3, 5}), master(DType::kFloat32, {3, 5}, std::vector<double>(15, 1));
  const Elements update(DType::kFloat32, {3, 5}, std::vector<double>(15, 1e-3));
  for (int i = 0; i < 10; ++i) muon_apply(options, p.view(), master.view(), Elements(update).view());
  double wanted = 1;
  for (int i = 0; i < 10; ++i) wanted = wanted * (1 - .1 * .1) - .1 * 1e-3;
  EXPECT_NEAR(master.values()[7], wanted, 1e-6);
  EXPECT_EQ(p.bytes, Elements(DType::kBFloat16, {3, 5}, master.values()).bytes);
}

TEST(Muon, QkClip) {
  EXPECT_EQ(qk_clip_factors(std::array{50., 100., 400.}), (std::vector<double>{1, 1, .25}));
  EXPECT_EQ(qk_clip_factors(std::array{50., 200., 400., 100.}, 2), (std::vector<double>{.5, .25}));
  Elements q(DType::kBFloat16, {4, 3}, std::vector<double>(12, 2));
  scale_rows(q.view(), {{1, 2}, {3, 4}}, std::sqrt(.25));
  EXPECT_EQ(q.values(), (std::vector<double>{2, 2, 2, 1, 1, 1, 2, 2, 2, 1, 1, 1}));
  EXPECT_THROW(scale_rows(q.view(), {{1, 5}}, 1), InvalidArgumentError);
  EXPECT_THROW(qk_clip_factors(std::array{1., 2., 3.}, 2), InvalidArgumentError);
}

TEST(Muon, SaysWhatIsWrong) {
  Elements cube(DType::kFloat32, {2, 3, 4}), matrix(DType::kFloat32, {6, 4});
  MuonCalculator calculator;
  EXPECT_THROW(calculator.update({}, {}, cube.view(), cube.view()), InvalidArgumentError);
  EXPECT_THROW(calculator.update({}, {MatrixKind::kBatch, {}}, matrix.view(), matrix.view()),
               InvalidArgumentError);
  for (const std::vector<RowPart>& parts :
       {std::vector<RowPart>{{{0, 5}}}, {{{0, 4}}, {{3, 6}}}, {{{0, 4}}, {{5, 6}}}, {{{0, 7}}}})
    EXPECT_THROW(calculator.update({}, {MatrixKind::kMatrix, parts}, matrix.view(), matrix.view()),
                 InvalidArgumentError);
  MuonOptions options;
  options.normuon = NorMuonOptions{};
  EXPECT_THROW(calculator.update(options, {}, matrix.view(), matrix.view()), InvalidArgumentError);
  EXPECT_THROW(muon_momentum({.momentum = 1}, matrix.view(), matrix.view(), matrix.view()),
               InvalidArgumentError);
  EXPECT_THROW(muon_momentum({}, cube.view(), matrix.view(), Elements(DType::kFloat32, {2}).view()),
               InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
