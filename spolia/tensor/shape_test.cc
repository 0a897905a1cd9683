#include "spolia/tensor/shape.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TEST(Shape, CountsElements) {
  EXPECT_EQ(numel({}), 1);
  EXPECT_EQ(numel(Dims{2, 3, 4}), 24);
  EXPECT_EQ(numel(Dims{INT64_MAX, 0, INT64_MAX}), 0);
  EXPECT_THROW(numel(Dims{INT64_MAX, 2}), CorruptError);
  EXPECT_THROW(numel(Dims{0, -1}), CorruptError);
}

TEST(Shape, StridesAreRowMajor) {
  EXPECT_EQ(row_major_strides({}), Dims());
  EXPECT_EQ(row_major_strides(Dims{7}), Dims{1});
  EXPECT_EQ(row_major_strides(Dims{2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(row_major_strides(Dims{2, 0, 4}), (Dims{4, 4, 1}));
  EXPECT_THROW(row_major_strides(Dims{0, INT64_MAX, 2}), CorruptError);
}

TEST(Shape, IsWrittenForPeople) {
  EXPECT_EQ(shape_text({}), "scalar");
  EXPECT_EQ(shape_text(Dims{2, 0, 3}), "2x0x3");
  EXPECT_EQ(list_text({}), "[]");
  EXPECT_EQ(list_text(Dims{2, -1}), "[2, -1]");
}

}  // namespace
}  // namespace spolia
