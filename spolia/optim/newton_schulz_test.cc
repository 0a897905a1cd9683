#include "spolia/optim/newton_schulz.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_reference.h"

namespace spolia {
namespace {

std::vector<double> orthogonalised(const NewtonSchulzOptions& options, DType dtype,
                                   const ReferenceMatrix& matrix, int threads = 1) {
  Elements elements(dtype, {matrix.rows, matrix.columns}, matrix.values);
  NewtonSchulz(threads).orthogonalise(options, elements.view(), elements.view());
  return elements.values();
}

/// The reference with the roundings of PyTorch's Muon: what it keeps between products has `bits` significant
/// ones, 8 for bfloat16.
std::vector<double> rounded_newton_schulz(const NewtonSchulzOptions& options, ReferenceMatrix x,
                                          int bits = 8) {
  auto round = [bits](double value) {
    int exponent;
    const double fraction = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
  };
  auto round_all = [&](ReferenceMatrix& m) {
    for (double& value : m.values) value = round(value);
  };
  const bool tall = x.rows > x.columns;
  if (tall) x = reference_transpose(x);
  round_all(x);
  double sum = 0;
  for (double value : x.values) sum += value * value;
  const double norm = std::max(round(std::sqrt(sum)) * options.norm_factor, options.epsilon);
  for (double& value : x.values) value = norm == 0 ? 0 : round(value / norm);
  for (int step = 0; step < options.steps; ++step) {
    const auto [a, b, c] =
        options.coefficients[std::min(static_cast<size_t>(step), options.coefficients.size() - 1)];
    ReferenceMatrix gram = reference_product(x, reference_transpose(x));
    round_all(gram);
    ReferenceMatrix factor = reference_product(gram, gram);
    for (size_t i = 0; i < gram.values.size(); ++i)
      factor.values[i] = round(b * gram.values[i] + c * factor.values[i]);
    ReferenceMatrix next = reference_product(factor, x);
    for (size_t i = 0; i < x.values.size(); ++i) x.values[i] = round(a * x.values[i] + next.values[i]);
  }
  return tall ? reference_transpose(x).values : x.values;
}

NewtonSchulzOptions in_form(NewtonSchulzOptions options, NewtonSchulzForm form) {
  options.form = form;
  return options;
}

const ReferenceMatrix kTwoByThree(2, 3, {1, 2, 3, 4, 5, 6});
constexpr std::array kForms{NewtonSchulzForm::kStandard, NewtonSchulzForm::kGram};
constexpr std::array kSets{"jordan", "quintic", "polar_express", "cans", "ten_steps"};

TEST(NewtonSchulz, Vectors) {
  const std::vector<double> wanted{-.568290, .057742, .683774, .563355, .405613, .247871};
  const std::vector<double> polar{-.557763, .093053, .743870, .639324, .497011, .354697};
  const std::vector<double> transposed{-.568290, .563355, .057742, .405613, .683774, .247871};
  NewtonSchulzOptions polar_express = newton_schulz_set("polar_express");
  polar_express.epsilon = 1e-6;
  for (DType dtype : {DType::kFloat64, DType::kFloat32})
    for (NewtonSchulzForm form : kForms) {
      auto near = [&](const NewtonSchulzOptions& options, const ReferenceMatrix& input,
                      const std::vector<double>& output) {
        std::vector<double> found = orthogonalised(in_form(options, form), dtype, input);
        for (size_t i = 0; i < output.size(); ++i)
          EXPECT_NEAR(found[i], output[i], dtype == DType::kFloat64 ? 1e-6 : 5e-5) << i;
      };
      near({}, kTwoByThree, wanted);
      near({}, reference_transpose(kTwoByThree), transposed);
      near(polar_express, kTwoByThree, polar);
      near({}, {2, 2, {3, 0, 0, 4}}, {.722876, 0, 0, 1.119204});
      near({}, {1, 1, {5}}, {.696436});
      near({}, {2, 2, {1, 0, 0, .001}}, {.696436, 0, 0, .470544});
      near({}, {2, 3, {1, 1, 1, 1, 1, 1}}, std::vector<double>(6, .284319));
      near({}, {2, 3, std::vector<double>(6)}, std::vector<double>(6));
      near({}, {1, 3, {1, 2, 3}}, {.18613, .372261, .558391});
    }
}

/// For σ/‖G‖ in [.01, 1]: what the coefficients promise.
TEST(NewtonSchulz, SetsBringSingularValuesToOne) {
  struct Range {
    const char* set;
    double low, high;
  };
  for (const Range& range : {Range{"jordan", .6818, 1.1344},
                             {"quintic", .978, 1.032},
                             {"polar_express", .8589, 1.1411},
                             {"cans", .884, 1.120},
                             {"ten_steps", .9994, 1.0006}}) {
    NewtonSchulzOptions options = newton_schulz_set(range.set);
    double low = 2, high = 0;
    for (int i = 1; i < 100; ++i) {  // σ = i/100, and another that completes the norm
      double sigma = i / 100., other = std::sqrt(1 - sigma * sigma);
      if (other < .01) continue;
      std::vector<double> found = orthogonalised(options, DType::kFloat64, {2, 2, {sigma, 0, 0, other}});
      low = std::min({low, found[0], found[3]});
      high = std::max({high, found[0], found[3]});
    }
    EXPECT_GT(low, range.low - 5e-4) << range.set;
    EXPECT_LT(high, range.high + 5e-4) << range.set;
  }
  EXPECT_THROW(newton_schulz_set("jordann"), NotFoundError);
}

TEST(NewtonSchulz, EveryShapeDtypeSetAndFormIsTheReference) {
  EXPECT_TRUE(rc::check([] {
    const int64_t rows = pick(1, 70), columns = pick(1, 70), batch = pick(1, 4);
    NewtonSchulzOptions options = newton_schulz_set(kSets[static_cast<size_t>(pick(0, 5))]);
    options.steps = static_cast<int>(pick(0, 9));
    options.form = static_cast<NewtonSchulzForm>(pick(0, 3));
    options.epsilon_rule = static_cast<EpsilonRule>(pick(0, 2));
    const auto dtype = static_cast<DType>(pick(0, 4));
    const std::vector<double> input =
        random_values(static_cast<size_t>(batch * rows * columns), static_cast<uint64_t>(pick(0, 1 << 30)));
    Elements from(dtype, {batch, rows, columns}, input), to(DType::kFloat64, {batch, rows, columns});
    NewtonSchulz calculator;
    calculator.orthogonalise(options, from.view(), to.view());
    RC_ASSERT(calculator.matrices() == batch);
    const std::vector<double> found = to.values();
    // A step multiplies what rounding does to a singular value by its polynomial's slope.
    double amplified = 1;
    for (int step = 0; step < options.steps; ++step) {
      const NewtonSchulzCoefficients k =
          options.coefficients[std::min(static_cast<size_t>(step), options.coefficients.size() - 1)];
      double steepest = 0;
      for (double x = 0; x < 1.15; x += .05)
        steepest = std::max(steepest, std::abs(k.a + 3 * k.b * x * x + 5 * k.c * x * x * x * x));
      amplified *= steepest;
    }
    const bool narrow = dtype != DType::kFloat64 && dtype != DType::kFloat32 && bfloat16_products_are_fast();
    const double tolerance = dtype == DType::kFloat64 ? 4e-15 * amplified + 1e-13 : 2e-6 * amplified + 1e-5;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t size = rows * columns;
      auto part = [&](const std::vector<double>& all) {
        return std::vector(all.begin() + i * size, all.begin() + (i + 1) * size);
      };
      const ReferenceMatrix matrix(rows, columns, part(input));
      const std::vector<double> wanted = reference_newton_schulz(options, matrix).values;
      const double off = distance(part(found), wanted);
      // Products of bfloat16 are better than those of a dtype with two bits less, however unlucky the matrix.
      const double allowed =
          narrow ? distance(rounded_newton_schulz(options, matrix, 6), wanted) + 1e-2 : tolerance;
      if (off > allowed)
        RC_FAIL(fmt::format("{} x {} of {}, {} steps from a = {}, form {}: off by {:.3g}, allowed {:.3g}",
                            rows, columns, name_of(dtype), options.steps, options.coefficients[0].a,
                            static_cast<int>(options.form), off, allowed));
    }
  }));
}

TEST(NewtonSchulz, LargeMatricesAndBlocks) {
  // Shapes about the blocks of the symmetric products.
  for (auto [rows, columns] : {std::pair<int64_t, int64_t>{95, 97}, {129, 200}, {257, 259}, {200, 130}}) {
    ReferenceMatrix matrix(rows, columns, random_values(static_cast<size_t>(rows * columns)));
    const std::vector<double> wanted = reference_newton_schulz({}, matrix).values;
    for (NewtonSchulzForm form : kForms) {
      EXPECT_LT(distance(orthogonalised(in_form({}, form), DType::kFloat32, matrix), wanted), 1e-4);
      EXPECT_LT(distance(orthogonalised(in_form({}, form), DType::kBFloat16, matrix), wanted), 2e-2);
    }
  }
}

TEST(NewtonSchulz, BFloat16ProductsAreGoodToBFloat16) {
  for (auto [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {16, 16}, {40, 33}, {48, 200}, {120, 90}, {60, 260}}) {
    const ReferenceMatrix matrix(rows, columns, random_values(static_cast<size_t>(rows * columns)));
    const std::vector<double> wanted = reference_newton_schulz({}, matrix).values;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (NewtonSchulzForm form : kForms) {
        NewtonSchulzOptions options = in_form({}, form);
        options.precision = NewtonSchulzPrecision::kBFloat16Products;
        for (int threads : {1, 2}) {  // by kernels of our own, where there are; by the library
          const double off = distance(orthogonalised(options, dtype, matrix, threads), wanted);
          EXPECT_LT(off, 1.2e-2) << rows << ' ' << columns;
          if (rows > 1) {
            EXPECT_GT(off, 1e-4);  // they were taken
          }
        }
      }
  }
}

/// Noise; singular values over two decades; a few large ones over noise.
ReferenceMatrix with_spectrum(int kind, int64_t rows, int64_t columns) {
  auto noise = [](int64_t r, int64_t c, uint64_t seed) {
    return ReferenceMatrix(r, c, random_values(static_cast<size_t>(r * c), seed));
  };
  ReferenceMatrix matrix = noise(rows, columns, 1);
  if (kind == 0) return matrix;
  const int64_t rank = kind == 1 ? std::min(rows, columns) : 6;
  ReferenceMatrix left = noise(rows, rank, 2);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; kind == 1 && j < rank; ++j)
      left.at(i, j) *= std::pow(10, -2. * static_cast<double>(j) / static_cast<double>(rank));
  const ReferenceMatrix large = reference_product(left, noise(rank, columns, 3));
  for (size_t i = 0; i < matrix.values.size(); ++i)
    matrix.values[i] = large.values[i] + (kind == 2 ? .1 * matrix.values[i] : 0);
  return matrix;
}

