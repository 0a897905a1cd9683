#include "spolia/optim/mesh_optimizer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"
#include "spolia/optim/chained_optimizer.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_mesh.h"

namespace spolia {
namespace {

TEST(MeshOptimizer, HybridShardsTakeTheStepsOfOneRank) {
  MeshCase test;
  test.add("a", {8, 6}, "[replicate, shard(0)] over 2x2");
  test.add("b", {6, 10}, "[replicate, shard(1)] over 2x2");
  test.add("c", {4, 4}, "[replicate, shard(0)] over 2x2");
  test.expect_steps_of_one_rank(4, 10);
}

/// Tensors in every layout there is for so many ranks.
MeshCase all_layouts(int ranks, uint64_t variant = 0) {
  MeshCase test;
  const std::string n = std::to_string(ranks);
  const MatrixRule experts{MatrixKind::kBatch, {}}, convolution{MatrixKind::kConvolution, {}};
  std::string units;  // 2, 0, 1, 2, 0, 1 ...
  int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) {
    const int64_t unit = (2 * r + 2) % 3;
    units += (r ? ", " : "") + std::to_string(unit);
    sum += unit;
  }
  int number = 0;
  auto add = [&](Dims shape, const std::string& layout, const MatrixRule& rule = {}) {
    MeshCase::Tensor& tensor = test.add("t" + std::to_string(number), shape, layout, rule);
    tensor.adamw = (static_cast<uint64_t>(number++) + variant) % 4 == 3;
  };
  add({7, 5}, "[shard(0)] over " + n);
  add({8, 12}, "[shard(-1)] over " + n);
  add({12, 8}, "[shard(0, balanced)] over " + n);
  add({3, 9}, "[shard(0)] over " + n);  // empty shards
  add({11, 6}, "[strided(0, 2)] over " + n);
  add({11, 6}, "[strided(0, 3, chunked)] over " + n);
  add({sum, 4}, "[ragged([0], [" + units + "])] over " + n);
  add({sum, 3}, "[ragged([0, 1], [" + units + "])] over " + n);
  add({6, 6}, "[replicate] over " + n);
  add({5, 10}, "[replicate] over " + n);
  add({8, 5, 4}, "[shard(0)] over " + n, experts);
  add({3, 5, 4}, "[shard(1)] over " + n, experts);
  add({3, 4, 9}, "[shard(2)] over " + n, experts);
  add({6, 3, 2, 2}, "[shard(0)] over " + n, convolution);
  add({6, 3, 2, 2}, "[shard(1)] over " + n, convolution);
  add({5}, "[shard(0)] over " + n);
  test.tensors.back().adamw = true;
  add({}, "[replicate] over " + n);
  test.tensors.back().adamw = true;
  add({6, 8}, "[] over 0-d");
  for (int a = 2; a < ranks; ++a) {
    if (ranks % a != 0) continue;
    const std::string grid = std::to_string(a) + "x" + std::to_string(ranks / a);
    add({9, 7}, "[shard(0), shard(0)] over " + grid);
    add({9, 7}, "[shard(0), shard(1)] over " + grid);
    add({9, 7}, "[replicate, shard(0)] over " + grid);
    add({9, 7}, "[shard(1), replicate] over " + grid);
    add({10, 6}, "[strided(0, " + std::to_string(ranks / a) + "), shard(0)] over " + grid);
    add({4, 6, 5}, "[shard(0), shard(1)] over " + grid, experts);
    add({4, 6, 5}, "[replicate, shard(0)] over " + grid, experts);
    add({8, 8}, "[replicate, replicate] over " + grid);
  }
  if (ranks > 2) add({8, 8}, "[shard(0)] over 2 on [2, 0]");  // ranks outside
  if (ranks > 2) add({8, 8}, "[replicate] over 2 on [1, 2]");
  if (ranks == 8) {
    add({9, 8}, "[replicate, shard(0), replicate] over 2x2x2");
    add({9, 8}, "[shard(1), replicate, shard(0)] over 2x2x2");
    add({9, 8}, "[replicate, shard(0)] over 2x3 on [7, 1, 2, 3, 4, 0]");
  }
  return test;
}

TEST(MeshOptimizer, AnyLayoutTakesTheStepsOfOneRank) {
  for (int ranks : {1, 2, 3, 4, 6}) {
    SCOPED_TRACE(ranks);
    all_layouts(ranks).expect_steps_of_one_rank(ranks, 10);
  }
}

TEST(MeshOptimizer, AnyLayoutTakesTheStepsOfOneRankSlow) {
  for (int ranks = 1; ranks <= 8; ++ranks)
    for (uint64_t variant = 0; variant < 4; ++variant)
      for (int64_t batch_bytes : {int64_t{1}, int64_t{200}, int64_t{1} << 20})
        for (int64_t pack_below : {0, 1 << 20}) {
          SCOPED_TRACE(ranks);
          MeshCase test = all_layouts(ranks, variant);
          test.options.batch_bytes = batch_bytes;
          test.options.engine = {.max_bytes_in_flight = batch_bytes, .pack_below = pack_below};
          test.expect_steps_of_one_rank(ranks, 10);
        }
}

TEST(MeshOptimizer, BatchesOfOneParameterAndCapsBelowAMatrix) {
  for (int64_t pack_below : {0, 1 << 20}) {
    MeshCase test = all_layouts(4, 1);
    test.options.batch_bytes = 1;
    test.options.engine = {.max_bytes_in_flight = 1, .pack_below = pack_below};
    test.expect_steps_of_one_rank(4, 10, 2e-5, [](MeshCase::Rank& rank, World&) {
      for (const MeshGroup& group : rank.muon->plan().groups)
        for (const MeshBatch& batch : group.batches) EXPECT_EQ(batch.tensors.size(), 1u);
    });
  }
}

TEST(MeshOptimizer, MoreRanksThanRows) {
  MeshCase test;
  test.add("wide", {18, 2304}, "[shard(0)] over 8");
  test.add("tall", {7, 3}, "[shard(0)] over 8");
  test.expect_steps_of_one_rank(8, 4);
}

TEST(MeshOptimizer, FusedMatricesAreSplitByLogicalRows) {
  MeshCase test;
  test.add("qkv", {24, 10}, "[replicate, shard(0)] over 2x2",
           {MatrixKind::kMatrix, interleaved_rows(2, {8, 2, 2})});
  test.add("gate_up", {3, 10, 6}, "[shard(1), replicate] over 2x2",
           {MatrixKind::kBatch, stacked_rows({4, 6})});
  test.add("stacked", {12, 6}, "[shard(0), shard(0)] over 2x2",
           {MatrixKind::kMatrix, stacked_rows({5, 0, 7})});
  test.expect_steps_of_one_rank(4, 10, 2e-5, [](MeshCase::Rank& rank, World& world) {
    int64_t matrices = all_gather_number(*world.all(), rank.muon->newton_schulz().matrices())[0];
    for (size_t place = 1; place < 4; ++place)
      matrices += all_gather_number(*world.all(), rank.muon->newton_schulz().matrices())[place];
    EXPECT_EQ(matrices, 10 * (3 + 6 + 2));
  });
}

/// Parameters that are so much of the work that several rows own each.
MeshCase large_tensors(const std::string& layout) {
  MeshCase test;
  test.add("experts", {6, 5, 4}, layout, {MatrixKind::kBatch, {}});
  test.add("fused", {9, 6, 3}, layout, {MatrixKind::kBatch, stacked_rows({2, 4})});
  test.add("embed", {12, 3},
           layout == "[shard(2), replicate] over 2x2" ? "[shard(1), replicate] over 2x2" : layout)
      .adamw = true;
  return test;
}

void expect_parts(const MeshPlan& plan) {
  for (const auto& assignment : plan.assignments)
    for (const MeshOwner& owner : assignment->owners) EXPECT_GT(owner.rows.size(), 1u) << plan.text();
}

TEST(MeshOptimizer, LargeTensorsAreOwnedInParts) {
  for (const char* layout :
       {"[replicate] over 4", "[replicate, shard(0)] over 2x2", "[replicate, shard(1)] over 2x2",
        "[shard(2), replicate] over 2x2", "[replicate, strided(0, 2)] over 2x2",
        "[replicate, replicate] over 2x2", "[ragged([0], [2, 1]), replicate] over 2x2",
        "[shard(0), replicate, shard(0)] over 2x2x2", "[replicate, shard(0), shard(1)] over 2x2x2"})
    for (int64_t batch_bytes : {1, 1 << 20})
      for (int64_t pack_below : {0, 1 << 20}) {
        SCOPED_TRACE(layout);
        MeshCase test = large_tensors(layout);
        test.options.batch_bytes = batch_bytes;
        test.options.engine.pack_below = pack_below;
        const auto ranks = static_cast<int>(test.tensors[0].layout->mesh().ranks().size());
        test.expect_steps_of_one_rank(ranks, 10, 2e-5, [](MeshCase::Rank& rank, World& world) {
          expect_parts(rank.muon->plan());
          expect_parts(rank.adamw->plan());
          int64_t matrices = 0;
          for (int64_t n : all_gather_number(*world.all(), rank.muon->newton_schulz().matrices()))
            matrices += n;
          EXPECT_EQ(matrices, 10 * (6 + 2 * 9));
        });
      }
}

TEST(MeshOptimizer, EachMatrixIsComputedOnce) {
  MeshCase test = all_layouts(4);
  test.add("frozen", {4, 4}, "[replicate, shard(0)] over 2x2").frozen = true;
  size_t expected = 0;
  for (const MeshCase::Tensor& tensor : test.tensors)
    if (!tensor.adamw && !tensor.frozen) expected += matrix_units(tensor.rule, tensor.initial.shape).size();
  launch(4, [&](World& world) {
    MeshCase::Rank rank = test.make(world);
    test.step(rank, world, 1);
    int64_t sum = 0;
    for (int64_t matrices : all_gather_number(*world.all(), rank.muon->newton_schulz().matrices()))
      sum += matrices;
    EXPECT_EQ(sum, static_cast<int64_t>(expected));
    EXPECT_EQ(rank.muon->counters().matrices, rank.muon->newton_schulz().matrices());
  });
}

TEST(MeshOptimizer, LeadingDimExpertsNeedNoGather) {
  MeshCase test;
  test.add("experts", {8, 4, 6}, "[replicate, shard(0)] over 2x4", {MatrixKind::kBatch, {}});
  OperationLog log;
  test.launched.decorate = logging(log);
  test.expect_steps_of_one_rank(
      8, 3, 2e-5, [](MeshCase::Rank& rank, World&) { EXPECT_EQ(rank.muon->counters().exchanged_bytes, 0); });
  for (const std::string& line : log.lines(0)) EXPECT_EQ(line.find("all-to-all"), line.npos) << line;
}

TEST(MeshOptimizer, MissingGradientsAreZerosAndFrozenParametersStay) {
  MeshCase test = all_layouts(4, 2);
  for (size_t i = 0; i < test.tensors.size(); i += 5) test.tensors[i].frozen = true;
  test.missing = [](const std::string& name, int step, int64_t) {
    return (name.back() + step) % 3 == 0;  // on all ranks alike
  };
  test.expect_steps_of_one_rank(4, 10);
}

/// What each group does is the same on all of its ranks.
void expect_equal_logs(const OperationLog& log, int ranks) {
  std::map<std::string, std::vector<std::vector<std::string>>> by_group;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::map<std::string, std::vector<std::string>> own;
    for (const std::string& line : log.lines(rank)) {
      const std::string group = line.substr(0, line.find(']'));
      std::string what = line.substr(group.size());
      // Every rank gives an all-to-all other bytes.
      if (what.find("all-to-all") != what.npos) what = "all-to-all";
      own[group].push_back(what);
    }
    for (auto& [group, lines] : own) by_group[group].push_back(std::move(lines));
  }
  EXPECT_GT(by_group.size(), 1u);
  for (const auto& [group, logs] : by_group)
    for (const auto& lines : logs) EXPECT_EQ(lines, logs[0]) << group;
}

