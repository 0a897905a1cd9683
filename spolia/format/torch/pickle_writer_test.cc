#include "spolia/format/torch/pickle_writer.h"

#include <cmath>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/pickle.h"
#include "spolia/format/torch/pickle_value.h"

namespace spolia::pickle {
namespace {

Value read_back(const std::string& bytes) {
  Heap heap;
  return to_value(read(heap, bytes_of(bytes), "written").root, "written");
}

TEST(PickleWriterTest, BytesAreThoseOfPython) {
  Writer out;
  out.empty_dict();
  out.put();
  out.mark();
  out.string("a");
  out.integer(1);
  out.string("b");
  out.none();
  out.set_from_mark();
  // pickletools.optimize(pickle.dumps({"a": 1, "b": None}, 2)), with the dict's memo entry kept
  EXPECT_EQ(out.finish(), std::string("\x80\x02}q\0(X\1\0\0\0aK\1X\1\0\0\0bNu.", 23));
}

TEST(PickleWriterTest, ObjectsAndTheMemo) {
  for (auto protocol : {Writer::Protocol::k2, Writer::Protocol::k4}) {
    Writer out(protocol);
    out.mark();
    out.global("m", "C");
    MemoIndex type = out.put();
    out.empty_tuple();
    out.new_object();
    out.empty_dict();
    out.mark();
    out.string("x");
    out.floating(0.5);
    out.set_from_mark();
    out.build();
    out.get(type);
    out.string("é");
    out.tuple1();
    out.reduce();
    out.integer(7);
    out.persistent();
    out.empty_list();
    out.mark();
    out.boolean(true);
    out.boolean(false);
    out.append_from_mark();
    out.tuple(std::vector<int64_t>{1, 2, 3, 4});
    out.tuple(std::vector<int64_t>{});
    out.tuple_from_mark();
    EXPECT_EQ(read_back(out.finish()).text(),
              "(C(x=0.5), C(\"é\"), persistent_id(7), [True, False], (1, 2, 3, 4), ())");
  }
}

TEST(PickleWriterTest, ManyMemoEntries) {
  Writer out;
  out.mark();
  std::vector<MemoIndex> entries;
  for (int i = 0; i < 1000; ++i) {
    out.integer(i);
    entries.push_back(out.put());
  }
  for (MemoIndex entry : entries) out.get(entry);
  out.tuple_from_mark();
  Value value = read_back(out.finish());
  const auto& items = value.get_if<Tuple>()->items;
  ASSERT_EQ(items.size(), 2000U);
  for (size_t i = 0; i < 2000; ++i) EXPECT_EQ(items[i], Value(static_cast<int64_t>(i % 1000)));
}

TEST(PickleWriterTest, IntegersAreAsShortAsThoseOfPython) {
  auto of = [](int64_t value) {
    Writer out;
    out.integer(value);
    return out.finish().substr(2);
  };
  auto of_text = [](std::string_view decimal) {
    Writer out;
    out.big_integer(decimal);
    return out.finish().substr(2);
  };
  using namespace std::string_literals;
  EXPECT_EQ(of(int64_t{1} << 31), "\x8a\5\0\0\0\x80\0."s);
  EXPECT_EQ(of(-(int64_t{1} << 39)), "\x8a\5\0\0\0\0\x80."s);
  EXPECT_EQ(of_text("18446744073709551616"), "\x8a\11\0\0\0\0\0\0\0\0\1."s);
  EXPECT_EQ(of_text("-255"), "\x8a\2\1\xff."s);
  // 10 ** 700 has 291 bytes, more than LONG1 can count.
  EXPECT_EQ(of_text("1" + std::string(700, '0')).substr(0, 5), "\x8b\x23\1\0\0"s);
  for (const std::string& decimal : {"1" + std::string(700, '0'), "-9" + std::string(300, '7')}) {
    Writer out;
    out.big_integer(decimal);
    EXPECT_EQ(read_back(out.finish()), Value(BigInt{decimal}));
  }
}

TEST(PickleWriterTest, MayBeTakenInPieces) {
  Writer whole, pieces;
  std::string taken;
  for (Writer* out : {&whole, &pieces}) {
    out->empty_list();
    out->mark();
    for (int i = 0; i < 100; ++i) {
      out->integer(i);
      if (out == &pieces) taken += out->take();
    }
    EXPECT_EQ(out->size() == 0, out == &pieces);
    out->append_from_mark();
  }
  EXPECT_EQ(taken + pieces.finish(), whole.finish());
}

TEST(PickleWriterTest, BytesNeedProtocol4) {
  Writer new_one(Writer::Protocol::k4), old_one;
  new_one.bytes(std::string(300, '\xff'));
  EXPECT_EQ(read_back(new_one.finish()).text(), "<300 bytes>");
  EXPECT_THROW(old_one.bytes("x"), InvalidArgumentError);
}

RC_GTEST_PROP(PickleWriterProperty, PlainValuesSurvive,
              (int64_t integer, double number, std::string text, std::vector<int64_t> numbers)) {
  text.resize(text.size() * (text.size() % 7 == 0 ? 60 : 1), 'x');  // beyond 255 bytes now and then
  for (auto protocol : {Writer::Protocol::k2, Writer::Protocol::k4}) {
    Writer out(protocol);
    out.mark();
    out.integer(integer);
    out.floating(number);
    out.string(text);
    out.tuple(numbers);
    out.tuple_from_mark();
    Value value = read_back(out.finish());
    const auto& items = value.get_if<Tuple>()->items;
    RC_ASSERT(items[0] == Value(integer));
    RC_ASSERT(items[1] == Value(number));
    RC_ASSERT(items[2] == Value(text));
    std::vector<Value> expected;
    for (int64_t n : numbers) expected.emplace_back(n);
    RC_ASSERT(items[3] == Value(Tuple{expected}));
  }
}

}  // namespace
}  // namespace spolia::pickle
