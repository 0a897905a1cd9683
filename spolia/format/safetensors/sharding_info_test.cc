#include "spolia/format/safetensors/sharding_info.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/safetensors/header.h"

namespace spolia {
namespace {

TEST(ShardingInfo, ReadsOffsets) {
  auto info = parse_sharding_info(R"({"b": {"saved_offsets": [2, 0]}, "a": {"saved_offsets": []}})", "f");
  EXPECT_EQ(info, (ShardingInfo{{"a", {}}, {"b", {2, 0}}}));
  EXPECT_TRUE(parse_sharding_info("{}", "f").empty());
}

TEST(ShardingInfo, RefusesEverythingElse) {
  auto expect = [](const std::string& json, std::string_view reason) {
    SCOPED_TRACE(json.substr(0, 200));
    try {
      parse_sharding_info(json, "f.safetensors");
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CorruptError& error) {
      std::string message = error.what();
      EXPECT_TRUE(message.starts_with("\"f.safetensors\": DCP_SHARDING_INFO")) << message;
      EXPECT_NE(message.find(reason), std::string::npos) << message;
    }
  };
  expect("", "byte 0");
  expect("[]", "byte 0");
  expect(R"({"a":)", "JSON");
  expect(R"({"a":{}})", "\"a\": a tensor without saved_offsets");
  expect(R"({"a":[0]})", "an array");
  expect(R"({"a":1})", "a number");
  expect(R"({"a":{"saved_offsets":1}})", "a number");
  expect(R"({"a":{"saved_offsets":"1"}})", "a string");
  expect(R"({"a":{"saved_offsets":{}}})", "an object");
  expect(R"({"a":{"saved_offsets":[-1]}})", "a negative number");
  expect(R"({"a":{"saved_offsets":[1.5]}})", "a fraction");
  expect(R"({"a":{"saved_offsets":[[1]]}})", "an array");
  expect(R"({"a":{"saved_offsets":[{}]}})", "an object");
  expect(R"({"a":{"saved_offsets":[9223372036854775808]}})", "64 bits");
  expect(R"({"a":{"saved_offsets":[0],"saved_offsets":[0]}})", "the key \"saved_offsets\"");
  expect(R"({"a":{"saved_sizes":[0]}})", "the key \"saved_sizes\"");
  expect(R"({"a":{"saved_offsets":[0]},"a":{"saved_offsets":[0]}})", "\"a\": a tensor named twice");
  expect(std::string(R"({"a":{"saved_offsets":)") + std::string(100'000, '['), "an array");
  std::string many = R"({"a":{"saved_offsets":[0)";
  for (size_t i = 0; i < kMaxDims; ++i) many += ",0";
  expect(many, "one dim more");
}

}  // namespace
}  // namespace spolia