TEST(NewtonSchulz, BFloat16ProductsAreNoFurtherOffThanPyTorchs) {
  for (const char* set : {"jordan", "quintic", "polar_express"})
    for (int spectrum : {0, 1, 2})
      for (auto [rows, columns] :
           {std::pair<int64_t, int64_t>{64, 64}, {150, 140}, {90, 360}, {128, 256}, {300, 64}}) {
        NewtonSchulzOptions options = newton_schulz_set(set);
        options.precision = NewtonSchulzPrecision::kBFloat16Products;
        const ReferenceMatrix matrix = with_spectrum(spectrum, rows, columns);
        const std::vector<double> wanted = reference_newton_schulz(options, matrix).values;
        const double pytorchs = distance(rounded_newton_schulz(options, matrix), wanted);
        for (NewtonSchulzForm form : kForms) {
          if (form == NewtonSchulzForm::kGram && std::max(rows, columns) < 2 * std::min(rows, columns))
            continue;
          for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            ReferenceMatrix rounded(rows, columns, Elements(dtype, {rows, columns}, matrix.values).values());
            EXPECT_LE(distance(orthogonalised(in_form(options, form), dtype, rounded), wanted), pytorchs)
                << set << " of " << rows << " x " << columns << ", spectrum " << spectrum << ", form "
                << static_cast<int>(form) << ", " << name_of(dtype);
          }
        }
      }
}

