#include "spolia/checkpoint/layout_option.h"

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

std::string layout_text_of(const LayoutRules& rules, std::string_view name, const Dims& shape) {
  return rules.layout_of(name, shape)->text();
}

TEST(LayoutOption, JsonSaysWhatTextSays) {
  const LayoutRules text = read_layout_rules(
      "mesh = 2x2 (dp, tp)\n*.weight: [shard(0), replicate]\n*.bias: [shard(0)] over (tp)\n"
      "experts.*: [shard(0, balanced)] over 4 (ep) on [4, 5, 6, 7]\n\"a: b\": [strided(0, 2), shard(0)]");
  const LayoutRules json = read_layout_rules(R"json(
    {"mesh": {"shape": [2, 2], "dims": ["dp", "tp"]},
     "rules": [{"match": "*.weight", "placements": ["shard(0)", "replicate"]},
               {"match": "*.bias", "placements": ["shard(0)"], "over": ["tp"]},
               {"match": "experts.*", "placements": ["shard(0, balanced)"],
                "mesh": {"shape": [4], "dims": ["ep"], "ranks": [4, 5, 6, 7]}},
               {"match": "a: b", "placements": ["strided(0, 2)", "shard(0)"]}]})json");
  for (std::string_view name : {"x.weight", "x.bias", "experts.1", "a: b", "other"}) {
    EXPECT_EQ(*json.layout_of(name, Dims{8, 8}), *text.layout_of(name, Dims{8, 8})) << name;
  }
  EXPECT_EQ(json.ranks(), 8);
}

TEST(LayoutOption, MeshesMayBeTexts) {
  const LayoutRules rules = read_layout_rules(R"json(
    {"mesh": "2 (dp) on [1, 0]",
     "rules": [{"match": "a", "placements": [], "mesh": "0-d on [3]"}]})json");
  EXPECT_EQ(layout_text_of(rules, "a", {4}), "[] over 0-d on [3]");
  EXPECT_EQ(layout_text_of(rules, "b", {4}), "[replicate] over 2 (dp) on [1, 0]");
  EXPECT_EQ(layout_text_of(read_layout_rules(R"json({"mesh": "3"})json"), "b", {4}), "[replicate] over 3");
}

TEST(LayoutOption, RefusesOtherJson) {
  for (std::string_view text : {
           "{",
           "{}",
           R"({"mesh": 2})",
           R"({"mesh": "2", "rule": []})",
           R"({"mesh": "2", "rules": {}})",
           R"({"mesh": "2"} x)",
           R"({"mesh": {"shape": 2}})",
           R"({"mesh": {"shape": [2.0]}})",
           R"({"mesh": {"shape": [18446744073709551615]}})",
           R"({"mesh": {"dims": ["dp"]}})",
           R"({"mesh": {"shape": [2], "names": ["dp"]}})",
           R"({"mesh": {"shape": [2], "ranks": ["0", "1"]}})",
       }) {
    EXPECT_THROW(read_layout_rules(text), InvalidArgumentError) << text;
  }
  for (std::string_view rule : {
           "1",
           R"({"match": "a"})",
           R"({"match": 1, "placements": ["replicate"]})",
           R"({"match": "a", "placements": "replicate"})",
           R"({"match": "a", "placements": ["replicated"]})",
           R"({"match": "a", "placements": ["partial"]})",
           R"({"match": "a", "placements": ["replicate"], "over": []})",
           R"({"match": "a", "placements": ["replicate"], "over": ["tp"]})",
           R"({"match": "a", "placements": [], "over": ["dp"], "mesh": "0-d"})",
           R"({"match": "a", "placements": ["replicate"], "where": 1})",
       }) {
    const std::string text = R"json({"mesh": "2 (dp)", "rules": [)json" + std::string(rule) + "]}";
    EXPECT_THROW(read_layout_rules(text), InvalidArgumentError) << text;
  }
  EXPECT_THROW(read_layout_rules("{\"mesh\": \"\xff\"}"), InvalidArgumentError);
}

TEST(LayoutOption, DeepNestingDoesNoHarm) {
  const std::string open(1 << 20, '['), close(1 << 20, ']');
  EXPECT_THROW(read_layout_rules("{\"mesh\": " + open), InvalidArgumentError);
  EXPECT_THROW(read_layout_rules("{\"mesh\": " + open + close + "}"), InvalidArgumentError);
}

TEST(LayoutOption, MessagesNameTheRule) {
  try {
    read_layout_rules(
        R"json({"mesh": "2", "rules": [{"match": "a", "placements": ["shard(0)", "shard(1)"]}]})json");
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(error.what(), "rule 1, \"a\": the device mesh 2 needs 1 placements, not 2");
  }
}

/// The fenced blocks of a Markdown text.
std::vector<std::string> blocks_of(const std::string& text) {
  std::vector<std::string> blocks;
  for (size_t at = text.find("```"); at != std::string::npos; at = text.find("```", at)) {
    const size_t begin = text.find('\n', at) + 1, end = text.find("```", begin);
    blocks.push_back(text.substr(begin, end - begin));
    at = end + 3;
  }
  return blocks;
}

TEST(LayoutOption, TheExamplesOfTheTutorialAreRead) {
  std::ifstream file(std::string(SPOLIA_TEST_DATA) + "/../../docs/layouts.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  int examples = 0;
  for (const std::string& block : blocks_of(text)) {
    if (!block.starts_with("mesh = ") && !block.starts_with("{")) continue;
    EXPECT_NO_THROW(read_layout_rules(block)) << block;
    ++examples;
  }
  EXPECT_EQ(examples, 8);
}

}  // namespace
}  // namespace spolia