TEST(MeshOptimizer, CollectivesAreTheSameWhateverIsOwnedOrMissing) {
  std::vector<std::vector<std::string>> logs;
  for (int kind = 0; kind < 3; ++kind) {
    MeshCase test = all_layouts(4, 3);
    if (kind == 1) test.missing = [](const std::string&, int, int64_t) { return true; };
    if (kind == 2)
      test.missing = [](const std::string& name, int step, int64_t rank) {
        return (name.back() + step + rank) % 2 == 0;  // here and not there
      };
    OperationLog log;
    test.launched.decorate = logging(log);
    launch(
        4,
        [&](World& world) {
          MeshCase::Rank rank = test.make(world);
          for (int step = 1; step <= 3; ++step) test.step(rank, world, step);
          rank.muon->require_equal_replicas();
          rank.adamw->require_equal_replicas();
        },
        test.launched);
    expect_equal_logs(log, 4);
    logs.push_back(log.lines(2));
    std::sort(logs.back().begin(), logs.back().end());  // broadcasts go on when something has landed
  }
  EXPECT_EQ(logs[0], logs[1]);
  EXPECT_EQ(logs[0], logs[2]);
}

TEST(MeshOptimizer, SixteenReplicasOnNodesOfSix) {
  MeshCase test;
  for (int i = 0; i < 6; ++i)
    test.add("t" + std::to_string(i), {6, 4 + i}, "[replicate] over 16").adamw = i == 5;
  test.launched.ranks_per_host = 6;
  OperationLog log;
  test.launched.decorate = logging(log);
  test.expect_steps_of_one_rank(16, 3, 2e-5, [](MeshCase::Rank& rank, World& world) {
    const MeshGroup& group = rank.muon->plan().groups[0];
    ASSERT_EQ(group.replica_groups.size(), 3u);
    EXPECT_EQ(group.replica_groups[2], (std::vector<size_t>{12, 13, 14, 15}));
    int64_t sum = 0;
    for (int64_t n : all_gather_number(*world.all(), rank.muon->counters().matrices)) sum += n;
    EXPECT_EQ(sum, 3 * 3 * 5);  // once a step in each replica group
  });
  for (int64_t rank = 0; rank < 16; ++rank)
    for (const std::string& line : log.lines(rank)) {
      const std::string group = line.substr(0, line.find(']'));
      if (line.find("broadcast") == line.npos || group.ends_with("14, 15") == group.starts_with("[0, 1"))
        continue;
      EXPECT_TRUE(group.find("5, 6") == group.npos && group.find("11, 12") == group.npos) << line;
    }
}

