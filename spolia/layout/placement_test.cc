#include "spolia/layout/placement.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TEST(Placement, TextAndBack) {
  const std::vector<std::pair<Placement, std::string>> cases = {
      {Replicate{}, "replicate"},
      {Shard{0}, "shard(0)"},
      {Shard{-1, Split::kBalanced}, "shard(-1, balanced)"},
      {StridedShard{1, 4}, "strided(1, 4)"},
      {StridedShard{1, 4, StridedSplit::kChunked}, "strided(1, 4, chunked)"},
      {RaggedShard{{0}, {3, 0, 1}}, "ragged([0], [3, 0, 1])"},
      {RaggedShard{{0, 1}, {7}}, "ragged([0, 1], [7])"},
      {Partial{}, "partial(sum)"},
      {Partial{"avg"}, "partial(avg)"},
  };
  for (const auto& [placement, text] : cases) {
    EXPECT_EQ(placement_text(placement), text);
    EXPECT_EQ(parse_placement(text), placement) << text;
  }
  EXPECT_EQ(parse_placement("  ragged( 0 ,(3,0, 1) ) "), (Placement{RaggedShard{{0}, {3, 0, 1}}}));
  EXPECT_EQ(placement_text(Partial{"\x1b"}), "partial(\"\\x1b\")");
}

TEST(Placement, RefusesOtherText) {
  for (std::string_view text :
       {"",          "shard",           "shard()",         "shard(0",
        "shard(0))", "shard(a)",        "shard(0, even)",  "shard(0) shard(1)",
        "Shard(0)",  "replicate()",     "strided(0)",      "strided(0, 2, 3)",
        "ragged(0)", "ragged([], [1])", "ragged([0, [1])", "ragged([0), [1])",
        "partial()", "partial",         "partial(SUM)",    "shard(99999999999999999999)",
        "shard(+1)", "shard(0,)",       "replicated"}) {
    EXPECT_THROW(parse_placement(text), InvalidArgumentError) << text;
  }
}

TEST(Placement, DimsAreCountedFromTheFront) {
  EXPECT_EQ(normalized(Shard{-1}, 3), (Placement{Shard{2}}));
  EXPECT_EQ(normalized(Shard{-3, Split::kBalanced}, 3), (Placement{Shard{0, Split::kBalanced}}));
  EXPECT_EQ(normalized(StridedShard{-2, 5}, 3), (Placement{StridedShard{1, 5}}));
  EXPECT_EQ(normalized(RaggedShard{{-2, -1}, {1}}, 2), (Placement{RaggedShard{{0, 1}, {1}}}));
  EXPECT_EQ(normalized(Replicate{}, 0), Placement{Replicate{}});
  EXPECT_EQ(normalized(Partial{}, 0), Placement{Partial{}});
}

TEST(Placement, RefusesWhatDoesNotSuitATensor) {
  const std::vector<std::pair<Placement, size_t>> cases = {
      {Shard{0}, 0},  // a 0-d tensor
      {Shard{3}, 3},
      {Shard{-4}, 3},
      {StridedShard{0, 0}, 1},
      {StridedShard{0, -2}, 1},
      {StridedShard{1, 2}, 1},
      {RaggedShard{{0}, {1}}, 0},
      {RaggedShard{{1}, {1}}, 2},
      {RaggedShard{{1, 0}, {1}}, 2},
      {RaggedShard{{0, 0}, {1}}, 2},
      {RaggedShard{{}, {1}}, 2},
      {RaggedShard{{0}, {0, 0}}, 2},
      {RaggedShard{{0}, {3, -1}}, 2},
      {RaggedShard{{0}, {INT64_MAX, 1}}, 2},
  };
  for (const auto& [placement, ndim] : cases) {
    EXPECT_THROW(normalized(placement, ndim), InvalidArgumentError) << placement_text(placement);
  }
}

}  // namespace
}  // namespace spolia
