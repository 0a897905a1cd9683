#include "spolia/optim/kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"
#include "spolia/optim/bfloat16_products.h"
#include "spolia/optim/gemm.h"
#include "spolia/optim/small_products.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_reference.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

TEST(Kernels, BFloat16CastsAreThoseOfCast) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> found(all.size()), wanted(all.size());
  bfloat16_kernels().widen(65536, all.data(), found.data());
  cast(DType::kFloat32, wanted.data(), DType::kBFloat16, all.data(), 65536);
  EXPECT_EQ(std::memcmp(found.data(), wanted.data(), found.size() * 4), 0);
  std::vector<float> values;
  for (uint32_t high = 0; high < 65536; high += 7)
    for (uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      values.push_back(std::bit_cast<float>(high << 16 | low));
  std::vector<uint16_t> halves(values.size()), expected(values.size());
  bfloat16_kernels().narrow(std::ssize(values), values.data(), halves.data());
  cast(DType::kBFloat16, expected.data(), DType::kFloat32, values.data(), std::ssize(values));
  EXPECT_EQ(halves, expected);
}

TEST(Kernels, Mirror) {
  for (int64_t size : {0, 1, 15, 16, 17, 40}) {
    const int64_t stride = size + 3;
    std::vector<double> matrix = random_values(static_cast<size_t>(size * stride));
    const std::vector<double> before = matrix;
    kernels<double>().mirror(size, matrix.data(), stride);
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < stride; ++j)
        EXPECT_EQ(matrix[static_cast<size_t>(i * stride + j)],
                  before[static_cast<size_t>(j < size && j > i ? j * stride + i : i * stride + j)]);
  }
}

/// A matrix with padded rows, whose padding is NaN: it must not reach what is computed.
struct Padded {
  int64_t rows, columns, stride;
  std::vector<float> values;
  Padded(int64_t r, int64_t c)
      : rows(r),
        columns(c),
        stride((c + kSmallLanes - 1) / kSmallLanes * kSmallLanes),
        values(static_cast<size_t>(r * stride), std::numeric_limits<float>::quiet_NaN()) {}
  explicit Padded(const ReferenceMatrix& m) : Padded(m.rows, m.columns) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) at(i, j) = static_cast<float>(m.at(i, j));
  }
  float& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * stride + j)]; }
  SmallMatrix matrix() { return {values.data(), stride}; }
};

TEST(SmallProducts, Mirror) {
  const SmallProducts* small = small_products();
  if (!small) GTEST_SKIP() << "not on this processor";
  for (int64_t size : {1, 15, 16, 17, 40, 64}) {
    Padded matrix(size, size);
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j <= i; ++j) matrix.at(i, j) = static_cast<float>(i * size + j);
    small->mirror(size, matrix.matrix());
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < size; ++j)
        EXPECT_EQ(matrix.at(i, j), static_cast<float>(std::max(i, j) * size + std::min(i, j)));
  }
}

TEST(SmallProducts, AreTheReference) {
  const SmallProducts* small = small_products();
  if (!small) GTEST_SKIP() << "not on this processor";
  EXPECT_TRUE(rc::check([small] {
    const int64_t rows = pick(1, 70), columns = pick(1, 150), depth = pick(1, 60);
    const ReferenceMatrix a(rows, depth, random_values(static_cast<size_t>(rows * depth), 1));
    const ReferenceMatrix b(depth, columns, random_values(static_cast<size_t>(columns * depth), 2));
    Padded pa(a), pb(b), pc(rows, columns), transposed(columns, depth);
    small->product(rows, columns, depth, pa.matrix(), pb.matrix(), pc.matrix());
    const ReferenceMatrix c = reference_product(a, b);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) RC_ASSERT(std::abs(pc.at(i, j) - c.at(i, j)) < 1e-3);
    small->transpose(depth, columns, pb.matrix(), transposed.matrix());
    for (int64_t i = 0; i < depth; ++i)
      for (int64_t j = 0; j < columns; ++j) RC_ASSERT(transposed.at(j, i) == pb.at(i, j));

    Padded wide(depth, rows), square(rows, rows);  // the lower triangle of a aᵀ
    small->transpose(rows, depth, pa.matrix(), wide.matrix());
    small->lower(rows, depth, pa.matrix(), wide.matrix(), square.matrix());
    const ReferenceMatrix gram = reference_product(a, reference_transpose(a));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j <= i; ++j) RC_ASSERT(std::abs(square.at(i, j) - gram.at(i, j)) < 1e-3);
  }));
}

