#include "spolia/format/joined_source.h"

#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/safetensors/test_files.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

std::string bytes_at(const Source& source, size_t tensor) {
  const Payload payload = source.payload(tensor, 0);
  std::string bytes(static_cast<size_t>(payload.length), '\0');
  source.file(payload.stored.file)
      .read(payload.stored.offset + payload.offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

TEST(JoinedSource, HasTheFirstThenSomeOfTheBaseThenWhatIsFilled) {
  const auto store = std::make_shared<MemoryStore>();
  put(*store, "/a/one.safetensors",
      safetensors_bytes({{"x", DType::kInt8, {2}, 'x'}, {"y", DType::kInt8, {3}, 'y'}}));
  put(*store, "/b/two.safetensors",
      safetensors_bytes({{"x", DType::kInt8, {1}, '1'}, {"z", DType::kInt8, {2}, '2'}}));
  const auto first = open_source(store, "/a"), base = open_source(store, "/b");
  const auto joined = join_sources(*first, base.get(), {1}, {{"w", DType::kInt16, {2, 3}, -2}});
  const Catalog& catalog = joined->catalog();
  ASSERT_EQ(catalog.tensors.size(), 4u);
  EXPECT_EQ(catalog.tensors[2].name, "z");
  EXPECT_EQ(catalog.tensors[3].shape, (Dims{2, 3}));
  EXPECT_EQ(bytes_at(*joined, 0), "xx");
  EXPECT_EQ(bytes_at(*joined, 1), "yyy");
  EXPECT_EQ(bytes_at(*joined, 2), "22");
  EXPECT_EQ(bytes_at(*joined, 3), "\xFE\xFF");
  EXPECT_EQ(joined->payload(3, 0).strides, (Dims{0, 0}));
  EXPECT_EQ(catalog.path_of(catalog.tensors[2].extents[0].file), "/b/two.safetensors");
  EXPECT_EQ(catalog.path_of(catalog.tensors[0].extents[0].file), "/a/one.safetensors");
  EXPECT_EQ(join_sources(*first, nullptr, {}, {})->catalog().tensors.size(), 2u);
  EXPECT_THROW(join_sources(*first, nullptr, {}, {{"w", DType::kUInt8, {2}, -1}}), InvalidArgumentError);
}

TEST(JoinedSource, ElementsAreExactOrRounded) {
  auto element = [](DType dtype, double value) {
    const auto bytes = element_of(dtype, value);
    return bytes ? std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()) : "none";
  };
  EXPECT_EQ(element(DType::kFloat32, 1.0), std::string("\0\0\x80\x3f", 4));
  EXPECT_EQ(element(DType::kBFloat16, -2.0), std::string("\0\xc0", 2));
  EXPECT_EQ(element(DType::kInt8, -128), "\x80");
  EXPECT_EQ(element(DType::kInt8, 128), "none");
  EXPECT_EQ(element(DType::kInt8, -129), "none");
  EXPECT_EQ(element(DType::kInt8, 0.5), "none");
  EXPECT_EQ(element(DType::kUInt8, 255), "\xff");
  EXPECT_EQ(element(DType::kUInt8, -1), "none");
  EXPECT_EQ(element(DType::kInt64, 9223372036854775808.0), "none");
  EXPECT_EQ(element(DType::kInt64, -9223372036854775808.0), std::string("\0\0\0\0\0\0\0\x80", 8));
  EXPECT_EQ(element(DType::kUInt64, 18446744073709551616.0), "none");
  EXPECT_EQ(element(DType::kInt32, std::numeric_limits<double>::quiet_NaN()), "none");
  EXPECT_EQ(element(DType::kBool, 1), "\1");
  EXPECT_EQ(element(DType::kBool, 2), "none");
  EXPECT_EQ(element(DType::kFloat8E4M3FN, 0), std::string(1, '\0'));
  EXPECT_EQ(element(DType::kFloat8E4M3FN, 1), "none");
  EXPECT_EQ(element(DType::kFloat8E8M0FNU, 0), "none");
  EXPECT_EQ(element(DType::kComplex64, 0), std::string(8, '\0'));
}

}  // namespace
}  // namespace spolia
