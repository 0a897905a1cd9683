#include "spolia/tensor/dtype.h"

#include <set>
#include <string_view>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

TEST(DType, EveryNameLeadsBack) {
  std::set<std::string_view> names, safetensors;
  for (size_t i = 0; i < kDTypeCount; ++i) {
    auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(name_of(dtype)), dtype);
    EXPECT_TRUE(names.insert(name_of(dtype)).second) << name_of(dtype);
    std::string_view in_safetensors = info(dtype).safetensors;
    if (!in_safetensors.empty() && dtype != DType::kFloat4E2M1FNx2) {  // shares F4 with kFloat4E2M1FN
      EXPECT_TRUE(safetensors.insert(in_safetensors).second) << in_safetensors;
    }
  }
  EXPECT_EQ(dtype_from_name("float33"), std::nullopt);
  EXPECT_EQ(dtype_from_name(""), std::nullopt);
}

TEST(DType, KnowsElementSizes) {
  EXPECT_EQ(element_bytes(DType::kComplex128), 16);
  EXPECT_EQ(element_bytes(DType::kBFloat16), 2);
  EXPECT_EQ(element_bytes(DType::kBool), 1);
  EXPECT_TRUE(is_sub_byte(DType::kFloat6E2M3FN));
  EXPECT_EQ(element_bytes(DType::kFloat6E2M3FN), 1);
  EXPECT_FALSE(is_sub_byte(DType::kFloat4E2M1FNx2));
}

TEST(DType, SizesTensors) {
  EXPECT_EQ(byte_size(DType::kFloat32, {}), 4);
  EXPECT_EQ(byte_size(DType::kFloat32, Dims{3, 0}), 0);
  EXPECT_EQ(byte_size(DType::kInt64, Dims{3, 5}), 120);
  EXPECT_EQ(byte_size(DType::kFloat4E2M1FN, Dims{3, 4}), 6);
  EXPECT_EQ(byte_size(DType::kFloat6E3M2FN, Dims{4}), 3);
  EXPECT_THROW(byte_size(DType::kFloat4E2M1FN, Dims{3}), CorruptError);
  EXPECT_THROW(byte_size(DType::kFloat32, Dims{int64_t{1} << 60}), CorruptError);
  EXPECT_THROW(byte_size(DType::kUInt8, Dims{-1}), CorruptError);
}

}  // namespace
}  // namespace spolia
