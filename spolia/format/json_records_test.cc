#include "spolia/format/json_records.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

/// All records, a line each.
std::string records_of(std::string_view text) {
  std::string all;
  read_json_records(text, "f.json", [&](JsonRecord& record) {
    all += fmt::format("{}{} {}\n", record.key, record.in_array ? "[]" : "", record.value.text());
  });
  return all;
}

TEST(JsonRecords, HandsOnMembersAndTheElementsOfArrays) {
  EXPECT_EQ(records_of(R"({"a": 1, "b": [2, [3], {"c": [4]}], "d": {"e": {}}, "f": [], "g": null})"),
            "a 1\nb[] 2\nb[] [3]\nb[] {\"c\": [4]}\nd {\"e\": {}}\ng None\n");
  EXPECT_EQ(records_of("{}"), "");
}

TEST(JsonRecords, KeepsTheKindsOfNumbersApart) {
  EXPECT_EQ(
      records_of(R"({"a": [1, -1, 1.0, 1e2, -0.0, 9223372036854775807, 9223372036854775808]})"),
      "a[] 1\na[] -1\na[] 1.0\na[] 100.0\na[] -0.0\na[] 9223372036854775807\na[] 9223372036854775808\n");
  read_json_records(R"({"a": 123456789012345678901234567890})", "f", [](JsonRecord& record) {
    ASSERT_NE(record.value.get_if<BigInt>(), nullptr);
    EXPECT_EQ(record.value.get_if<BigInt>()->decimal, "123456789012345678901234567890");
  });
}

TEST(JsonRecords, RefusesWhatIsNoObjectOrHasAKeyTwice) {
  auto expect = [](const std::string& text, std::string_view reason) {
    SCOPED_TRACE(text.substr(0, 100));
    try {
      records_of(text);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CorruptError& error) {
      EXPECT_TRUE(std::string_view(error.what()).starts_with("\"f.json\"")) << error.what();
      EXPECT_NE(std::string_view(error.what()).find(reason), std::string_view::npos) << error.what();
    }
  };
  expect("", "byte 0");
  expect("[]", "byte 0");
  expect("{", "JSON");
  expect(R"({"a": [1)", "JSON");
  expect(R"({"a": 1} 2)", "JSON");
  expect(R"({"a": 1, "a": 2})", "second time");
  expect(R"({"a": [], "a": []})", "second time");
  expect(R"({"a": [{"b": 1, "c": 2, "b": 1}]})", "the key \"b\" for the second time");
  expect(R"({"a": 1e999})", "JSON");
  expect("{\"a\": " + std::string(100'000, '['), "nested so deeply");
}

TEST(JsonRecords, PutsThePlaceBeforeAnError) {
  try {
    read_json_records(R"({"a": [1, 2]})", "f.json", [](JsonRecord& record) {
      if (record.value == Value(int64_t{2})) throw UnsupportedError("no twos");
    });
    FAIL();
  } catch (const UnsupportedError& error) {
    EXPECT_STREQ(error.what(), "\"f.json\": \"a\"[1]: no twos");
  }
}

TEST(JsonObject, GivesMembersAndSaysWhatIsWrong) {
  read_json_records(R"({"a": {"text": "t", "number": 7, "list": [1, 2], "negative": -1}})", "f",
                    [](JsonRecord& record) {
                      const JsonObject object(record.value);
                      EXPECT_EQ(object.text("text"), "t");
                      EXPECT_EQ(object.integer("number"), 7);
                      EXPECT_EQ(object.list("list").size(), 2u);
                      EXPECT_EQ(json_integers(object.at("list"), "l"), (std::vector<int64_t>{1, 2}));
                      EXPECT_EQ(object.find("other"), nullptr);
                      EXPECT_THROW(object.at("other"), CorruptError);
                      EXPECT_THROW(object.text("number"), CorruptError);
                      EXPECT_THROW(object.integer("text"), CorruptError);
                      EXPECT_THROW(object.integer("number", 6), CorruptError);
                      EXPECT_THROW(object.integer("negative"), CorruptError);
                      EXPECT_THROW(object.list("text"), CorruptError);
                      EXPECT_THROW(json_integers(object.at("text"), "l"), CorruptError);
                    });
  EXPECT_THROW(JsonObject(Value(int64_t{1})), CorruptError);
}

}  // namespace
}  // namespace spolia
