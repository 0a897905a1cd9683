#include "spolia/optim/kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "spolia/layout/test_random.h"
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

}  // namespace
}  // namespace spolia