TEST(NewtonSchulz, StridedInPlaceAndReused) {
  // One calculator for many shapes; columns of a larger matrix, transposed, in place.
  NewtonSchulz calculator;
  const int64_t rows = 12, columns = 20;
  for (int64_t width : {5, 20, 3}) {
    Elements whole(DType::kFloat32, {rows, columns}, random_values(static_cast<size_t>(rows * columns)));
    const std::vector<double> before = whole.values();
    View part = whole.view();
    part.shape = {width, rows};
    part.strides = {4, columns * 4};
    ReferenceMatrix matrix(width, rows);
    for (int64_t i = 0; i < width; ++i)
      for (int64_t j = 0; j < rows; ++j) matrix.at(i, j) = before[static_cast<size_t>(j * columns + i)];
    calculator.orthogonalise({}, part, part);
    const std::vector<double> after = whole.values();
    const ReferenceMatrix wanted = reference_newton_schulz({}, matrix);
    for (int64_t j = 0; j < rows; ++j)
      for (int64_t i = 0; i < columns; ++i) {
        size_t at = static_cast<size_t>(j * columns + i);
        if (i < width) {
          EXPECT_NEAR(after[at], wanted.at(i, j), 1e-5);
        } else {
          EXPECT_EQ(after[at], before[at]);
        }
      }
  }
  EXPECT_EQ(calculator.matrices(), 3);
}

