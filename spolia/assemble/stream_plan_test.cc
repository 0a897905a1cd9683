#include "spolia/assemble/stream_plan.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

/// A source cut into equal rows, one part a rank.
StreamSource in_rows(const std::string& name, int64_t rows, int64_t columns,
                     std::vector<std::vector<int64_t>> holders) {
  StreamSource source{name, DType::kFloat32, {rows, columns}, {}};
  const int64_t each = rows / std::ssize(holders);
  for (size_t h = 0; h < holders.size(); ++h) {
    source.boxes.push_back({{{static_cast<int64_t>(h) * each, 0}, {each, columns}}, holders[h]});
  }
  return source;
}

StreamOutput whole_of(const StreamSource& source, size_t number, const std::string& name = "") {
  StreamOutput output;
  output.name = name.empty() ? source.name : name;
  output.dtype = source.dtype;
  output.shape = source.shape;
  output.regions.push_back({number, {whole(source.shape), whole(source.shape), {}}});
  return output;
}

TEST(StreamPlan, SaysWhoSendsWhatAndWhatItTakes) {
  const StreamGrid grid{{{0, 1}}};
  const std::vector<StreamSource> sources = {in_rows("w", 4, 3, {{0}, {1}}), in_rows("bias", 2, 1, {{0, 1}})};
  const std::vector<StreamOutput> outputs = {whole_of(sources[0], 0), whole_of(sources[1], 1)};
  const StreamPlan plan = plan_stream(grid, sources, outputs, {.memory = int64_t{1} << 20});
  EXPECT_EQ(stream_plan_text(grid, sources, outputs, plan),
            "2 outputs in 2 units and 1 rounds over 1x2 ranks; 112 bytes delivered, 48 sent, 48 at the "
            "least; at most "
            "262272 bytes on a rank, 262144 of them on their way\n"
            "round 0\n"
            "  unit 0: bias [0, 0] + [2, 1], 8 bytes\n"
            "  unit 1: w [0, 0] + [4, 3], 48 bytes\n"
            "  wave 0: bias [0, 0] + [2, 1] as float32 to unit 0 [0, 0] + [2, 1]\n"
            "  wave 0: w [0, 0] + [2, 3] as float32 to unit 1 [0, 0] + [2, 3], from 0 to all\n"
            "  wave 0: w [2, 0] + [2, 3] as float32 to unit 1 [2, 0] + [2, 3], from 1 to all\n");
}

TEST(StreamPlan, DownTheColumnsAndAlongTheRowsNothingTravelsTwiceToARank) {
  const StreamGrid grid{{{5, 2, 4}, {0, 1, 3}}};  // permuted
  const std::vector<StreamSource> sources = {in_rows("w", 6, 10, {{0}, {1}, {2}, {3}, {4}, {5}})};
  const std::vector<StreamOutput> outputs = {whole_of(sources[0], 0)};
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  EXPECT_EQ(plan.sent, plan.least);
  EXPECT_EQ(plan.least, 6 * 40 * 5);
  for (const StreamPlan::Move& move : plan.moves) {
    const auto down = column_route(grid, sources, plan, move);
    ASSERT_TRUE(down.has_value());
    EXPECT_TRUE(down->broadcast);
    EXPECT_EQ(grid.rank_of(down->root), static_cast<int64_t>(move.held));
    for (size_t row = 0; row < 2; ++row) {
      const auto along = row_route(grid, sources, outputs, plan, move, row);
      ASSERT_TRUE(along.has_value());
      EXPECT_EQ(grid.column_of(along->root), grid.column_of(down->root));
    }
  }
}

TEST(StreamPlan, RowsThatEachHaveACopySendNothingToEachOther) {
  const StreamGrid grid{{{0, 1}, {2, 3}}};
  const std::vector<StreamSource> sources = {in_rows("w", 4, 10, {{0, 2}, {1, 3}})};
  const std::vector<StreamOutput> outputs = {whole_of(sources[0], 0)};
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  for (const StreamPlan::Move& move : plan.moves) EXPECT_FALSE(column_route(grid, sources, plan, move));
  EXPECT_EQ(plan.sent, 4 * 80);
  EXPECT_EQ(plan.sent, plan.least);
}