TEST(MeshOptimizer, PartsInReplicaGroupsOfUnequalSizes) {
  MeshCase test = large_tensors("[replicate] over 8");
  test.launched.ranks_per_host = 3;  // and a host of two
  test.expect_steps_of_one_rank(8, 4, 2e-5, [](MeshCase::Rank& rank, World&) {
    EXPECT_EQ(rank.muon->plan().assignments[0]->owners.size(), 3u);
    for (const MeshOwner& owner : rank.muon->plan().assignments[0]->owners) EXPECT_EQ(owner.rows.size(), 2u);
  });
}

TEST(MeshOptimizer, MeshesOfUnequalSizesOnUnequalHosts) {
  MeshCase test;
  test.launched.ranks_per_host = 4;  // and a host of two
  for (int i = 0; i < 3; ++i) {
    const std::string number = std::to_string(i);
    test.add("six" + number, {6, 4 + i}, "[replicate] over 6");
    test.add("hybrid" + number, {7, 4 + i}, "[shard(0), replicate] over 3x2").adamw = i == 2;
    test.add("five" + number, {5, 4 + i}, "[replicate] over 5 on [5, 0, 4, 2, 1]").adamw = i == 1;
    test.add("grid" + number, {4, 4 + i}, "[replicate, replicate] over 3x2 on [4, 1, 0, 5, 2, 3]");
  }
  test.expect_steps_of_one_rank(6, 4, 2e-5, [](MeshCase::Rank& rank, World&) {
    std::map<std::string, size_t> groups;
    for (const MeshGroup& group : rank.muon->plan().groups)
      groups[group.layout.text()] = group.replica_groups.size();
    EXPECT_EQ(groups.at("[replicate] over 6"), 2u);
    EXPECT_EQ(groups.at("[replicate] over 5 on [5, 0, 4, 2, 1]"), 2u);
    EXPECT_EQ(groups.at("[shard(0), replicate] over 3x2"), 1u);
    EXPECT_EQ(groups.at("[replicate, replicate] over 3x2 on [4, 1, 0, 5, 2, 3]"), 2u);
  });
}

