#include "spolia/base/text.h"

#include <string>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TEST(Quote, LeavesReadableTextAlone) {
  EXPECT_EQ(quote(""), "\"\"");
  EXPECT_EQ(quote("model.layers.0 é 模型 🙂"), "\"model.layers.0 é 模型 🙂\"");
}

TEST(Quote, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(quote("a\"b\\c"), R"("a\"b\\c")");
  EXPECT_EQ(quote("\n\t\x1b[31m\x7f"), R"("\n\t\x1b[31m\x7f")");
  EXPECT_EQ(quote(std::string("\0x", 2)), R"("\x00x")");
  EXPECT_EQ(quote("\xc2\x9b"
                  "31m"),
            R"("\xc2\x9b31m")");  // the C1 control that is ESC [
  EXPECT_EQ(quote("\xff\xc3"), R"("\xff\xc3")");
}

TEST(Quote, CutsLongNamesBetweenCharacters) {
  std::string quoted = quote(std::string(199, 'a') + "é" + std::string(100, 'b'));
  EXPECT_EQ(quoted, "\"" + std::string(199, 'a') + "é\" (301 bytes long)");
  EXPECT_EQ(quote(std::string(200, 'a')), "\"" + std::string(200, 'a') + "\"");
}

RC_GTEST_PROP(Quote, IsPrintableUtf8, (const std::string& name)) {
  std::string quoted = quote(name);
  RC_ASSERT(is_utf8(quoted));
  for (char c : quoted) RC_ASSERT(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}

TEST(Quote, EscapesWhatReordersALine) {
  EXPECT_EQ(quote("a\u202eb"), R"("a\xe2\x80\xaeb")");
  EXPECT_EQ(quote("a\u2027b\u202fc\u2065d"), "\"a\u2027b\u202fc\u2065d\"");
}

TEST(Printable, IsTheNameItselfUnlessThatWouldHarm) {
  for (std::string name : {std::string(), std::string("model.layers.0"), std::string("a \"quoted\\ name"),
                           std::string("模型🙂"), std::string(5000, 'x')}) {
    EXPECT_EQ(printable(name), name);
  }
  EXPECT_EQ(printable(std::string("a\0b", 3)), R"("a\x00b")");
  EXPECT_EQ(printable("\x1b[31m"), R"("\x1b[31m")");
  EXPECT_EQ(printable("two\nlines"), R"("two\nlines")");
  EXPECT_EQ(printable("\u009b31m"), R"("\xc2\x9b31m")");
  EXPECT_EQ(printable("\u2066a"), R"("\xe2\x81\xa6a")");
  EXPECT_EQ(printable("\xff"), R"("\xff")");
}

TEST(Utf8, KnowsTheEdges) {
  for (const char* good : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(good)) << quote(good);
  }
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2g", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe2\x82",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "a\xf0\x9f\x99"}) {
    EXPECT_FALSE(is_utf8(bad)) << quote(bad);
  }
}

TEST(HumanBytes, Reads) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes((1 << 20) - 1), "1.0 MiB");  // not 1024.0 KiB
  EXPECT_EQ(human_bytes(int64_t{5} << 30), "5.0 GiB");
  EXPECT_EQ(human_bytes(INT64_MAX), "8.0 EiB");
}

TEST(ParseBytes, TakesWhatPeopleWrite) {
  EXPECT_EQ(parse_bytes("1048576"), 1 << 20);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("12B"), 12);
  EXPECT_EQ(parse_bytes("64MiB"), 64 << 20);
  EXPECT_EQ(parse_bytes("64M"), 64 << 20);
  EXPECT_EQ(parse_bytes("512k"), 512 << 10);
  EXPECT_EQ(parse_bytes("5GB"), 5000000000);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 3 << 29);
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993);  // more digits than a double has
}

TEST(ParseBytes, RefusesTheRest) {
  for (const char* bad : {"",      " ",    "x",    "MiB", "-1",         "-1k",      "1X",
                          "1MiBs", "1mib", "nan",  "inf", "1e400",      "9300000T", "9223372036854775808",
                          "0x10",  "-0.5", "1.5.", "1e3", "9300000.5T", "1 2",      "1,5M"}) {
    EXPECT_THROW(parse_bytes(bad), InvalidArgumentError) << bad;
  }
}

/// The definition, letter by letter.
bool glob_by_definition(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= text.size(); ++skip) {
      if (glob_by_definition(pattern.substr(1), text.substr(skip))) return true;
    }
    return false;
  }
  return !text.empty() && (pattern[0] == '?' || pattern[0] == text[0]) &&
         glob_by_definition(pattern.substr(1), text.substr(1));
}

RC_GTEST_PROP(Glob, EqualsItsDefinition, ()) {
  auto pattern =
      *rc::gen::resize(10, rc::gen::container<std::string>(rc::gen::element('a', 'b', '*', '*', '?')));
  auto text = *rc::gen::resize(12, rc::gen::container<std::string>(rc::gen::element('a', 'b', '*')));
  RC_ASSERT(glob_match(pattern, text) == glob_by_definition(pattern, text));
}

TEST(Glob, IsQuickOnPatternsOfManyStars) {
  std::string pattern, text(100000, 'a');
  for (int i = 0; i < 50; ++i) pattern += "*a";
  EXPECT_FALSE(glob_match(pattern + "b", text));
  EXPECT_TRUE(glob_match(pattern + "*", text));
}

}  // namespace
}  // namespace spolia