TEST(StreamPlan, OfThoseThatHaveItTheOneSendsThatSentLeast) {
  const StreamGrid grid{{{0, 1, 2, 3}}};
  std::vector<StreamSource> sources;
  std::vector<StreamOutput> outputs;
  for (size_t t = 0; t < 30; ++t) {
    sources.push_back(in_rows("w" + std::to_string(10 + t), 2, 100, {{0, 1, 2}}));
    outputs.push_back(whole_of(sources.back(), t));
  }
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  EXPECT_EQ(plan.sent, 30 * 800);
  EXPECT_EQ(plan.sent_by, (std::vector<int64_t>{8000, 8000, 8000, 0}));
}

TEST(StreamPlan, WhatSeveralOutputsUseIsSentOnce) {
  const StreamGrid grid{{{0, 1}}};
  const std::vector<StreamSource> sources = {in_rows("embed", 4, 10, {{0}, {1}}),
                                             in_rows("m", 4, 10, {{0}, {1}})};
  const std::vector<StreamOutput> outputs = {whole_of(sources[0], 0, "embed"), whole_of(sources[1], 1, "m"),
                                             whole_of(sources[0], 0, "z.head")};
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  EXPECT_EQ(plan.sent, 2 * 160);
  EXPECT_EQ(plan.least, 2 * 160);
  EXPECT_EQ(outputs[plan.units[1].output].name, "z.head");  // at once, while its source is there
  // Where a round has no room for both, it is sent again, and the plan says so.
  const StreamPlan narrow =
      plan_stream(grid, sources, outputs, {.memory = 192 + kLeastStaging, .round_bytes = 100});
  EXPECT_EQ(narrow.sent, 3 * 160);
  EXPECT_EQ(narrow.least, 2 * 160);
}

TEST(StreamPlan, ToASubsetOnlyWhatItWants) {
  const StreamGrid grid{{{0, 1, 2, 3}}};
  const std::vector<StreamSource> sources = {in_rows("w", 4, 10, {{0}, {1}, {2}, {3}})};
  std::vector<StreamOutput> outputs = {whole_of(sources[0], 0)};
  outputs[0].wanted_by = std::make_shared<const std::vector<size_t>>(1, 2);
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  EXPECT_EQ(plan.sent, 3 * 40);
  EXPECT_EQ(plan.delivered, 160);
  EXPECT_EQ(plan.arena, (std::vector<int64_t>{0, 0, 192, 0}));
}

TEST(StreamPlan, StatesTheLeastMemory) {
  const StreamGrid grid{{{0, 1}}};
  const std::vector<StreamSource> sources = {in_rows("w", 1000, 100, {{0}, {1}})};
  const std::vector<StreamOutput> outputs = {whole_of(sources[0], 0)};
  const int64_t least = 400'000 + kLeastStaging;
  try {
    plan_stream(grid, sources, outputs, {.memory = least - 1});
    ADD_FAILURE();
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(least)), std::string::npos) << error.what();
  }
  EXPECT_EQ(plan_stream(grid, sources, outputs, {.memory = least}).peak(), least);
  const StreamPlan pieces = plan_stream(grid, sources, outputs, {.memory = least - 1, .pieces = true});
  EXPECT_GT(pieces.units.size(), 1);
  EXPECT_LT(pieces.peak(), least);
  int64_t bytes = 0;
  for (const StreamPlan::Unit& unit : pieces.units) bytes += unit.bytes;
  EXPECT_EQ(bytes, 400'000);
}

TEST(StreamPlan, ManyTensorsPlanQuickly) {
  const StreamGrid grid{{{0, 1, 2, 3, 4, 5, 6, 7}}};
  std::vector<StreamSource> sources;
  std::vector<StreamOutput> outputs;
  for (size_t t = 0; t < 50'000; ++t) {
    sources.push_back(in_rows("w" + std::to_string(t), 8, 10, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
    outputs.push_back(whole_of(sources.back(), t));
  }
  const StreamPlan plan = plan_stream(grid, sources, outputs);
  EXPECT_EQ(plan.moves.size(), 400'000);
  EXPECT_EQ(plan.sent, plan.least);
}

}  // namespace
}  // namespace spolia