TEST(MeshOptimizer, GivenNumbersOfReplicaGroups) {
  for (int64_t count : {1, 2, 3, 5}) {
    MeshCase test;
    test.launched.ranks_per_host = 2;
    test.options.replica_groups = count;
    for (int i = 0; i < 4; ++i) test.add("t" + std::to_string(i), {6, 4 + i}, "[replicate] over 5");
    test.expect_steps_of_one_rank(5, 3, 2e-5, [&](MeshCase::Rank& rank, World&) {
      EXPECT_EQ(std::ssize(rank.muon->plan().groups[0].replica_groups), count);
    });
  }
  MeshCase test;
  test.options.replica_groups = 6;
  test.add("t", {6, 4}, "[replicate] over 5");
  EXPECT_THROW(launch(5, [&](World& world) { test.make(world); }), InvalidArgumentError);
}

/// One rank's own optimizer after the steps, for what has to be the same to the bit.
std::map<std::string, Elements> one_rank(const MeshCase& test, int steps, const LocalOptions& options) {
  std::map<std::string, Elements> values, gradients;
  MuonGroup group{{}, test.muon};
  for (const MeshCase::Tensor& tensor : test.tensors) {
    Elements& value = values.emplace(tensor.name, tensor.initial).first->second;
    group.parameters.push_back({tensor.name, value.view(), {}, {}, false, tensor.rule});
  }
  Muon optimizer({std::move(group)}, options);
  for (int step = 1; step <= steps; ++step) {
    for (const MeshCase::Tensor& tensor : test.tensors) {
      Elements& gradient =
          gradients.insert_or_assign(tensor.name, MeshCase::gradient(tensor, step)).first->second;
      optimizer.set_gradient(tensor.name, gradient.view());
    }
    optimizer.step();
  }
  return values;
}

