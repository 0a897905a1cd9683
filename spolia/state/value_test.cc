#include "spolia/state/value.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace spolia {
namespace {

Value text(std::string_view value) { return Value(std::string(value)); }
Value integer(int64_t value) { return Value(value); }

Value list(std::vector<Value> items) { return Value(List{std::move(items)}); }
Value tuple(std::vector<Value> items) { return Value(Tuple{std::move(items)}); }

Value dict(std::vector<std::pair<Value, Value>> items) { return Value(Dict{std::move(items)}); }

Value record(std::string module, std::string name, std::vector<Value> args = {}, Value state = {}) {
  auto made = std::make_unique<Record>();
  made->type = {std::move(module), std::move(name)};
  made->args = std::move(args);
  made->state = std::move(state);
  return Value(std::move(made));
}

TEST(ValueTest, PythonTypes) {
  EXPECT_EQ(Value().python_type(), "NoneType");
  EXPECT_EQ(Value(true).python_type(), "bool");
  EXPECT_EQ(integer(1).python_type(), "int");
  EXPECT_EQ(Value(BigInt{"18446744073709551616"}).python_type(), "int");
  EXPECT_EQ(Value(0.5).python_type(), "float");
  EXPECT_EQ(text("a").python_type(), "str");
  EXPECT_EQ(Value(Bytes{}).python_type(), "bytes");
  EXPECT_EQ(list({}).python_type(), "list");
  EXPECT_EQ(tuple({}).python_type(), "tuple");
  EXPECT_EQ(Value(Set{}).python_type(), "set");
  EXPECT_EQ(dict({}).python_type(), "dict");
  EXPECT_EQ(Value(Global{"torch", "float32"}).python_type(), "dtype");
  EXPECT_EQ(Value(Global{"torch", "Tensor"}).python_type(), "type");
  EXPECT_EQ(record("a.b", "Outer.Inner").python_type(), "Inner");
}

TEST(ValueTest, JsonHasPlainValuesAlone) {
  for (const Value& plain :
       {Value(), Value(true), integer(1), Value(BigInt{"1"}), Value(NAN), text("é"), list({tuple({})}),
        dict({{integer(1), Value()}, {Value(), Value()}, {text("a"), list({})}})}) {
    EXPECT_TRUE(plain.is_json()) << plain.text();
  }
  for (const Value& other :
       {Value(Bytes{}), Value(Set{}), Value(Global{"torch", "float32"}), record("m", "C"), text("\xff"),
        list({Value(Bytes{})}), tuple({Value(Set{})}), dict({{tuple({}), Value()}}),
        dict({{text("\xff"), Value()}}), dict({{text("a"), Value(Bytes{})}})}) {
    EXPECT_FALSE(other.is_json()) << other.text();
  }
}

TEST(ValueTest, ToJson) {
  auto json = [](const Value& value) { return value.to_json().dump(); };
  EXPECT_EQ(json(Value()), "null");
  EXPECT_EQ(json(Value(false)), "false");
  EXPECT_EQ(json(integer(-7)), "-7");
  EXPECT_EQ(json(Value(0.25)), "0.25");
  EXPECT_EQ(json(text("ключ\n")), "\"ключ\\n\"");
  EXPECT_EQ(json(tuple({integer(1), text("x")})), "[1,\"x\"]");
  EXPECT_EQ(json(list({})), "[]");
  EXPECT_EQ(json(dict({})), "{}");
  EXPECT_EQ(json(Value(NAN)), "\"NaN\"");
  EXPECT_EQ(json(Value(-std::numeric_limits<double>::infinity())), "\"-Infinity\"");
  EXPECT_EQ(json(Value(BigInt{"18446744073709551615"})), "18446744073709551615");
  EXPECT_EQ(json(Value(BigInt{"18446744073709551616"})), "\"18446744073709551616\"");
  EXPECT_EQ(json(Value(BigInt{"-9223372036854775809"})), "\"-9223372036854775809\"");
  EXPECT_EQ(json(dict({{text("z"), integer(1)},
                       {integer(2), integer(2)},
                       {Value(true), integer(3)},
                       {Value(), integer(4)},
                       {Value(0.5), integer(5)},
                       {Value(BigInt{"18446744073709551616"}), integer(6)}})),
            R"({"z":1,"2":2,"true":3,"null":4,"0.5":5,"18446744073709551616":6})");
}

TEST(ValueTest, Text) {
  EXPECT_EQ(
      record("argparse", "Namespace", {}, dict({{text("lr"), Value(0.1)}, {text("name"), text("x")}})).text(),
      "Namespace(lr=0.1, name=\"x\")");
  EXPECT_EQ(record("m", "C", {integer(1)}, text("state")).text(), "C(1, \"state\")");
  EXPECT_EQ(tuple({integer(1)}).text(), "(1,)");
  EXPECT_EQ(dict({{integer(1), list({Value(true), Value()})}}).text(), "{1: [True, None]}");
  EXPECT_EQ(Value(1e100).text(), "1e+100");
  EXPECT_EQ(Value(3.0).text(), "3.0");
  EXPECT_EQ(Value(Global{"torch", "float32"}).text(), "torch.float32");
  EXPECT_EQ(Value(Global{"m\x1b[31m", "C"}).text(), "\"m\\x1b[31m.C\"");
  EXPECT_EQ(text("\x1b[31m").text(), "\"\\x1b[31m\"");
}

TEST(ValueTest, TextIsShort) {
  std::vector<Value> many(100'000, integer(7));
  EXPECT_EQ(list(std::move(many)).text(20), "[7, 7, 7, 7, 7, 7, 7, ...]");
  EXPECT_EQ(text(std::string(1000, 'a')).text(10), "\"aaaaaaaaaa\"...");
  EXPECT_EQ(text("éééé").text(5), "\"éé\"...");
  Value nested;
  for (int i = 0; i < 150; ++i) nested = list({nested, nested.get_if<List>() ? Value() : text("deep")});
  EXPECT_LT(nested.text(40).size(), 400U);
}

TEST(ValueTest, CopiesAreDeepAndEqual) {
  Value original =
      dict({{text("r"), record("m", "C", {integer(1)}, list({text("a")}))}, {text("nan"), Value(NAN)}});
  Value copy = original;
  EXPECT_EQ(copy, original);
  EXPECT_NE(copy.get_if<Dict>()->items[0].second.record(), original.get_if<Dict>()->items[0].second.record());
  original = Value();
  EXPECT_NE(copy, original);
  EXPECT_EQ(copy.get_if<Dict>()->items[0].second.record()->args[0], integer(1));
}

TEST(ValueTest, EqualityKnowsTypes) {
  EXPECT_NE(integer(1), Value(true));
  EXPECT_NE(integer(1), Value(1.0));
  EXPECT_NE(list({}), tuple({}));
  EXPECT_EQ(list({integer(1)}), list({integer(1)}));
  EXPECT_NE(record("m", "C"), record("m", "D"));
  EXPECT_NE(record("m", "C", {integer(1)}), record("m", "C", {integer(2)}));
}

}  // namespace
}  // namespace spolia
