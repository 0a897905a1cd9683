#include "spolia/layout/layout_text.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

using Names = std::vector<std::string>;

std::vector<int64_t> first_ranks(int64_t count) {
  std::vector<int64_t> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

DeviceMesh random_mesh() {
  static const Names kNames = {"dp", "tp", "ep_2", "Data.Parallel", "a, b", "x) on [3]", "π", "-", " "};
  Dims shape;
  for (int64_t d = pick(0, 4); d > 0; --d) shape.push_back(pick(1, 5));
  Names names;
  const size_t first = static_cast<size_t>(pick(0, std::ssize(kNames)));
  for (size_t d = 0; d < shape.size(); ++d) names.push_back(kNames[(first + d) % kNames.size()]);
  if (pick(0, 3) == 0) names.clear();
  std::vector<int64_t> ranks = first_ranks(numel(shape));
  if (pick(0, 2)) {
    const int64_t first_rank = pick(0, 3), step = pick(1, 4);
    for (int64_t& rank : ranks) rank = first_rank + rank * step;
  }
  if (pick(0, 2)) std::ranges::rotate(ranks, ranks.begin() + pick(0, std::ssize(ranks)));
  return DeviceMesh(shape, names, ranks);
}

Placement random_placement(int64_t parts) {
  switch (pick(0, 7)) {
    case 0:
      return Replicate{};
    case 1:
      return Partial{pick(0, 2) ? "sum" : "a_vg"};
    case 2:
      return Shard{pick(-3, 4), Split::kCeil};
    case 3:
      return Shard{pick(-3, 4), Split::kBalanced};
    case 4:
      return StridedShard{pick(-3, 4), pick(1, 100), StridedSplit::kAligned};
    case 5:
      return StridedShard{pick(-3, 4), pick(1, 100), StridedSplit::kChunked};
    default:
      break;
  }
  RaggedShard ragged;
  for (int64_t d = 0, count = pick(1, 4); d < count; ++d) ragged.dims.push_back(d);
  for (int64_t p = 0; p < parts; ++p) ragged.units.push_back(pick(0, 1000));
  return ragged;
}

Layout random_layout() {
  DeviceMesh mesh = random_mesh();
  std::vector<Placement> placements;
  for (int64_t parts : mesh.shape()) placements.push_back(random_placement(parts));
  return Layout(std::move(mesh), std::move(placements));
}

/// Twice as many blanks, and some around everything that is neither a letter nor a digit. Not for quoted
/// names, whose blanks count.
std::string with_blanks(const std::string& text) {
  std::string out;
  for (char c : text) {
    out += c;
    if (std::string_view("[](), ").find(c) != std::string_view::npos) out += " \t";
  }
  return " " + out;
}

RC_GTEST_PROP(LayoutText, IsReadBack, ()) {
  for (int n = 0; n < 20; ++n) {
    const Layout layout = random_layout();
    const std::string text = layout.text();
    RC_LOG() << text << "\n";
    RC_ASSERT(parse_layout(text) == layout);
    RC_ASSERT(parse_mesh(layout.mesh().text()) == layout.mesh());
    if (text.find('"') == std::string::npos) RC_ASSERT(parse_layout(with_blanks(text)) == layout);
  }
}

RC_GTEST_PROP(LayoutText, WhatIsCutOffOrAddedIsRefused, ()) {
  const std::string text = random_layout().text();
  const std::string cut = text.substr(0, static_cast<size_t>(pick(0, std::ssize(text))));
  try {
    RC_ASSERT(text.starts_with(parse_layout(cut).text()));  // "... over 2x2 (dp, tp)" without its ranks
  } catch (const InvalidArgumentError&) {
  }
  RC_ASSERT_THROWS_AS(parse_layout(text + "]"), InvalidArgumentError);
}

TEST(LayoutText, Examples) {
  EXPECT_EQ(parse_mesh("2x2 (dp, tp) on [0, 1, 6, 7]"), DeviceMesh({2, 2}, {"dp", "tp"}, {0, 1, 6, 7}));
  EXPECT_EQ(parse_mesh("2x3"), DeviceMesh({2, 3}));
  EXPECT_EQ(parse_mesh(" 2 x 3(a,b)on[ 5,4,3,2,1,0] "), DeviceMesh({2, 3}, {"a", "b"}, {5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(parse_mesh("4 on (4, 5, 6, 7)"), DeviceMesh({4}, {}, {4, 5, 6, 7}));
  EXPECT_EQ(parse_mesh("1 on 3"), DeviceMesh({1}, {}, {3}));
  EXPECT_EQ(parse_layout("[strided(0, 2), shard(0)] over 2x2 (dp, tp)"),
            Layout(DeviceMesh({2, 2}, {"dp", "tp"}), {StridedShard{0, 2}, Shard{0}}));
}

TEST(LayoutText, AMeshWithoutDimsHoldsOneRank) {
  const DeviceMesh mesh({}, {}, {3});
  EXPECT_EQ(mesh.text(), "0-d on [3]");
  EXPECT_EQ(DeviceMesh(Dims{}).text(), "0-d");
  EXPECT_EQ(parse_mesh("0-d"), DeviceMesh(Dims{}));
  EXPECT_EQ(parse_mesh("0-d on [3]"), mesh);
  EXPECT_EQ(parse_layout("[] over 0-d on [3]"), Layout(mesh, {}));
  EXPECT_THROW(parse_mesh("0-d on [3, 4]"), InvalidArgumentError);
}

TEST(LayoutText, NamesOfOddLettersStandInQuotes) {
  EXPECT_EQ(DeviceMesh({2, 1}, {"a, b", "tp"}).text(), "2x1 (\"a, b\", tp)");
  EXPECT_EQ(parse_mesh("2x1 (\"dp\", tp)"), DeviceMesh({2, 1}, {"dp", "tp"}));
}

TEST(LayoutText, AMeshOfManyRanks) {
  std::vector<int64_t> ranks = first_ranks(16'384);
  std::ranges::reverse(ranks);
  const Layout layout(DeviceMesh({128, 128}, {"dp", "tp"}, ranks), {Replicate{}, Shard{0}});
  EXPECT_EQ(parse_layout(layout.text()), layout);
}

TEST(LayoutText, RefusesOtherText) {
  for (std::string_view text : {"",
                                "x",
                                "2x",
                                "x2",
                                "2x2x",
                                "2,2",
                                "2x2 dp, tp",
                                "2x2 (dp",
                                "2x2 (dp)",
                                "2x2 ()",
                                "2x2 (dp, dp)",
                                "2x2 (dp,)",
                                "2x2 (d p)",
                                "0x2",
                                "-2",
                                "2 on",
                                "2 on []",
                                "2 on [0]",
                                "2 on [0 1]",
                                "2 [0, 1]",
                                "2 on [0, 0]",
                                "2 on [0, 1",
                                "2 on [-1, 0]",
                                "2 (\"dp)",
                                "2 (dp) 3",
                                "2 (\"\")",
                                "2 over [0,1]",
                                "scalar",
                                "1048577",
                                "99999999999999999999",
                                "2\n",
                                "2 (d\x1b)",
                                "2x2 (\"dp\\n\", tp)",
                                "4294967296x4294967296"}) {
    EXPECT_THROW(parse_mesh(text), InvalidArgumentError) << text;
  }
  for (std::string_view text :
       {"", "[shard(0)]", "[shard(0)] 2", "[shard(0)] over", "[shard(0), shard(1)] over 2", "[] over 2",
        "[shard(0) shard(0)] over 2x2", "shard(0) over 2", "[shard(0)] over (dp)",
        "[ragged(0, [1, 2, 3])] over 2", "[,] over 0-d", "[shard(0)] over 2 over 2"}) {
    EXPECT_THROW(parse_layout(text), InvalidArgumentError) << text;
  }
}

TEST(LayoutText, MessagesTellWhereAndWhatIsExpected) {
  try {
    parse_mesh("2x2 [dp, tp]");
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(error.what(),
                 "\"2x2 [dp, tp]\" is, from \"[dp, tp]\" on, not a device mesh; write one like "
                 "2x2 (dp, tp) or 2x2 on [0, 1, 6, 7]");
  }
}

}  // namespace
}  // namespace spolia