void expect_bits_of_one_rank(const MeshCase& test, int ranks, int steps) {
  const auto expected = one_rank(test, steps, test.options.local);
  launch(
      ranks,
      [&](World& world) {
        MeshCase::Rank rank = test.make(world);
        for (int step = 1; step <= steps; ++step) test.step(rank, world, step);
        for (const MeshCase::Tensor& tensor : test.tensors)
          EXPECT_EQ(rank.values.at(tensor.name).bytes,
                    shard_of(expected.at(tensor.name), *tensor.layout, world.rank()).bytes)
              << tensor.name << " on rank " << world.rank();
      },
      test.launched);
}

TEST(MeshOptimizer, NarrowParametersWithMastersHaveTheBitsOfOneRank) {
  for (bool masters : {false, true}) {
    MeshCase test;
    test.options.local.masters = masters;
    test.add("a", {8, 6}, "[replicate, shard(0)] over 2x2", {}, DType::kBFloat16);
    test.add("b", {6, 9}, "[shard(1), replicate] over 2x2", {}, DType::kBFloat16);
    test.add("c", {5, 7}, "[shard(0), shard(1)] over 2x2", {}, DType::kBFloat16);
    expect_bits_of_one_rank(test, 4, 6);
  }
}

TEST(MeshOptimizer, NorMuonHasTheBitsOfOneRank) {
  MeshCase test;
  test.muon.normuon = NorMuonOptions{};
  test.add("a", {8, 6}, "[replicate, shard(0)] over 2x2");
  test.add("b", {6, 9}, "[shard(1), replicate] over 2x2");
  test.add("experts", {4, 3, 5}, "[shard(0), replicate] over 2x2", {MatrixKind::kBatch, {}});
  test.add("mixed", {5, 4, 3}, "[shard(0), shard(2)] over 2x2", {MatrixKind::kBatch, {}});
  test.add("ragged", {3, 2, 4, 3}, "[ragged([0, 1], [2, 1]), replicate] over 2x2", {MatrixKind::kBatch, {}});
  test.add("qkv", {12, 9}, "[shard(0), shard(0)] over 2x2",
           {MatrixKind::kMatrix, interleaved_rows(2, {2, 2, 2})});
  expect_bits_of_one_rank(test, 4, 6);
}

TEST(MeshOptimizer, PartsHaveTheBitsOfOneRank) {
  for (const bool normuon : {false, true})
    for (const bool masters : {false, true}) {
      MeshCase test;
      test.options.local.masters = masters;
      if (normuon) test.muon.normuon = NorMuonOptions{};
      const MatrixRule experts{MatrixKind::kBatch, {}};
      test.add("a", {5, 4, 6}, "[replicate] over 4", experts, DType::kBFloat16);
      test.add("b", {3, 2, 4, 6}, "[replicate, shard(2)] over 2x2", experts, DType::kBFloat16);
      test.add("c", {8, 2, 5, 6}, "[strided(0, 2), replicate] over 2x2",
               {MatrixKind::kBatch, interleaved_rows(1, {2, 3})}, DType::kBFloat16);
      test.add("d", {9, 5, 6}, "[shard(0), replicate] over 2x2", experts, DType::kBFloat16);
      expect_bits_of_one_rank(test, 4, 6);
      launch(4, [&](World& world) { expect_parts(test.make(world).muon->plan()); });
    }
}

