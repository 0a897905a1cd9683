#include "spolia/layout/layout_rules.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/layout_text.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

/// The text of the layout that the rules give a tensor.
std::string layout_text_of(const LayoutRules& rules, std::string_view name, const Dims& shape) {
  return rules.layout_of(name, shape)->text();
}

/// What the error says that `f` throws; "" where it throws none.
template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const InvalidArgumentError& error) {
    return error.what();
  }
  return "";
}

constexpr const char* kExample = R"(
# two pairs of tensor-parallel ranks
mesh = 2x2 (dp, tp)

*.weight: [shard(0), shard(1)]     # both dims
*.bias: [shard(0)] over (tp)
experts.*: [shard(0)] over 4 (ep) on [4, 5, 6, 7]
"odd: name; #1*": [replicate, shard(-1)]
*.norm.weight: [replicate, replicate]
)";

TEST(LayoutRules, TheLastMatchHolds) {
  const LayoutRules rules = parse_layout_rules(kExample);
  EXPECT_EQ(layout_text_of(rules, "a.weight", {4, 4}), "[shard(0), shard(1)] over 2x2 (dp, tp)");
  EXPECT_EQ(layout_text_of(rules, "a.norm.weight", {4}), "[replicate, replicate] over 2x2 (dp, tp)");
  EXPECT_EQ(layout_text_of(rules, "a.bias", {4}), "[replicate, shard(0)] over 2x2 (dp, tp)");
  EXPECT_EQ(layout_text_of(rules, "experts.0.bias", {4}), "[shard(0)] over 4 (ep) on [4, 5, 6, 7]");
  EXPECT_EQ(layout_text_of(rules, "odd: name; #12", {4}), "[replicate, shard(-1)] over 2x2 (dp, tp)");
  EXPECT_EQ(layout_text_of(rules, "something", {4}), "[replicate, replicate] over 2x2 (dp, tp)");
  EXPECT_EQ(rules.ranks(), 8);
}

TEST(LayoutRules, TensorsShareOneLayout) {
  const LayoutRules rules = parse_layout_rules(kExample);
  EXPECT_EQ(rules.layout_of("a.weight", Dims{4, 4}), rules.layout_of("b.weight", Dims{3, 2, 1}));
  EXPECT_EQ(rules.layout_of("x", Dims{4, 4}), rules.layout_of("y", Dims{}));
}

TEST(LayoutRules, A0dTensorIsReplicatedOverItsRulesMesh) {
  const LayoutRules rules = parse_layout_rules(kExample);
  EXPECT_EQ(layout_text_of(rules, "a.weight", {}), "[replicate, replicate] over 2x2 (dp, tp)");
  EXPECT_EQ(layout_text_of(rules, "experts.0.scale", {}), "[replicate] over 4 (ep) on [4, 5, 6, 7]");
}

TEST(LayoutRules, FitAShellArgument) {
  const LayoutRules rules =
      parse_layout_rules("mesh=4 on[3,2,1,0];*: [shard(0)] ; b: [shard(1)]; # nothing: [shard(2)];");
  EXPECT_EQ(layout_text_of(rules, "a", {4, 4}), "[shard(0)] over 4 on [3, 2, 1, 0]");
  EXPECT_EQ(layout_text_of(rules, "b", {4, 4}), "[shard(1)] over 4 on [3, 2, 1, 0]");
  EXPECT_EQ(rules.ranks(), 4);
}

TEST(LayoutRules, AMeshAloneReplicates) {
  const LayoutRules rules = parse_layout_rules("mesh = 2x3\r\n");
  EXPECT_EQ(layout_text_of(rules, "a", {4}), "[replicate, replicate] over 2x3");
  EXPECT_EQ(rules.ranks(), 6);
}

TEST(LayoutRules, PatternsMayLookLikeTheMeshOrHoldAnyLetters) {
  const LayoutRules rules =
      parse_layout_rules("mesh = 2\nmesh: [shard(0)]\nmesh_mlp.*: [shard(1)]\nä=[1](2)*: [shard(2)]");
  EXPECT_EQ(layout_text_of(rules, "mesh", {4}), "[shard(0)] over 2");
  EXPECT_EQ(layout_text_of(rules, "mesh_mlp.w", {4, 4}), "[shard(1)] over 2");
  EXPECT_EQ(layout_text_of(rules, "ä=[1](2)w", {4, 4, 4}), "[shard(2)] over 2");
}