TEST(NewtonSchulz, NoNanFromZeroTinyHugeOrRankOne) {
  const double huge = 3e38, tiny = 1e-45;
  for (NewtonSchulzForm form : kForms)
    for (const char* set : kSets)
      for (DType dtype : {DType::kFloat32, DType::kBFloat16})
        for (double epsilon : {0., 1e-7})
          for (double size : {0., tiny, 1e-38, 1e-20, 1., 1e20, huge}) {
            NewtonSchulzOptions options = in_form(newton_schulz_set(set), form);
            options.epsilon = epsilon;
            if (dtype == DType::kBFloat16 && size == tiny) size = 1e-40;
            std::vector<double> one_row(300, size), rank_one(300);
            for (size_t i = 0; i < 300; ++i) rank_one[i] = size * static_cast<double>(i % 20) / 20;
            for (const ReferenceMatrix& matrix :
                 {ReferenceMatrix(15, 20, rank_one), ReferenceMatrix(1, 300, one_row),
                  ReferenceMatrix(300, 1, one_row)})
              for (double value : orthogonalised(options, dtype, matrix)) {
                ASSERT_TRUE(std::isfinite(value)) << set << ' ' << size;
                ASSERT_LT(std::abs(value), 1.3);
              }
          }
  // Without ε the size does not matter.
  NewtonSchulzOptions exact;
  exact.epsilon = 0;
  ReferenceMatrix small = kTwoByThree;
  for (double& value : small.values) value *= 1e-30;
  const std::vector<double> wanted = orthogonalised(exact, DType::kFloat32, kTwoByThree);
  const std::vector<double> found = orthogonalised(exact, DType::kFloat32, small);
  EXPECT_LT(distance(found, wanted), 1e-5);
}

TEST(NewtonSchulz, BFloat16ProductsStandEveryNorm) {
  const std::vector<double> values = random_values(64 * 128, 5);
  for (NewtonSchulzForm form : kForms)
    for (int exponent = -120; exponent <= 124; ++exponent) {
      ReferenceMatrix matrix(64, 128, values);
      for (double& value : matrix.values) value = std::ldexp(value, exponent - 6);
      NewtonSchulzOptions options = in_form({}, form);
      options.epsilon = 0;
      options.precision = NewtonSchulzPrecision::kFloat32;
      const std::vector<double> wanted = orthogonalised(options, DType::kFloat32, matrix);
      options.precision = NewtonSchulzPrecision::kBFloat16Products;
      EXPECT_LT(distance(orthogonalised(options, DType::kFloat32, matrix), wanted), 2e-2)
          << "2^" << exponent << ", form " << static_cast<int>(form);
    }
}

TEST(NewtonSchulz, RankDeficientWideMatricesStayBounded) {
  // Half of R's eigenvalues are zero up to rounding: what the restarts of the Gram form are for.
  ReferenceMatrix left(60, 30, random_values(1800, 2)), right(30, 500, random_values(15000, 3));
  const ReferenceMatrix matrix = reference_product(left, right);
  for (const char* set : kSets) {
    const NewtonSchulzOptions options = newton_schulz_set(set);
    const std::vector<double> wanted = reference_newton_schulz(options, matrix).values;
    for (NewtonSchulzForm form : kForms)
      EXPECT_LT(distance(orthogonalised(in_form(options, form), DType::kFloat32, matrix), wanted), 1e-2)
          << set;
  }
}

TEST(NewtonSchulz, PaddingWithZeroRowsIsNeutral) {
  ReferenceMatrix padded(5, 3);
  for (size_t i = 0; i < 6; ++i) padded.values[i] = kTwoByThree.values[i];
  for (DType dtype : {DType::kFloat64, DType::kFloat32}) {
    const std::vector<double> found = orthogonalised({}, dtype, padded),
                              wanted = orthogonalised({}, dtype, kTwoByThree);
    const double tolerance =
        dtype == DType::kFloat64 ? 1e-14 : 1e-5;  // float32: the other side is the longer one
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], i < 6 ? wanted[i] : 0, tolerance);
  }
}