TEST(MeshOptimizer, MastersOfTheCallerReachTheReplicas) {
  for (const Dims& shape : {Dims{4, 6}, Dims{4, 2, 3}})  // owned by one row, and by two
    launch(2, [&](World& world) {
      Elements value(DType::kBFloat16, shape, random_values(24)),
          master(DType::kFloat32, shape, random_values(24)),
          gradient(DType::kFloat32, shape, random_values(24, 5));
      const MatrixRule rule{shape.size() == 2 ? MatrixKind::kMatrix : MatrixKind::kBatch, {}};
      MeshMuonGroup group{{{{"w", value.view(), gradient.view(), master.view(), false, rule},
                            shape,
                            std::make_shared<const Layout>(parse_layout("[replicate] over 2"))}},
                          {}};
      MeshMuon optimizer(world, {std::move(group)});
      optimizer.step();
      optimizer.require_equal_replicas();
      Elements rounded(DType::kBFloat16, shape, master.values());
      EXPECT_EQ(rounded.bytes, value.bytes);
      const std::vector<double> before = random_values(24), after = master.values();
      for (size_t i = 0; i < after.size(); ++i) EXPECT_NE(after[i], before[i]);
      EXPECT_EQ(optimizer.state().size(), optimizer.plan().has_state(0, world.rank()) ? 1u : 0u);
    });
}

TEST(MeshOptimizer, MastersOfTheCallerMayBeEmpty) {
  launch(2, [&](World& world) {  // rank 1 has nothing of it
    const Dims local{world.rank() == 0 ? 1 : 0, 4};
    const auto count = static_cast<size_t>(numel(local));
    Elements value(DType::kBFloat16, local, random_values(count)),
        master(DType::kFloat32, local, random_values(count)),
        gradient(DType::kFloat32, local, random_values(count, 5));
    const auto layout = std::make_shared<const Layout>(parse_layout("[shard(0)] over 2"));
    MeshAdamW optimizer(
        world, {{{{{"w", value.view(), gradient.view(), master.view(), false, {}}, {1, 4}, layout}}, {}}});
    optimizer.step();
    EXPECT_EQ(Elements(DType::kBFloat16, local, master.values()).bytes, value.bytes);
  });
}

TEST(MeshOptimizer, FreezingLaterIsRefused) {
  for (bool first : {false, true}) {
    MeshCase test;
    test.add("t", {6, 4}, "[replicate, shard(0)] over 2x2").frozen = first;
    test.add("u", {6, 4}, "[replicate, shard(0)] over 2x2");
    EXPECT_THROW(launch(4,
                        [&](World& world) {
                          MeshCase::Rank rank = test.make(world);
                          test.step(rank, world, 1);
                          for (OptimizerParameter* parameter : rank.optimizer->parameters())
                            if (parameter->name == "t") parameter->frozen = !first;
                          test.step(rank, world, 2);
                        }),
                 InvalidArgumentError);
  }
}

TEST(MeshOptimizer, TheHookSeesEachMatrixOnce) {
  MeshCase test;
  test.add("a", {8, 6}, "[replicate, shard(0)] over 2x2");
  test.add("b", {3, 6, 2}, "[shard(1), shard(0)] over 2x2", {MatrixKind::kBatch, {}});
  std::mutex mutex;
  std::map<std::string, int> seen;
  launch(4, [&](World& world) {
    MeshCase::Rank rank = test.make(world);
    rank.muon->set_update_hook(
        [&](const OptimizerParameter& parameter, const MatrixUnit& unit, const View& update) {
          std::lock_guard lock(mutex);
          ++seen[parameter.name + box_text(unit.boxes[0])];
          EXPECT_EQ(update.shape, (Dims{unit.rows, unit.columns}));
          std::memset(update.data, 0, static_cast<size_t>(update.bytes()));
        });
    test.step(rank, world, 1);
    for (const MeshCase::Tensor& tensor : test.tensors) {  // decay alone
      Elements expected = shard_of(tensor.initial, *tensor.layout, world.rank());
      std::vector<double> values = expected.values();
      for (double& value : values) value *= 1 - test.muon.lr * test.muon.weight_decay;
      EXPECT_LT(distance(rank.values.at(tensor.name).values(), values), 1e-6);
    }
  });
  EXPECT_EQ(seen.size(), 4u);
  for (const auto& [what, times] : seen) EXPECT_EQ(times, 1) << what;
}

