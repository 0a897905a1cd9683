#include "spolia/format/torch/value_pickle.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/source.h"
#include "spolia/format/torch/pickle_examples.h"
#include "spolia/format/torch/pickle_value.h"
#include "spolia/format/torch/tensor_pickle.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

using namespace testing;
using Construction = Record::Construction;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

Value read_archive(const std::string& bytes) {
  auto source = bytes_in_memory(to_bytes(bytes), "a value");
  TorchArchive archive(*source, std::ssize(bytes));
  TensorPickle pickle(archive);
  return pickle.value(pickle.root());
}

/// The value of a pickle given by its opcodes.
Value value_of(const std::string& opcodes) { return read_archive(make_archive(opcodes, {})); }

void expect_survives(const Value& value) {
  ASSERT_TRUE(can_pickle(value)) << value.text();
  EXPECT_EQ(read_archive(write_value_archive(value)), value) << value.text();
}

Value text(std::string value) { return Value(std::move(value)); }
Value number(int64_t value) { return Value(value); }
template <class Container>
Value holding(std::vector<Value> items) {
  return Value(Container{std::move(items)});
}

TEST(ValuePickle, PlainValues) {
  expect_survives(Value());
  expect_survives(Value(true));
  expect_survives(Value(false));
  for (int64_t n : {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{65536}, int64_t{-1}, int64_t{1} << 31,
                    int64_t{1} << 40, -(int64_t{1} << 40), std::numeric_limits<int64_t>::max(),
                    std::numeric_limits<int64_t>::min()}) {
    expect_survives(number(n));
  }
  for (const std::string& decimal : {std::string("9223372036854775808"), std::string("-9223372036854775809"),
                                     std::string("18446744073709551616"), "1" + std::string(1000, '0'),
                                     "-1" + std::string(1000, '0'), std::string(700, '9')}) {
    expect_survives(Value(BigInt{decimal}));
  }
  for (double x : {0.0, -0.0, 0.1, 1e300, HUGE_VAL, -HUGE_VAL, std::nan("")}) expect_survives(Value(x));
  for (const char* t :
       {"", "a", "é", "line\nbreak", "\xED\xA0\x80 alone", "\xF0\x9F\x98\x80", "\xED\x9F\xBF"}) {
    expect_survives(text(t));
  }
  expect_survives(text(std::string(100'000, 'x')));
  expect_survives(Value(Bytes{}));
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  expect_survives(Value(Bytes{to_bytes(all)}));
  expect_survives(Value(Global{"torch", "float32"}));
  expect_survives(Value(Global{"a.b", "Outer.Inner.Innermost"}));
  expect_survives(Value(Global{"builtins", "long"}));
}

TEST(ValuePickle, Containers) {
  for (int64_t count : {0, 1, 2, 3, 4, 1000}) {
    std::vector<Value> items;
    Dict dict;
    for (int64_t i = 0; i < count; ++i) {
      items.push_back(number(i));
      dict.items.emplace_back(number(i), text("x"));
    }
    expect_survives(Value(List{items}));
    expect_survives(Value(Tuple{items}));
    expect_survives(Value(Set{items}));
    expect_survives(Value(dict));
    expect_survives(holding<List>({Value(Tuple{items}), Value(dict), Value(Set{items})}));
  }
  // A set in a set, or in a tuple that is a key, is one that does not change.
  const Value inner = holding<Set>({number(1)});
  expect_survives(holding<Set>({inner, text("a")}));
  EXPECT_NE(write_value_archive(holding<Set>({inner})).find("frozenset"), std::string::npos);
  EXPECT_EQ(write_value_archive(inner).find("frozenset"), std::string::npos);
  Dict by_set;
  by_set.items.emplace_back(holding<Tuple>({inner, Value()}), inner);
  expect_survives(Value(std::move(by_set)));
}

TEST(ValuePickle, ObjectsAreMadeAsTheyWere) {
  const std::string type = py_global("m", "Outer.C"), text_a = py_text("a"), one = py_int(1);
  const std::pair<std::string, Construction> kCases[] = {
      {py_call(type, {}), Construction::kCall},
      {py_call(type, {text_a, one}), Construction::kCall},
      {type + ")\x81", Construction::kNew},
      {type + py_tuple({one}) + "\x81", Construction::kNew},
      {type + py_tuple({one}) + "}\x92", Construction::kNew},
      {type + py_tuple({one}) + py_fields({{"k", one}}) + "\x92", Construction::kNewWithKeywords},
      {"(" + type + one + "o", Construction::kCall},
      {"(" + type + "o", Construction::kNew},
      {py_call(py_global("copy_reg", "_reconstructor"),
               {type, py_global("__builtin__", "object"), py_none()}),
       Construction::kNew},
      // How protocol 2 spells keyword arguments.
      {py_call(py_call(py_global("functools", "partial"), {type}), {one}), Construction::kCallOfFirst},
  };
  const std::string additions[] = {
      "",
      py_fields({{"x", text_a}}) + "b",                                        // a state
      py_tuple({py_none(), py_fields({{"slot", one}})}) + "b",                 // of slots
      "(" + one + text_a + "e",                                                // items
      "(" + text_a + one + "u",                                                // entries
      "(" + one + "e(" + text_a + one + "u" + py_fields({{"x", one}}) + "b"};  // all
  for (const auto& [object, construction] : kCases) {
    for (const std::string& addition : additions) {
      const Value value = value_of(object + addition);
      ASSERT_NE(value.record(), nullptr);
      EXPECT_EQ(value.record()->construction, construction);
      expect_survives(value);
      expect_survives(value_of(py_list({object + addition, one})));
    }
  }
}

TEST(ValuePickle, HowAnObjectIsMadeIsPartOfIt) {
  const std::string type = py_global("m", "C");
  EXPECT_NE(value_of(py_call(type, {})), value_of(type + ")\x81"));
  EXPECT_NE(value_of(py_call(type, {py_fields({{"k", py_int(1)}})})),
            value_of(type + ")" + py_fields({{"k", py_int(1)}}) + "\x92"));
}

TEST(ValuePickle, WhatCannotBeWritten) {
  const std::string tensor = py_tensor(py_storage("LongStorage", "0", 2), 0, {2}, {1});
  const Value with_tensor = read_archive(make_archive(py_list({tensor}), {{"0", std::string(16, 'x')}}));
  EXPECT_FALSE(can_pickle(with_tensor));
  EXPECT_FALSE(can_pickle(value_of(py_call(py_global("m", "f"), {}) + ")\x81")));  // of a class that is made
  const Value list = holding<List>({});
  Dict dict;
  dict.items.emplace_back(list, number(1));
  EXPECT_FALSE(can_pickle(Value(dict)));  // cannot be hashed
  EXPECT_FALSE(can_pickle(holding<Set>({list})));
  EXPECT_FALSE(can_pickle(holding<Set>({holding<Tuple>({list})})));
  EXPECT_FALSE(can_pickle(text("\xFF")));
  EXPECT_FALSE(can_pickle(text("\xED\xA0")));
  EXPECT_FALSE(can_pickle(Value(Global{"m", "line\nbreak"})));
  EXPECT_FALSE(can_pickle(Value(Global{"", "x"})));
  EXPECT_FALSE(can_pickle(Value(BigInt{"seven"})));
  auto keywordless = std::make_unique<Record>();
  keywordless->type = {"m", "C"};
  keywordless->construction = Construction::kNewWithKeywords;
  EXPECT_FALSE(can_pickle(Value(std::move(keywordless))));
  EXPECT_FALSE(can_pickle(Value(std::make_unique<Record>())));
}

TEST(ValuePickle, NestedNoDeeperThanIsRead) {
  Value value = number(1);
  int levels = 1;  // how many values there are, one in the other
  while (can_pickle(value)) {
    expect_survives(value);
    value = holding<List>({value});
    ++levels;
  }
  EXPECT_EQ(levels, 201);
}

TEST(ValuePickle, EveryValueOfRealCheckpoints) {
  int values = 0;
  for (const char* torch : {"torch-2.14", "torch-2.6"}) {
    for (const auto& entry : std::filesystem::directory_iterator(kData / torch)) {
      SCOPED_TRACE(entry.path());
      std::filesystem::path path = entry.path() / "checkpoint";
      if (entry.path().filename().string().starts_with("torch-save")) {
        for (const auto& file : std::filesystem::directory_iterator(path)) {
          if (file.is_regular_file()) path = file.path();
        }
      }
      auto source = open_source(posix_store(), path);
      for (size_t v = 0; v < source->catalog().values.size(); ++v) {
        expect_survives(source->value(v));
        ++values;
      }
    }
  }
  EXPECT_GT(values, 100);
}

/// The value of any pickle; nothing where it is refused.
std::optional<Value> value_of_pickle(std::string_view bytes) {
  try {
    pickle::Heap heap;
    return pickle::to_value(pickle::read(heap, bytes_of(bytes), "a pickle").root, "a pickle",
                            pickle::TreeLimits::for_pickle(bytes.size()));
  } catch (const Error&) {
    return std::nullopt;
  }
}

TEST(ValuePickle, PicklesOfPython) {
  for (const pickle::Example& example : pickle::kExamples) {
    SCOPED_TRACE(example.text);
    const std::optional<Value> value = value_of_pickle(example.bytes);
    ASSERT_TRUE(value);
    if (!example.text.starts_with("persistent_id")) expect_survives(*value);
  }
}

TEST(ValuePickle, DamagedPicklesSurviveWhereTheyCanBeRead) {
  int written = 0;
  for (const pickle::Example& example : pickle::kExamples) {
    for (size_t i = 0; i < example.bytes.size(); ++i) {
      for (char code :
           {'\x01', '(', ')', '}', ']', 't', 'R', '\x81', '\x92', 'c', 'N', '\x90', '\x91', 'b'}) {
        std::string damaged(example.bytes);
        damaged[i] = code;
        const std::optional<Value> value = value_of_pickle(damaged);
        if (!value || !can_pickle(*value)) continue;
        ASSERT_EQ(read_archive(write_value_archive(*value)), *value) << example.text << ", byte " << i;
        ++written;
      }
    }
  }
  EXPECT_GT(written, 1000);
}

/// Any value that can be written, `depth` levels deep at most.
Value any_value(int64_t depth, bool hashed) {
  auto items = [&](bool hashed_too) {
    std::vector<Value> made;
    for (int64_t n = pick(0, 4); n > 0; --n) made.push_back(any_value(depth - 1, hashed_too));
    return made;
  };
  auto entries = [&] {
    std::vector<std::pair<Value, Value>> made;
    for (int64_t n = pick(0, 4); n > 0; --n) made.emplace_back(number(n), any_value(depth - 1, false));
    return made;
  };
  switch (depth == 0 ? pick(0, 6) : pick(0, 11)) {
    case 0:
      return Value();
    case 1:
      return number(*rc::gen::arbitrary<int64_t>());
    case 2:
      return Value(*rc::gen::arbitrary<double>());
    case 3:
      return text(*rc::gen::container<std::string>(rc::gen::inRange('\1', '\x7f')));
    case 4:
      return Value(Bytes{to_bytes(*rc::gen::arbitrary<std::string>())});
    case 5:
      return Value(Global{"m", "C"});
    case 6:
      return Value(Tuple{items(hashed)});
    case 7:
      return Value(Set{items(true)});
    case 8:
      return hashed ? Value() : Value(List{items(false)});
    case 9:
      return hashed ? Value() : Value(Dict{entries()});
    default: {
      auto record = std::make_unique<Record>();
      record->type = {"m", "C"};
      record->construction = pick(0, 2) == 0 ? Construction::kCall : Construction::kNew;
      record->args = items(false);
      record->state = any_value(depth - 1, false);
      record->items = items(false);
      record->entries = entries();
      return Value(std::move(record));
    }
  }
}

RC_GTEST_PROP(ValuePickleProperty, ValuesSurvive, ()) {
  const Value value = any_value(4, false);
  RC_ASSERT(can_pickle(value));
  RC_ASSERT(read_archive(write_value_archive(value)) == value);
}

}  // namespace
}  // namespace spolia