TEST(LayoutRules, RefusesOtherText) {
  for (std::string_view text : {
           "",
           "# mesh = 2",
           "a: [shard(0)]",
           "mesh: 2",
           "mesh = ",
           "mesh = 2 3",
           "mesh = 2; mesh = 2",
           "mesh = 2; a",
           "mesh = 2; a: ",
           "mesh = 2; a: shard(0)",
           "mesh = 2; : [shard(0)]",
           "mesh = 2; a b: [shard(0)]",
           "mesh = 2; \"a: [shard(0)]",
           "mesh = 2; a\": [shard(0)]",
           "mesh = 2; a: [shard(0)] b: [shard(0)]",
           "mesh = 2; a: [shard(0), shard(1)]",
           "mesh = 2; a: []",
           "mesh = 2; a: [partial(sum)]",
           "mesh = 2; a: [ragged(0, [1, 1, 1])]",
           "mesh = 2; a: [shard(0)] over",
           "mesh = 2; a: [shard(0)] over (tp)",
           "mesh = 2 (tp); a: [shard(0)] over (dp)",
           "mesh = 2 (tp); a: [shard(0), shard(0)] over (tp)",
           "mesh = 2 (tp); a: [shard(0), shard(0)] over (tp, tp)",
           "mesh = 2 (tp); a: [] over ()",
           "mesh = 2x2 (dp, tp); a: [shard(0), shard(0)] over (tp, dp)",
           "mesh = 2; a: [shard(0)] over 2x2",
           "mesh = 1 on [1048576]",
           "mesh = 2; a: [shard(0)] over 1 on [1048576]",
           "{}",
       }) {
    EXPECT_THROW(parse_layout_rules(text), InvalidArgumentError) << text;
  }
}

TEST(LayoutRules, MessagesNameTheRule) {
  EXPECT_EQ(message_of([] { parse_layout_rules("mesh = 2 (tp)\n\na: [shard(0)] over (dp)"); }),
            "line 3, \"a: [shard(0)] over (dp)\": the device mesh 2 (tp) has no dim \"dp\"");
  EXPECT_EQ(message_of([] { parse_layout_rules("mesh = 2\nb [shard(0)]"); }).substr(0, 52),
            "line 2: \"b [shard(0)]\" is, from \"[shard(0)]\" on, not");

  const LayoutRules rules = parse_layout_rules("mesh = 2\n*: [shard(1)]\nb*: [shard(0)]");
  EXPECT_EQ(
      message_of([&] { rules.layout_of("a", Dims{3}); }),
      "line 2, \"*: [shard(1)]\": tensor \"a\" of shape 3: shard(1) is no placement of a 1-d tensor: it "
      "has no dim 1");
  const std::vector<std::string_view> names = {"a", "c"};
  EXPECT_EQ(message_of([&] { rules.check_patterns(names); }),
            "line 3, \"b*: [shard(0)]\": no tensor has a name that matches \"b*\"");
}

TEST(LayoutRules, PatternsMustMatch) {
  const LayoutRules rules = parse_layout_rules("mesh = 2; *: [shard(0)]; b*: [shard(0)]; *: [replicate]");
  EXPECT_NO_THROW(rules.check_patterns(std::vector<std::string_view>{"a", "b"}));
  EXPECT_THROW(rules.check_patterns(std::vector<std::string_view>{"a"}), InvalidArgumentError);
  EXPECT_NO_THROW(parse_layout_rules("mesh = 2; *: [shard(0)]").check_patterns({}));
}

/// Whatever the text, rules or an error that names it.
RC_GTEST_PROP(LayoutRules, AnyTextIsReadOrRefused, ()) {
  static const std::vector<std::string> kPieces = {
      "mesh", "=", "2",    "2x2", "(dp, tp)", "on", "[0, 1]", "\n",    ";",   "#",    "*",  ":",
      "[",    "]", "over", "\"",  " ",        ",",  "a.",     "shard", "(0)", "(tp)", "\r", "\xff"};
  std::string text = pick(0, 2) ? "mesh = 2x2 (dp, tp)\n*: [shard(0)" : "";
  for (int64_t n = pick(0, 12); n > 0; --n)
    text += kPieces[static_cast<size_t>(pick(0, std::ssize(kPieces)))];
  try {
    const LayoutRules rules = parse_layout_rules(text);
    RC_ASSERT(rules.ranks() > 0);
    RC_ASSERT(rules.layout_of("a.b", Dims{2, 3})->mesh().ranks().size() > 0u);
  } catch (const InvalidArgumentError& error) {
    RC_ASSERT(error.what() != std::string());
  }
}

}  // namespace
}  // namespace spolia