TEST(MeshOptimizer, TiedParametersAreGivenOnce) {
  EXPECT_THROW(
      launch(2,
             [&](World& world) {
               Elements value(DType::kFloat32, {4, 6});
               const auto layout = std::make_shared<const Layout>(parse_layout("[replicate] over 2"));
               MeshAdamWGroup group;
               group.parameters.push_back({{"embed", value.view(), {}, {}, false, {}}, {4, 6}, layout});
               group.parameters.push_back({{"head", value.view(), {}, {}, false, {}}, {4, 6}, layout});
               MeshAdamW optimizer(world, {std::move(group)});
             }),
      InvalidArgumentError);
}

TEST(MeshOptimizer, LateRanksChangeNothing) {
  MeshCase test = all_layouts(4);
  test.options.batch_bytes = 300;
  test.launched.decorate = delaying(std::chrono::microseconds(0), std::chrono::microseconds(500), 7);
  test.expect_steps_of_one_rank(4, 3);
}

TEST(MeshOptimizer, AnyOperationMayFail) {
  for (int64_t number = 0; number < 6; ++number) {
    MeshCase test = all_layouts(4);
    test.options.batch_bytes = 300;
    test.launched.decorate = on_rank(
        2, where([](const GroupBackend& backend) { return backend.ranks().size() == 2; }, dying(number)));
    test.launched.timeout = std::chrono::seconds(20);
    EXPECT_THROW(launch(
                     4,
                     [&](World& world) {
                       MeshCase::Rank rank = test.make(world);
                       for (int step = 1; step <= 3; ++step) test.step(rank, world, step);
                     },
                     test.launched),
                 Error)
        << number;
  }
}

TEST(MeshOptimizer, WhatIsLostTimesOut) {
  MeshCase test;
  for (int i = 0; i < 4; ++i) test.add("t" + std::to_string(i), {6, 4}, "[replicate, shard(0)] over 2x2");
  test.launched.decorate =
      on_rank(1, where([](const GroupBackend& backend) { return backend.ranks().size() == 2; }, dropping(0)));
  test.launched.timeout = std::chrono::milliseconds(200);
  EXPECT_THROW(launch(
                   4,
                   [&](World& world) {
                     MeshCase::Rank rank = test.make(world);
                     test.step(rank, world, 1);
                   },
                   test.launched),
               Error);
}

TEST(MeshOptimizer, ParametersOfOneRankAlone) {
  launch(2, [&](World& world) {
    Elements alone(DType::kFloat32, {4, 6}, random_values(24, 7)),
        gradient(DType::kFloat32, {4, 6}, random_values(24, 8)), expected = alone;
    MeshMuonGroup group;
    if (world.rank() == 1)
      group.parameters.push_back({{"w", alone.view(), gradient.view(), {}, false, {}}, {}, {}});
    MeshMuon optimizer(world, {std::move(group)});
    optimizer.step();
    if (world.rank() == 0) return;
    Muon local({{{{"w", expected.view(), gradient.view(), {}, false, {}}}, {}}});
    local.step();
    EXPECT_EQ(alone.bytes, expected.bytes);
    int seen = 0;
    optimizer.set_update_hook([&](const OptimizerParameter&, const MatrixUnit&, const View& update) {
      ++seen;
      std::memset(update.data, 0, static_cast<size_t>(update.bytes()));
    });
    local.set_update_hook([&](const OptimizerParameter&, const MatrixUnit&, const View& update) {
      std::memset(update.data, 0, static_cast<size_t>(update.bytes()));
    });
    optimizer.step();
    local.step();
    EXPECT_EQ(seen, 1);
    EXPECT_EQ(alone.bytes, expected.bytes);
    EXPECT_EQ(optimizer.state().size(), 1u);
  });
}

