#include "spolia/format/native/tagged_json.h"

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/json_records.h"
#include "spolia/format/native/random_value.h"

namespace spolia {
namespace {

Value text(std::string_view value) { return Value(std::string(value)); }
Value integer(int64_t value) { return Value(value); }
Value list(std::vector<Value> items) { return Value(List{std::move(items)}); }

Value read_back(std::string_view json) {
  Value found;
  bool met = false;
  read_json_records(fmt::format(R"({{"v": {{"value": {}}}}})", json), "f", [&](JsonRecord& record) {
    met = true;
    found = untagged(JsonObject(record.value).at("value"));
  });
  EXPECT_TRUE(met);
  return found;
}

TEST(TaggedJson, IsWrittenAsTheDocumentSays) {
  EXPECT_EQ(tagged_json(Value()), "null");
  EXPECT_EQ(tagged_json(Value(true)), "true");
  EXPECT_EQ(tagged_json(integer(-7)), "-7");
  EXPECT_EQ(tagged_json(Value(BigInt{"18446744073709551616"})), R"({"$int": "18446744073709551616"})");
  EXPECT_EQ(tagged_json(Value(1.0)), "1.0");
  EXPECT_EQ(tagged_json(Value(-0.0)), "-0.0");
  EXPECT_EQ(tagged_json(Value(0.1)), "0.1");
  EXPECT_EQ(tagged_json(Value(1e300)), "1e+300");
  EXPECT_EQ(tagged_json(Value(std::nan(""))), R"({"$float": "nan"})");
  EXPECT_EQ(tagged_json(Value(-INFINITY)), R"({"$float": "-inf"})");
  EXPECT_EQ(tagged_json(text("é\n")), R"("é\n")");
  EXPECT_EQ(tagged_json(text("\xff")), R"({"$text": "ff"})");
  EXPECT_EQ(tagged_json(Value(Bytes{{std::byte{0}, std::byte{0xab}}})), R"({"$bytes": "00ab"})");
  EXPECT_EQ(tagged_json(list({integer(1), Value(Tuple{{integer(2)}})})), R"([1, {"$tuple": [2]}])");
  EXPECT_EQ(tagged_json(Value(Set{{integer(1)}})), R"({"$set": [1]})");
  EXPECT_EQ(tagged_json(Value(Dict{{{text("b"), integer(1)}, {text("a"), integer(2)}}})),
            R"({"b": 1, "a": 2})");
  EXPECT_EQ(tagged_json(Value(Dict{{{integer(1), integer(2)}}})), R"({"$dict": [[1, 2]]})");
  EXPECT_EQ(tagged_json(Value(Dict{{{text("$int"), text("1")}}})), R"({"$dict": [["$int", "1"]]})");
  EXPECT_EQ(tagged_json(Value(Global{"torch", "float32"})), R"({"$global": ["torch", "float32"]})");
}

RC_GTEST_PROP(TaggedJson, GivesBackEveryTree, ()) {
  const Value value = random_value(pick(0, 5));
  RC_ASSERT(can_tag(value));
  const std::string json = tagged_json(value);
  RC_ASSERT(nlohmann::json::accept(json));
  const Value again = read_back(json);
  RC_ASSERT(again == value);
  RC_ASSERT(tagged_json(again) == json);
}

RC_GTEST_PROP(TaggedJson, GivesBackEveryBitOfAFloat, (uint64_t bits)) {
  const double number = std::bit_cast<double>(bits);
  const Value again = read_back(tagged_json(Value(number)));
  RC_ASSERT(again.get_if<double>() != nullptr);
  RC_ASSERT(std::isnan(number) || std::bit_cast<uint64_t>(*again.get_if<double>()) == bits);
}

TEST(TaggedJson, KeepsTheSignOfZero) {
  EXPECT_TRUE(std::signbit(*read_back(tagged_json(Value(-0.0))).get_if<double>()));
  EXPECT_FALSE(std::signbit(*read_back(tagged_json(Value(0.0))).get_if<double>()));
}

Value nested(size_t depth) {
  Value value;
  for (size_t i = 1; i < depth; ++i) value = Value(Dict{{{integer(1), std::move(value)}}});
  return value;
}

TEST(TaggedJson, HoldsNoObjectsAndNothingTooDeep) {
  auto record = std::make_unique<Record>();
  record->type = {"m", "C"};
  EXPECT_FALSE(can_tag(list({Value(std::move(record))})));
  EXPECT_FALSE(can_tag(Value(BigInt{"12"})));
  EXPECT_FALSE(can_tag(nested(kMaxTaggedDepth + 1)));
  const Value deepest = nested(kMaxTaggedDepth);
  ASSERT_TRUE(can_tag(deepest));
  EXPECT_EQ(read_back(tagged_json(deepest)), deepest);
}

TEST(TaggedJson, RefusesTagsThatAreMisused) {
  for (const char* json : {R"({"$tuple": 1})",
                           R"({"$tuple": {}})",
                           R"({"$set": null})",
                           R"({"$unknown": 1})",
                           R"({"$": 1})",
                           R"({"$tuple": [], "a": 1})",
                           R"({"a": 1, "$tuple": []})",
                           R"({"$bytes": "0"})",
                           R"({"$bytes": "AB"})",
                           R"({"$bytes": "0g"})",
                           R"({"$bytes": 5})",
                           R"({"$text": "f"})",
                           R"({"$int": 5})",
                           R"({"$int": "5"})",
                           R"({"$int": ""})",
                           R"({"$int": "-"})",
                           R"({"$int": "+18446744073709551616"})",
                           R"({"$int": "018446744073709551616"})",
                           R"({"$int": "18446744073709551616 "})",
                           R"({"$float": "NaN"})",
                           R"({"$float": 1})",
                           R"({"$dict": {}})",
                           R"({"$dict": [1]})",
                           R"({"$dict": [[1]]})",
                           R"({"$dict": [[1, 2, 3]]})",
                           R"({"$global": ["a"]})",
                           R"({"$global": [1, 2]})",
                           R"({"$global": "a"})",
                           "18446744073709551616",
                           "[{\"$no\": 1}]"}) {
    EXPECT_THROW(read_back(json), CorruptError) << json;
  }
  EXPECT_THROW(untagged_text(integer(1)), CorruptError);
  std::string deep;
  for (size_t i = 0; i < 2 * kMaxTaggedDepth; ++i) deep += '[';
  EXPECT_THROW(read_back(deep + std::string(2 * kMaxTaggedDepth, ']')), CorruptError);
}

}  // namespace
}  // namespace spolia
