#include "spolia/format/torch/pickle.h"

#include <string>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/pickle_examples.h"
#include "spolia/format/torch/pickle_opcodes.h"
#include "spolia/format/torch/pickle_text.h"
#include "spolia/format/torch/pickle_value.h"

namespace spolia::pickle {
namespace {

/// What a pickle means, as a line of text; "ERROR KIND: message" where it is refused.
std::string meaning(std::string_view bytes, Hooks* hooks = nullptr) {
  try {
    Heap heap;
    Result result = read(heap, bytes_of(bytes), "FILE", hooks);
    return to_value(result.root, "FILE").text(2000);
  } catch (const Error& error) {
    return std::string(spolia::name_of(error.kind())) + ": " + error.what();
  }
}

TEST(PickleTest, ReadsWhatPythonWrites) {
  for (const Example& example : kExamples) {
    EXPECT_EQ(meaning(example.bytes), example.text) << "protocol " << example.protocol;
  }
}

TEST(PickleTest, EveryTruncationOfWhatPythonWritesIsRefused) {
  for (const Example& example : kExamples) {
    for (size_t size = 0; size < example.bytes.size(); ++size) {
      std::string text = meaning(example.bytes.substr(0, size));
      // Cutting a counted text or number can leave a STOP byte behind; what is read then is another pickle.
      bool is_other = example.bytes.substr(0, size).find('.') != std::string_view::npos;
      if (!is_other) {
        EXPECT_EQ(text.find("corrupt: FILE, byte "), 0) << text;
      }
    }
  }
}

struct Case {
  std::string_view bytes;
  std::string_view text;
};

void expect_meanings(std::initializer_list<Case> cases) {
  for (const Case& c : cases) EXPECT_EQ(meaning(c.bytes), c.text) << "\"" << c.bytes << "\"";
}

TEST(PickleTest, OpcodesThatPythonSeldomWrites) {
  expect_meanings({
      {"N0I1\n."sv, "1"},                                  // POP
      {"I1\n(I2\n1."sv, "1"},                              // POP_MARK
      {"I1\n(0."sv, "1"},                                  // POP of a mark
      {"I1\n2\x86."sv, "(1, 1)"},                          // DUP
      {"T\2\0\0\0ab."sv, "\"ab\""},                        // BINSTRING
      {"U\2ab."sv, "\"ab\""},                              // SHORT_BINSTRING
      {"S'a\\'\\x41\\101\\n\\q'\n."sv, R"("a'AA\n\\q")"},  // STRING
      {"VL\\u00e9\xe9\\U0001f5dd\n."sv, "\"Léé🗝\""},      // UNICODE
      {"L12L\n."sv, "12"},                                 // LONG
      {"L-18446744073709551616L\n."sv, "-18446744073709551616"},
      {"I+7\n."sv, "7"},  // INT
      {"I01\nI00\n\x86."sv, "(True, False)"},
      {"F-inf\n."sv, "-Infinity"},                 // FLOAT
      {"\x8b\2\0\0\0\x00\x80."sv, "-32768"},       // LONG4
      {"\x8a\0."sv, "0"},                          // LONG1 without bytes
      {"\x8a\x0a\x01\0\0\0\0\0\0\0\0\0."sv, "1"},  // LONG1 with needless bytes
      {"\x8d\2\0\0\0\0\0\0\0ab."sv, "\"ab\""},     // BINUNICODE8
      {"\x8e\2\0\0\0\0\0\0\0ab."sv, "<2 bytes>"},  // BINBYTES8
      {"Nr\xff\xff\xff\x7f."sv, "None"},           // LONG_BINPUT of what nobody fetches
      {"I7\nr\4\0\0\0000j\4\0\0\0."sv, "7"},       // LONG_BINPUT, LONG_BINGET
      {"I7\np3\n0g3\n."sv, "7"},                   // PUT, GET
      {"(im\nC\n."sv, "C()"},                      // INST
      {"(I1\nim\nC\n."sv, "C(1)"},
      {"(cm\nC\nI1\no."sv, "C(1)"},  // OBJ
      {"(I1\nl."sv, "[1]"},          // LIST
      {"(I1\nI2\nd."sv, "{1: 2}"},   // DICT
      {"](I1\nI2\ne."sv, "[1, 2]"},
      {"}I1\nI2\ns."sv, "{1: 2}"},
      {"Pabc\n."sv, "persistent_id(\"abc\")"},      // PERSID
      {"I1\nI2\n\x86Q."sv, "persistent_id(1, 2)"},  // BINPERSID
      {"cm\nC\n)\x81I5\nb."sv, "C(5)"},             // BUILD
      {"cm\nC\n)\x81I1\na."sv, "C(1)"},             // items
      {"cm\nC\n)\x81I1\nI2\ns."sv, "C(1: 2)"},      // entries
      {"cm\nC\n)\x81(I1\n\x90."sv, "C(1)"},         // members
      {"cm\nf\n)RI1\n\x85R."sv, "call(f(), 1)"},    // a call of what a call gave
      {"ccopy_reg\n_reconstructor\n(cm\nC\nc__builtin__\nobject\nNtR."sv, "C()"},
      {"cbuiltins\ngetattr\n(cm\nOuter\nVInner\ntR."sv, "m.Outer.Inner"},
      {"ctorch\nSize\n(I2\nI3\nt\x85R."sv, "(2, 3)"},
      {"ccollections\nOrderedDict\n)R}Vx\nI1\nsb."sv, "{}"},  // attributes of a dict are dropped
      {"ccollections\nOrderedDict\n(((VA\nI1\nlltR."sv, "{\"A\": 1}"},
      {"N.I am not read"sv, "None"},
  });
}

TEST(PickleTest, WhatIsNoPickleIsRefusedByOffset) {
  expect_meanings({
      {""sv,
       "corrupt: FILE, byte 0 of the pickle: the pickle ends early: 1 more bytes are announced, 0 are there"},
      {"\xff"sv, "corrupt: FILE, byte 0 of the pickle: 0xff is no pickle opcode"},
      {"NN\0"sv, "corrupt: FILE, byte 2 of the pickle: 0x00 is no pickle opcode"},
      {"."sv, "corrupt: FILE, byte 0 of the pickle: an opcode needs more than the stack holds"},
      {"N\x86."sv, "corrupt: FILE, byte 1 of the pickle: an opcode needs more than the stack holds"},
      {"N(\x85."sv, "corrupt: FILE, byte 2 of the pickle: an opcode needs more than the stack holds"},
      {"Nt."sv, "corrupt: FILE, byte 1 of the pickle: an opcode needs a mark, and there is none"},
      {"h\0."sv, "corrupt: FILE, byte 0 of the pickle: memo entry 0 was never set"},
      {"h\0Nq\0."sv, "corrupt: FILE, byte 0 of the pickle: memo entry 0 was never set"},
      {"j\xff\xff\xff\xff."sv, "corrupt: FILE, byte 0 of the pickle: memo entry 4294967295 was never set"},
      {"g-1\n."sv, "corrupt: FILE, byte 0 of the pickle: GET lacks a memo index"},
      {"X\xff\xff\xff\xff"
       "abc."sv,
       "corrupt: FILE, byte 0 of the pickle: the pickle ends early: 4294967295 more bytes are announced, 4 "
       "are there"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xff."sv,
       "corrupt: FILE, byte 0 of the pickle: the pickle ends early: 18446744073709551615 more bytes are "
       "announced, 1 "
       "are there"},
      {"T\xff\xff\xff\xff."sv, "corrupt: FILE, byte 0 of the pickle: BINSTRING has a count of -1"},
      {"I12"sv, "corrupt: FILE, byte 0 of the pickle: the pickle ends early: INT lacks its newline"},
      {"Ix\n."sv, "corrupt: FILE, byte 0 of the pickle: an integer without digits"},
      {"Fx\n."sv, "corrupt: FILE, byte 0 of the pickle: FLOAT without a number"},
      {"Sx\n."sv, "corrupt: FILE, byte 0 of the pickle: STRING holds no text"},
      {"V\\Uffffffff\n."sv, "corrupt: FILE, byte 0 of the pickle: UNICODE holds no text"},
      {"\x80\x06N."sv, "unsupported: FILE, byte 0 of the pickle: pickle protocol 6 is newer than 5"},
      {"\x82\1."sv,
       "unsupported: FILE, byte 0 of the pickle: the opcode EXT1 needs what lies outside of the pickle"},
      {"\x97."sv,
       "unsupported: FILE, byte 0 of the pickle: the opcode NEXT_BUFFER needs what lies outside of the "
       "pickle"},
      {"NNa."sv, "corrupt: FILE, byte 2 of the pickle: items are appended to None"},
      {"(Ne."sv, "corrupt: FILE, byte 2 of the pickle: items are added to nothing"},
      {"]((Ne."sv, "corrupt: FILE, byte 4 of the pickle: items are added to nothing"},
      {"NNNs."sv, "corrupt: FILE, byte 3 of the pickle: entries are set in None"},
      {"](N\x90."sv, "corrupt: FILE, byte 3 of the pickle: members are added to a list"},
      {"}(Nu."sv, "corrupt: FILE, byte 3 of the pickle: a dict's key lacks its value"},
      {"(Nd."sv, "corrupt: FILE, byte 2 of the pickle: a dict's key lacks its value"},
      {"NNR."sv, "corrupt: FILE, byte 2 of the pickle: None stands where a tuple is needed"},
      {"NN\x93."sv, "corrupt: FILE, byte 2 of the pickle: None stands where a string is needed"},
      {"I1\nNb."sv, "corrupt: FILE, byte 4 of the pickle: an integer is given a state"},
      {"(o."sv, "corrupt: FILE, byte 1 of the pickle: OBJ lacks its class"},
      {"}I1\nI2\nsI1\nI3\ns."sv, "corrupt: FILE: a dict has the key 1 twice"},
      {"}V\xe9\nNsV\xe9\nNs."sv, "corrupt: FILE: a dict has the key \"é\" twice"},
      {"]q\0h\0a."sv, "corrupt: FILE: a value is nested deeper than 200, or holds itself"},
  });
  std::string huge = "\x8b" + std::string("\x01\x02\0\0", 4) + std::string(513, '\x41') + ".";
  EXPECT_EQ(meaning(huge), "unsupported: FILE, byte 0 of the pickle: an integer of 513 bytes");
  EXPECT_EQ(meaning("L" + std::string(2000, '9') + "\n."),
            "unsupported: FILE, byte 0 of the pickle: an integer of 2000 digits");
  EXPECT_EQ(meaning("c" + std::string(2000, 'm') + "\nx\n."),
            "corrupt: FILE, byte 0 of the pickle: the name of a global is 2001 bytes long");
}

TEST(PickleTest, AliasesSeeLaterChanges) {
  // l = []; [l, l], where the last one is given an item
  EXPECT_EQ(meaning("]q\0h\0\x86q\1h\0I1\na0."sv), "([1], [1])");
}

TEST(PickleTest, ALateBuildReachesTheMemo) {
  struct Replacing : Hooks {
    uint32_t recognise(std::string_view, std::string_view name) override { return name == "C" ? 5 : 0; }
    std::optional<Ref> build(Heap&, const Ref& object, const Ref& state) override {
      EXPECT_EQ(object.callable().global().tag, 5U);
      return Ref::handle(9, state.as_int());
    }
  } hooks;
  Heap heap;
  Result result = read(heap, bytes_of("cm\nC\n)\x81q\0I42\nbh\0\x86."sv), "FILE", &hooks);
  ASSERT_EQ(result.root.items().size(), 2U);
  for (const Ref& item : result.root.items()) {
    ASSERT_TRUE(item.is_handle(9));
    EXPECT_EQ(item.handle_value(), 42);
  }
}

TEST(PickleTest, HooksGetCallsAndPersistentIds) {
  struct Recording : Hooks {
    uint32_t recognise(std::string_view module, std::string_view name) override {
      names += std::string(module) + "." + std::string(name) + " ";
      return name == "f" ? 1 : 0;
    }
    std::optional<Ref> call(Heap& heap, const GlobalName& callable, const Ref& args) override {
      EXPECT_TRUE(callable.is("m", "f"));
      return heap.tuple({Ref::string(heap.keep("called")), args.items()[0]});
    }
    std::optional<Ref> persistent(Heap&, const Ref& id) override { return Ref::integer(id.as_int() + 1); }
    std::string names;
  } hooks;
  EXPECT_EQ(meaning("(cm\nf\nI1\n\x85RI6\nQcm\ng\n)Rcm\nf\nI2\n\x85Rt."sv, &hooks),
            R"((("called", 1), 7, g(), ("called", 2)))");
  EXPECT_EQ(hooks.names, "m.f m.g ");
}

TEST(PickleTest, ErrorsOfHooksAreGivenTheirPlace) {
  struct Throwing : Hooks {
    std::optional<Ref> persistent(Heap&, const Ref&) override { throw UnsupportedError("no such storage"); }
  } hooks;
  EXPECT_EQ(meaning("NQ."sv, &hooks), "unsupported: FILE, byte 1 of the pickle: no such storage");
}

TEST(PickleTest, SaysWhereThePickleEnds) {
  Heap heap;
  EXPECT_EQ(read(heap, bytes_of("I1\n.N."sv), "FILE").end, 4U);
}

TEST(PickleTest, DeepNestingIsFreedWithoutRecursion) {
  std::string deep;
  for (int i = 0; i < 300'000; ++i) deep += "]";
  for (int i = 1; i < 300'000; ++i) deep += "a";
  Heap heap;
  { Result result = read(heap, bytes_of(deep + "."), "FILE"); }
  std::string tuples = "N" + std::string(300'000, '\x85') + ".";
  { Result result = read(heap, bytes_of(tuples), "FILE"); }
  EXPECT_EQ(meaning(tuples), "corrupt: FILE: a value is nested deeper than 200, or holds itself");
}

TEST(PickleTest, BombsAreRefused) {
  // Forty lists, each holding the one before ten times: 10^40 values when unfolded.
  std::string bomb = "(I1\nl";
  for (char i = 0; i < 40; ++i) {
    bomb += std::string("q") + i + "0(";
    for (int n = 0; n < 10; ++n) bomb += std::string("h") + i;
    bomb += "l";
  }
  EXPECT_EQ(meaning(bomb + "."),
            "corrupt: FILE: a value unfolds to more than 1048576 values, which its pickle does not justify");
  // A list of a thousand items, copied ten thousand times.
  std::string copies = "(" + std::string(1000, 'N') +
                       std::string(
                           "lq\0"
                           "0cbuiltins\nlist\nq\1"
                           "0("sv);
  for (int n = 0; n < 10'000; ++n) copies += "h\1h\0\x85R"sv;
  EXPECT_NE(meaning(copies + "t.").find("the pickle copies more than it holds"), std::string::npos);
}

TEST(PickleTest, AHugeDictIsNoObjectsAttributes) {
  auto dict_of = [](int64_t size) {
    std::string dict = "}(";
    for (int64_t i = 0; i < size; ++i) dict += "I" + std::to_string(i) + "\nN";
    return dict + "S'x'\nK\7u.";
  };
  for (auto [size, found] : {std::pair(255, true), {256, false}}) {
    Heap heap;
    std::string dict = dict_of(size);
    EXPECT_EQ(read(heap, bytes_of(dict), "FILE").root.find("x") != nullptr, found);
  }
}

TEST(PickleTest, MemoryIsFreedAtOnce) {
  // Lists and tuples that are dropped at once, many times over.
  std::string lists;
  for (int i = 0; i < 300'000; ++i)
    lists +=
        "]N\x85\x85"
        "0"
        "0";
  Heap heap;
  Result result = read(heap, bytes_of(lists + "N."), "FILE");
  EXPECT_TRUE(result.root.is_none());
}

RC_GTEST_PROP(PickleProperty, RandomBytesAreReadOrRefused, (const std::string& bytes)) { meaning(bytes); }

RC_GTEST_PROP(PickleProperty, ChangedBytesAreReadOrRefused, (size_t which, size_t where, char byte)) {
  std::string bytes(kExamples[which % std::size(kExamples)].bytes);
  bytes[where % bytes.size()] = byte;
  meaning(bytes);
}

RC_GTEST_PROP(PickleProperty, IntegersInTwosComplement, (int64_t value)) {
  std::string bytes(reinterpret_cast<const char*>(&value), 8);
  RC_ASSERT(small_integer(bytes) == value);
  RC_ASSERT(small_integer(without_sign_extension(bytes)) == value);
  RC_ASSERT(decimal_text(bytes) == std::to_string(value));
  RC_ASSERT(decimal_text(without_sign_extension(bytes)) == std::to_string(value));
}

TEST(PickleOpcodesTest, EveryByteIsKnownOrRefused) {
  for (int code = 0; code < 256; ++code) {
    std::string bytes(1, static_cast<char>(code));
    bytes += std::string(20, '\0') + "\n\n";
    Decoder decoder(bytes_of(bytes));
    if (name_of(static_cast<Op>(code)) == "?") {
      EXPECT_THROW(decoder.next(), CorruptError) << code;
    }
  }
}

TEST(PickleTextTest, Latin1) {
  EXPECT_EQ(latin1("aé\x7f"), "a\xe9\x7f");
  EXPECT_EQ(latin1("\xc2\x80\xc3\xbf"), "\x80\xff");
  for (std::string_view bad : {"к", "\xc3", "\xc3(", "\xff", "\xc4\x80"})
    EXPECT_EQ(latin1(bad), std::nullopt);
}

}  // namespace
}  // namespace spolia::pickle