TEST(MeshOptimizer, RanksListWhatTheyHave) {  // as the stages of a pipeline
  launch(4, [&](World& world) {
    const bool first = world.rank() < 2;
    const std::string name = first ? "first" : "second";
    Elements value(DType::kFloat32, {2, 6}, random_values(12)), gradient = value;
    MeshMuonGroup group{{{{name, value.view(), gradient.view(), {}, false, {}},
                          {4, 6},
                          std::make_shared<const Layout>(
                              parse_layout(first ? "[shard(0)] over 2" : "[shard(0)] over 2 on [2, 3]"))}},
                        {}};
    MeshMuon optimizer(world, {std::move(group)});
    for (int step = 0; step < 3; ++step) optimizer.step();
    EXPECT_EQ(optimizer.plan().tensors.size(), 2u);
    EXPECT_NE(optimizer.plan().text().find("\"second\""), std::string::npos);
    EXPECT_EQ(optimizer.plan().owned_text(world.rank()).find(first ? "second" : "first"), std::string::npos);
  });
}

TEST(MeshOptimizer, Refusals) {
  auto make = [](const std::string& layout, Dims shape, Dims local, int64_t only_on = -1) {
    launch(2, [&](World& world) {
      Elements value(DType::kFloat32, local);
      MeshMuonGroup group;
      if (only_on < 0 || world.rank() == only_on)
        group.parameters.push_back({{"w", value.view(), {}, {}, false, {}},
                                    shape,
                                    std::make_shared<const Layout>(parse_layout(layout))});
      MeshMuon optimizer(world, {std::move(group)});
    });
  };
  EXPECT_NO_THROW(make("[shard(0)] over 2", {4, 4}, {2, 4}));
  EXPECT_THROW(make("[partial(sum)] over 2", {4, 4}, {4, 4}), InvalidArgumentError);
  EXPECT_THROW(make("[shard(0)] over 2", {4, 4}, {4, 4}), InvalidArgumentError);
  EXPECT_THROW(make("[shard(0)] over 2", {4, 4, 4}, {2, 4, 4}), InvalidArgumentError);  // no matrix
  EXPECT_THROW(make("[replicate] over 2", {4, 4}, {4, 4}, 1), InvalidArgumentError);  // not listed by rank 0
}

TEST(MeshOptimizer, AnErrorOnOneRankIsEverybodys) {
  MeshCase test;
  for (int i = 0; i < 4; ++i) test.add("t" + std::to_string(i), {6, 4}, "[replicate, shard(0)] over 2x2");
  test.options.batch_bytes = 1;
  try {
    launch(4, [&](World& world) {
      MeshCase::Rank rank = test.make(world);
      rank.muon->set_update_hook([&](const OptimizerParameter& parameter, const MatrixUnit&, const View&) {
        if (parameter.name == "t2") throw IoError("the hook fails");
      });
      EXPECT_THROW(test.step(rank, world, 1), Error);
      throw CancelledError("over");
    });
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("over"), std::string::npos);
  }
}

TEST(MeshOptimizer, ReplicasThatDifferAreNamed) {
  MeshCase test;
  test.add("t", {6, 4}, "[replicate, shard(0)] over 2x2");
  EXPECT_THROW(launch(4,
                      [&](World& world) {
                        MeshCase::Rank rank = test.make(world);
                        test.step(rank, world, 1);
                        rank.muon->require_equal_replicas();
                        if (world.rank() == 3) rank.values.at("t").bytes[0] ^= std::byte{1};
                        rank.muon->require_equal_replicas();
                      }),
               MismatchError);
}

TEST(MeshOptimizer, BytesAreThoseOfTheFormula) {
  MeshCase test;
  for (int i = 0; i < 16; ++i) test.add("t" + std::to_string(i), {64, 128}, "[replicate, shard(0)] over 2x4");
  launch(8, [&](World& world) {
    MeshCase::Rank rank = test.make(world);
    test.step(rank, world, 1);
    const double elements = 16 * 64 * 128, rows = 2, shards = 4;
    // What all ranks send, a rank in the mean: 2 W (S-1) / (R S^2) within rows, (R-1)/R W/S to replicas.
    double exchanged = 0, received = 0;
    for (int64_t n : all_gather_number(*world.all(), rank.muon->counters().exchanged_bytes))
      exchanged += static_cast<double>(n) / 8;
    for (int64_t n : all_gather_number(*world.all(), rank.muon->counters().received_bytes))
      received += static_cast<double>(n) / 8;
    EXPECT_NEAR(exchanged / (4 * 2 * elements * (shards - 1) / (rows * shards * shards)), 1, .05);
    EXPECT_NEAR(received / (4 * (rows - 1) / rows * elements / shards), 1, .05);
  });
}

}  // namespace
}  // namespace spolia