TEST(NewtonSchulz, SameBitsEachTime) {
  Elements input(DType::kFloat32, {150, 600}, random_values(90000)),
      other(DType::kFloat32, {600, 70}, random_values(42000));
  NewtonSchulz calculator;
  std::vector<std::byte> first;
  for (int i = 0; i < 4; ++i) {
    if (i == 2) calculator = NewtonSchulz();
    if (i == 3) calculator.orthogonalise({}, other.view(), Elements(other).view());
    Elements output(DType::kFloat32, {150, 600});
    calculator.orthogonalise({}, input.view(), output.view());
    if (i == 0) first = output.bytes;
    EXPECT_EQ(output.bytes, first);
  }
}

TEST(NewtonSchulz, FormFollowsTheShape) {
  const auto standard = NewtonSchulzForm::kStandard, gram = NewtonSchulzForm::kGram;
  const NewtonSchulzOptions jordan, polar = newton_schulz_set("polar_express");
  EXPECT_EQ(newton_schulz_form(1024, 1024, jordan, false), standard);
  EXPECT_EQ(newton_schulz_form(1024, 1024, jordan, true), standard);
  EXPECT_EQ(newton_schulz_form(1024, 4096, jordan, false), gram);
  EXPECT_EQ(newton_schulz_form(4096, 1024, jordan, true), gram);
  // With steeper coefficients, or few rows, some products of the Gram form stay float32.
  EXPECT_EQ(newton_schulz_form(1024, 1536, jordan, true), gram);
  EXPECT_EQ(newton_schulz_form(1024, 1536, polar, true), standard);
  EXPECT_EQ(newton_schulz_form(64, 96, jordan, true), standard);
  EXPECT_EQ(newton_schulz_form(1024, 2048, polar, true), gram);
  EXPECT_EQ(newton_schulz_form(0, 2048, jordan, true), standard);
}

TEST(NewtonSchulz, WorkIsThatOfTheCheaperForm) {
  EXPECT_EQ(newton_schulz_work(3, 3), 20 * 27);
  EXPECT_EQ(newton_schulz_work(10, 3), 6 * 90 + 14 * 27);
  EXPECT_EQ(newton_schulz_work(3, 10), newton_schulz_work(10, 3));
  EXPECT_EQ(newton_schulz_work(0, 10), 0);
  EXPECT_THROW(newton_schulz_work(int64_t{1} << 31, int64_t{1} << 31), CorruptError);
  // In proportion to what is counted when it is done, above the shapes of which padding is a large part.
  auto counted = [](int64_t rows, int64_t columns) {
    Elements elements(DType::kFloat32, {rows, columns},
                      random_values(static_cast<size_t>(rows * columns), 1));
    NewtonSchulz calculator;
    calculator.orthogonalise({}, elements.view(), elements.view());
    return static_cast<double>(calculator.operations());
  };
  const double unit = counted(256, 256) / static_cast<double>(newton_schulz_work(256, 256));
  for (auto [rows, columns] : {std::pair<int64_t, int64_t>{256, 512}, {256, 1024}, {1024, 512}, {64, 512}}) {
    const double expected = unit * static_cast<double>(newton_schulz_work(rows, columns));
    EXPECT_NEAR(counted(rows, columns), expected, .2 * expected) << rows << ' ' << columns;
  }
}

TEST(NewtonSchulz, SaysWhatIsWrong) {
  Elements matrix(DType::kFloat32, {2, 3}), vector(DType::kFloat32, {6}), whole(DType::kInt64, {2, 3});
  NewtonSchulz calculator;
  EXPECT_THROW(calculator.orthogonalise({}, vector.view(), vector.view()), InvalidArgumentError);
  EXPECT_THROW(calculator.orthogonalise({}, matrix.view(), vector.view()), InvalidArgumentError);
  EXPECT_THROW(calculator.orthogonalise({}, whole.view(), matrix.view()), UnsupportedError);
  EXPECT_THROW(calculator.orthogonalise({.coefficients = {}}, matrix.view(), matrix.view()),
               InvalidArgumentError);
  EXPECT_THROW(calculator.orthogonalise({.steps = 100}, matrix.view(), matrix.view()), InvalidArgumentError);
  EXPECT_THROW(NewtonSchulz(0), InvalidArgumentError);
  Elements empty(DType::kFloat32, {3, 0});
  calculator.orthogonalise({}, empty.view(), empty.view());
  EXPECT_EQ(calculator.matrices(), 0);
  Elements nan(DType::kFloat32, {1, 2}, {1, std::numeric_limits<double>::quiet_NaN()});
  calculator.orthogonalise({}, nan.view(), nan.view());
  EXPECT_TRUE(std::isnan(nan.values()[0]));
}

}  // namespace
}  // namespace spolia
