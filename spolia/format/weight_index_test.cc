#include "spolia/format/weight_index.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

TEST(WeightIndex, ReadsTheMapAndTheSize) {
  auto index = parse_weight_index(R"({"metadata": {"total_size": 578, "x": [{"weight_map": {}}], "y": null},
      "weight_map": {"b": "f2", "a": "f1", "c": "f1"}, "other": [1, -2, 3.5, true, "text", {"weight_map": 1}]})",
                                  "i");
  EXPECT_EQ(index.weight_map,
            (std::vector<std::pair<std::string, std::string>>{{"a", "f1"}, {"b", "f2"}, {"c", "f1"}}));
  EXPECT_EQ(index.total_size, 578.0);
  EXPECT_EQ(index.files(), (std::vector<std::string>{"f1", "f2"}));
  ASSERT_NE(index.find("b"), nullptr);
  EXPECT_EQ(*index.find("b"), "f2");
  EXPECT_EQ(index.find("bb"), nullptr);
  EXPECT_EQ(index.find(""), nullptr);
}

TEST(WeightIndex, TotalSizeMayBeAbsentOrAFloat) {
  EXPECT_EQ(parse_weight_index(R"({"weight_map": {}})", "i").total_size, std::nullopt);
  EXPECT_EQ(parse_weight_index(R"({"metadata": {"total_size": "9"}, "weight_map": {}})", "i").total_size,
            std::nullopt);
  EXPECT_EQ(parse_weight_index(R"({"metadata": {"total_size": 1.5e3}, "weight_map": {}})", "i").total_size,
            1500.0);
}

TEST(WeightIndex, RefusesWhatIsNoIndex) {
  auto expect = [](const std::string& json, std::string_view reason) {
    SCOPED_TRACE(json.substr(0, 200));
    try {
      parse_weight_index(json, "dir/index.json");
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CorruptError& error) {
      std::string message = error.what();
      EXPECT_TRUE(message.starts_with("\"dir/index.json\"")) << message;
      EXPECT_NE(message.find(reason), std::string::npos) << message;
    }
  };
  expect("", "byte 0");
  expect("[]", "byte 0");
  expect("{", "JSON");
  expect("{}", "no \"weight_map\"");
  expect(R"({"metadata":{"weight_map":{}}})", "no \"weight_map\"");
  expect(R"({"weight_map":[]})", "an array");
  expect(R"({"weight_map":"x"})", "a string");
  expect(R"({"weight_map":null})", "null");
  expect(R"({"weight_map":{"a":1}})", "\"a\" in \"weight_map\": a number");
  expect(R"({"weight_map":{"a":-1}})", "a number");
  expect(R"({"weight_map":{"a":null}})", "null");
  expect(R"({"weight_map":{"a":{}}})", "an object");
  expect(R"({"weight_map":{"a":["f"]}})", "an array");
  expect(R"({"weight_map":{"a":"f","a":"f"}})", "the tensor \"a\" twice");
  expect(R"({"weight_map":{},"weight_map":{}})", "a second weight_map");
  expect(R"({"x":)" + std::string(1'000'000, '['), "JSON");
}

TEST(WeightIndex, ReadsAFile) {
  MemoryStore store;
  store.create("/index.json")->write(0, bytes_of(R"({"weight_map":{"a":"f"}})"));
  EXPECT_EQ(read_weight_index(*store.open("/index.json")).files(), std::vector<std::string>{"f"});
}

TEST(WeightIndex, RefusesAHugeFileUnread) {
  MemoryStore store;
  store.create("/index.json")->write(100'000'000, bytes_of("x"));
  try {
    read_weight_index(*store.open("/index.json"));
    ADD_FAILURE();
  } catch (const CorruptError& error) {
    EXPECT_NE(std::string(error.what()).find("not credible"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace spolia