TEST(BFloat16Products, SymmetricMatricesAreNarrowed) {
  const BFloat16Products* own = bfloat16_products();
  if (!own) GTEST_SKIP() << "not on this processor";
  for (int64_t size : {1, 2, 15, 16, 17, 40, 64}) {
    Padded matrix(size, size);
    const std::vector<double> values = random_values(static_cast<size_t>(size * size), 3);
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j <= i; ++j)
        matrix.at(i, j) = static_cast<float>(values[static_cast<size_t>(i * size + j)] + .0013);
    const int64_t stride = matrix.stride + 16;
    std::vector<uint16_t> narrow(static_cast<size_t>(size * stride), 0xABCD);
    own->narrow_symmetric(size, matrix.values.data(), matrix.stride, narrow.data(), stride);
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < stride; ++j) {
        uint16_t wanted = 0;
        if (j < size && i != j)
          cast(DType::kBFloat16, &wanted, DType::kFloat32, &matrix.at(std::max(i, j), std::min(i, j)), 1);
        if (j < size || j >= matrix.stride) {
          ASSERT_EQ(narrow[static_cast<size_t>(i * stride + j)], j < size ? wanted : 0xABCD);
        }
      }
  }
}

TEST(Gemm, EveryProductIsTheReference) {
  EXPECT_TRUE(rc::check([] {
    const DType in = std::array{DType::kFloat64, DType::kFloat32, DType::kBFloat16}[pick(0, 3)];
    const DType out = in == DType::kFloat64 ? in : DType::kFloat32;
    const bool lower = pick(0, 2) == 1, b_transposed = pick(0, 2) == 1,
               a_transposed = !lower && pick(0, 4) == 0;
    // Some are deeper than a packed panel.
    const int64_t m = pick(1, 150), n = lower ? m : pick(1, 150),
                  k = pick(0, 8) == 0 ? pick(500, 1100) : pick(1, 70);
    const ReferenceMatrix a(m, k, random_values(static_cast<size_t>(m * k), 1)),
        b(k, n, random_values(static_cast<size_t>(k * n), 2));
    auto stored = [&](const ReferenceMatrix& matrix, bool transposed) {  // with NaN after each row
      const ReferenceMatrix whole = transposed ? reference_transpose(matrix) : matrix;
      ReferenceMatrix padded(whole.rows, whole.columns + 3, {});
      for (int64_t i = 0; i < padded.rows; ++i)
        for (int64_t j = 0; j < padded.columns; ++j)
          padded.at(i, j) = j < whole.columns ? whole.at(i, j) : std::numeric_limits<double>::quiet_NaN();
      return Elements(in, {padded.rows, padded.columns}, padded.values);
    };
    const Elements left = stored(a, a_transposed), right = stored(b, b_transposed);
    Elements result(out, {m, n + 5}, std::vector<double>(static_cast<size_t>(m * (n + 5)), 77));
    Gemm gemm(static_cast<int>(pick(1, 3)), pick(0, 2) == 1);
    const MatrixIn of_a{left.bytes.data(), left.shape[1], a_transposed},
        of_b{right.bytes.data(), right.shape[1], b_transposed};
    if (lower) {
      gemm.multiply_lower(in, n, k, of_a, of_b, result.bytes.data(), n + 5);
    } else {
      gemm.multiply(in, m, n, k, of_a, of_b, result.bytes.data(), n + 5);
    }
    const ReferenceMatrix wanted = reference_product(a, b);
    const std::vector<double> found = result.values();
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n + 5; ++j) {
        const double value = found[static_cast<size_t>(i * (n + 5) + j)];
        if (j >= n) {
          RC_ASSERT(value == 77);
        } else if (!lower || j <= i) {
          RC_ASSERT(std::abs(value - wanted.at(i, j)) < 1e-3);
        }
      }
    RC_ASSERT(gemm.operations() >= (lower ? n * n * k : 2 * m * n * k));
  }));
}

TEST(Gemm, SaysWhatIsWrong) {
  std::array<float, 4> values{};
  const MatrixIn matrix{values.data(), 1};
  EXPECT_THROW(Gemm(0), InvalidArgumentError);
  EXPECT_THROW(Gemm().multiply(DType::kFloat16, 1, 1, 1, matrix, matrix, values.data(), 1), UnsupportedError);
  EXPECT_THROW(Gemm().multiply(DType::kFloat32, 1, 1, 0, matrix, matrix, values.data(), 1),
               InvalidArgumentError);
  Gemm().multiply_lower(DType::kBFloat16, 0, 5, matrix, matrix, values.data(), 1);
}

}  // namespace
}  // namespace spolia
