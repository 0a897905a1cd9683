#include "spolia/optim/mesh_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/layout_text.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

using Groups = std::vector<std::vector<size_t>>;

std::vector<std::vector<int64_t>> single_rows(int64_t ranks) {
  std::vector<std::vector<int64_t>> rows;
  for (int64_t rank = 0; rank < ranks; ++rank) rows.push_back({rank});
  return rows;
}
std::vector<int64_t> hosts_of(int64_t ranks, int64_t on_each) {
  std::vector<int64_t> hosts;
  for (int64_t rank = 0; rank < ranks; ++rank) hosts.push_back(rank / on_each);
  return hosts;
}
std::vector<size_t> sizes_of(const Groups& groups) {
  std::vector<size_t> sizes;
  for (const auto& group : groups) sizes.push_back(group.size());
  return sizes;
}

MeshTensor matrix(std::string name, Dims shape, std::string_view layout, MatrixRule rule = {}) {
  MeshTensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.layout = std::make_shared<const Layout>(parse_layout(layout));
  tensor.matrices = std::move(rule);
  return tensor;
}
MeshTensor elements(std::string name, Dims shape, std::string_view layout) {
  MeshTensor tensor = matrix(std::move(name), std::move(shape), layout);
  tensor.matrices.reset();
  return tensor;
}

TEST(SplitReplicas, AtHosts) {
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts_of(16, 6), 0)), (std::vector<size_t>{6, 6, 4}));
  // No more replicas than a host has ranks: one group, wherever they are.
  EXPECT_EQ(split_replicas(single_rows(4), {}, 0).size(), 1u);
  EXPECT_EQ(split_replicas(std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}, hosts_of(4, 2), 0).size(), 1u);
  // Ranks of a host need not be consecutive.
  const std::vector<int64_t> round_robin{0, 1, 0, 1, 0, 1};
  EXPECT_EQ(split_replicas(single_rows(6), round_robin, 0), (Groups{{0, 2, 4}, {1, 3, 5}}));
  // Rows that lie over several hosts go together where they lie alike.
  const std::vector<std::vector<int64_t>> rows{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 9}};
  EXPECT_EQ(split_replicas(rows, std::vector<int64_t>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2}, 2),
            (Groups{{0, 1, 2, 3}, {4}}));
}

TEST(SplitReplicas, GivenNumbers) {
  const auto hosts = hosts_of(16, 6);
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts, 1)), (std::vector<size_t>{16}));
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts, 2)), (std::vector<size_t>{12, 4}));
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts, 3)), (std::vector<size_t>{6, 6, 4}));
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts, 5)), (std::vector<size_t>{3, 3, 3, 3, 4}));
  EXPECT_EQ(sizes_of(split_replicas(single_rows(16), hosts, 16)), std::vector<size_t>(16, 1));
  EXPECT_EQ(sizes_of(split_replicas(single_rows(7), {}, 3)), (std::vector<size_t>{2, 2, 3}));
  EXPECT_EQ(split_replicas(single_rows(1), {}, 4).size(), 1u);  // nothing to split
  EXPECT_THROW(split_replicas(single_rows(4), {}, 5), InvalidArgumentError);
  EXPECT_THROW(split_replicas(single_rows(4), {}, -1), InvalidArgumentError);
}

TEST(MeshPlan, MatrixUnits) {
  const auto one = matrix_units({}, Dims{3, 4});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].boxes, std::vector<Box>{whole(Dims{3, 4})});
  EXPECT_EQ(one[0].work, newton_schulz_work(3, 4));
  const auto experts = matrix_units({MatrixKind::kBatch, stacked_rows({1, 0, 2})}, Dims{2, 2, 3, 5});
  ASSERT_EQ(experts.size(), 8u);
  EXPECT_EQ(experts[5].boxes, (std::vector<Box>{{{1, 0, 1, 0}, {1, 1, 2, 5}}}));
  EXPECT_EQ(experts[5].moment_rows, (RowPart{{7, 9}}));
  const auto convolution = matrix_units({MatrixKind::kConvolution, {}}, Dims{4, 3, 2, 2});
  ASSERT_EQ(convolution.size(), 1u);
  EXPECT_EQ(convolution[0].columns, 12);
  EXPECT_TRUE(matrix_units({}, Dims{0, 4}).empty());
}

RC_GTEST_PROP(MeshPlan, PiecesOfARowMakeEachMatrixOnce, ()) {
  const int64_t rows = pick(1, 9), columns = pick(1, 7), batch = pick(1, 4), ranks = pick(1, 5);
  static const std::vector<std::string> kPlacements{"shard(0)",           "shard(1)",      "shard(2)",
                                                    "shard(1, balanced)", "strided(1, 2)", "strided(2, 3)"};
  auto placement = [&] { return kPlacements[static_cast<size_t>(pick(0, std::ssize(kPlacements)))]; };
  const Layout layout =
      parse_layout("[" + placement() + ", " + placement() + "] over " + std::to_string(ranks) + "x2");
  MatrixRule rule{MatrixKind::kBatch, {}};
  if (const int64_t cut = pick(0, rows + 1); pick(0, 2)) {
    rule.parts = {{{0, cut / 2}, {cut, rows}}, {{cut / 2, cut}}};
  }
  const Dims shape{batch, rows, columns};
  std::map<int64_t, int> seen;  // elements of the whole
  for (const MatrixUnit& unit : matrix_units(rule, shape)) {
    // What each element of the matrix is, from its boxes.
    std::vector<int64_t> wanted;
    for (const Box& box : unit.boxes)
      for (int64_t i = 0; i < box.sizes[1]; ++i)
        for (int64_t j = 0; j < columns; ++j)
          wanted.push_back((box.offsets[0] * rows + box.offsets[1] + i) * columns + j);
    RC_ASSERT(std::ssize(wanted) == unit.rows * unit.columns);
    std::vector<int64_t> found(wanted.size(), -1);
    for (int64_t rank = 0; rank < 2 * ranks; ++rank) {
      const RankShard shard = layout.shard(shape, rank);
      std::map<int64_t, int64_t> held;  // local offset to element
      for (const LocalBox& box : shard.boxes)
        for (int64_t i = 0; i < box.global.numel(); ++i) {
          const Dims strides = row_major_strides(box.global.sizes);
          int64_t local = box.local_offset, global = 0;
          for (size_t d = 0; d < 3; ++d) {
            const int64_t at = i / strides[d] % box.global.sizes[d];
            local += at * box.local_strides[d];
            global = global * shape[d] + box.global.offsets[d] + at;
          }
          held[local] = global;
        }
      for (const UnitPiece& piece : unit_pieces(unit, shard)) {
        const Dims strides = row_major_strides(piece.sizes);
        for (int64_t i = 0; i < numel(piece.sizes); ++i) {
          int64_t local = piece.local_offset, at = piece.unit_offset;
          for (size_t d = 0; d < 3; ++d) {
            local += i / strides[d] % piece.sizes[d] * piece.local_strides[d];
            at += i / strides[d] % piece.sizes[d] * piece.unit_strides[d];
          }
          int64_t& element = found.at(static_cast<size_t>(at));
          RC_ASSERT(element == -1);
          element = held.at(local);
        }
      }
    }
    RC_ASSERT(found == wanted);
    for (int64_t element : wanted) ++seen[element];
  }
  RC_ASSERT(std::ssize(seen) == batch * rows * columns);
}

/// The matrices of a transformer.
std::vector<MeshTensor> transformer(int layers, std::string_view layout) {
  std::vector<MeshTensor> tensors;
  for (int i = 0; i < layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    tensors.push_back(matrix(prefix + "q", {256, 256}, layout));
    tensors.push_back(matrix(prefix + "k", {64, 256}, layout));
    tensors.push_back(matrix(prefix + "v", {64, 256}, layout));
    tensors.push_back(matrix(prefix + "o", {256, 256}, layout));
    tensors.push_back(
        matrix(prefix + "gate_up", {1024, 256}, layout, {MatrixKind::kMatrix, stacked_rows({512, 512})}));
    tensors.push_back(matrix(prefix + "down", {256, 512}, layout));
  }
  return tensors;
}

void expect_even(const MeshPlan& plan, double most) {
  const double mean = static_cast<double>(std::accumulate(plan.loads.begin(), plan.loads.end(), int64_t{0})) /
                      static_cast<double>(plan.loads.size());
  EXPECT_LE(static_cast<double>(*std::max_element(plan.loads.begin(), plan.loads.end())), most * mean)
      << plan.text();
}

TEST(MeshPlan, WorkIsEvenWhateverTheBatches) {
  for (const char* layout : {"[replicate] over 2", "[replicate] over 4", "[replicate] over 8",
                             "[shard(0)] over 8", "[replicate, shard(0)] over 2x4",
                             "[shard(1), replicate] over 4x2", "[replicate, replicate, shard(0)] over 2x2x2"})
    for (int64_t batch_bytes : {int64_t{1}, int64_t{1} << 20, int64_t{1} << 30})
      expect_even(plan_mesh(transformer(12, layout), {.batch_bytes = batch_bytes, .hosts = {}}), 1.1);
}

TEST(MeshPlan, MatricesOfExpertsAreSpreadOverTheRow) {
  std::vector<MeshTensor> tensors;
  for (int i = 0; i < 4; ++i)
    tensors.push_back(
        matrix("experts" + std::to_string(i), {16, 32, 64}, "[shard(1)] over 4", {MatrixKind::kBatch, {}}));
  const MeshPlan plan = plan_mesh(tensors);
  expect_even(plan, 1);
  EXPECT_EQ(plan.loads, std::vector<int64_t>(4, 16 * newton_schulz_work(32, 64)));
  EXPECT_TRUE(plan.groups[0].batches[0].exchanges);
  // Those that a rank has whole stay there.
  const MeshPlan local =
      plan_mesh({matrix("experts", {8, 32, 64}, "[shard(0)] over 4", {MatrixKind::kBatch, {}})});
  EXPECT_EQ(local.assignments[0]->owners[0].units, (std::vector<int64_t>{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_FALSE(local.groups[0].batches[0].exchanges);
}

const MatrixRule kExperts{MatrixKind::kBatch, {}};

TEST(MeshPlan, LargeTensorsAreSpreadOverTheReplicas) {
  for (const char* layout :
       {"[replicate] over 8", "[replicate, shard(0)] over 4x2", "[shard(1), replicate] over 2x4",
        "[replicate, shard(0), replicate] over 2x2x2", "[replicate, strided(0, 2)] over 4x2",
        "[shard(0), shard(2), replicate] over 2x2x2", "[ragged([0], [1, 1]), replicate] over 2x4"}) {
    const MeshPlan plan = plan_mesh({matrix("experts", {32, 16, 24}, layout, kExperts)});
    expect_even(plan, 1);
    EXPECT_GT(plan.assignments[0]->owners[0].rows.size(), 1u) << plan.text();
    if (std::string_view(layout).find("shard(2)") != std::string_view::npos) continue;
    // One layer's: its experts, and what else it has.
    std::vector<MeshTensor> tensors = transformer(1, layout);
    for (const char* name : {"gate", "up", "down"})
      tensors.push_back(matrix(name, {64, 128, 256}, layout, kExperts));
    expect_even(plan_mesh(tensors), 1.1);
  }
  // Parts fill up what is uneven, to the nearest matrix.
  std::vector<MeshTensor> uneven{matrix("w", {64, 64}, "[replicate] over 2"),
                                 matrix("experts", {10, 32, 64}, "[replicate] over 2", kExperts)};
  const MeshPlan filled = plan_mesh(uneven);
  expect_even(filled, 1.01);
  EXPECT_EQ(filled.assignments[1]->cut.shares, (std::vector<int64_t>{8, 2}));
  EXPECT_EQ(*filled.state_layout(1), parse_layout(filled.assignments[1]->owners[0].rows[0] == 0
                                                      ? "[ragged([0], [8, 2])] over 2"
                                                      : "[ragged([0], [8, 2])] over 2 on [1, 0]"));
  // Elements too; and what cannot be cut is not.
  EXPECT_EQ(plan_mesh({elements("embed", {64, 8}, "[replicate] over 4")}).loads,
            std::vector<int64_t>(4, 128));
  MeshTensor moments = matrix("normuon", {8, 4, 4}, "[shard(0), replicate, shard(1)] over 2x2x2", kExperts);
  moments.row_moments = true;
  for (const MeshTensor& tensor :
       {matrix("w", {64, 64}, "[replicate] over 4"), elements("scalar", {}, "[replicate] over 4"),
        matrix("ragged", {4, 4, 4}, "[ragged([0, 1], [3, 1]), replicate] over 2x2", kExperts), moments})
    EXPECT_EQ(plan_mesh({tensor}).assignments[0]->owners[0].rows.size(), 1u) << tensor.name;
}

RC_GTEST_PROP(MeshPlan, PartsOfLargeTensorsAreExact, ()) {
  // Each element is owned once in a replica group, and each matrix lies in the shards of one row.
  static const std::vector<std::string> kPlacements{"replicate",
                                                    "shard(0)",
                                                    "shard(1)",
                                                    "shard(2)",
                                                    "strided(0, 2)",
                                                    "shard(0, balanced)",
                                                    "strided(1, 3, chunked)"};
  auto placement = [&] { return kPlacements[static_cast<size_t>(pick(0, std::ssize(kPlacements)))]; };
  const int64_t rows = pick(1, 6), others = pick(1, 4);
  const std::string layout = "[" + placement() + ", replicate, " + placement() + "] over 2x" +
                             std::to_string(rows) + "x" + std::to_string(others);
  const Dims shape{pick(1, 9), pick(1, 5), pick(1, 5)};
  const MeshPlan plan = plan_mesh({matrix("w", shape, layout, kExperts)},
                                  {.hosts = hosts_of(2 * rows * others, pick(1, 7)),
                                   .replica_groups = pick(0, 2) ? 0 : pick(1, rows + 1)});
  const MeshPlan::Assignment& assignment = *plan.assignments[0];
  const MeshGroup& group = plan.groups[0];
  const auto state = plan.state_layout(0);
  const std::vector<MatrixUnit> units = matrix_units(kExperts, shape);
  for (size_t g = 0; g < assignment.owners.size(); ++g) {
    const MeshOwner& owner = assignment.owners[g];
    std::vector<int> seen(static_cast<size_t>(numel(shape)));
    const Dims strides = row_major_strides(shape);
    for (size_t row : owner.rows) {
      RC_ASSERT(std::count(group.replica_groups[g].begin(), group.replica_groups[g].end(), row) == 1);
      for (int64_t rank : group.rows[row]) {
        const RankShard own = state->shard(shape, rank), whole = group.layout.shard(shape, rank);
        // A part of the parameter's own shard.
        RC_ASSERT(plan.owned_part(0, rank)->shape_of(whole.local_shape) == own.local_shape);
        for (const LocalBox& box : own.boxes)
          for (int64_t i = 0; i < box.global.numel(); ++i) {
            const Dims in_box = row_major_strides(box.global.sizes);
            int64_t at = 0;
            for (size_t d = 0; d < 3; ++d)
              at += (box.global.offsets[d] + i / in_box[d] % box.global.sizes[d]) * strides[d];
            ++seen[static_cast<size_t>(at)];
          }
        for (size_t u = 0; u < units.size(); ++u)
          if (!unit_pieces(units[u], own).empty()) {
            const auto& ranks = group.rows[row];
            RC_ASSERT(std::count(ranks.begin(), ranks.end(), owner.units[u]) == 1);
          }
      }
    }
    RC_ASSERT(std::count(seen.begin(), seen.end(), 1) == std::ssize(seen));
  }
}

TEST(MeshPlan, LoadsAreKeptOverBatchesAndMeshes) {
  std::vector<MeshTensor> tensors;
  for (int i = 0; i < 8; ++i)
    tensors.push_back(matrix("a" + std::to_string(i), {8, 8}, "[replicate] over 4"));
  tensors.push_back(matrix("b", {16, 16}, "[replicate] over 2 on [1, 3]"));
  const MeshPlan plan = plan_mesh(tensors, {.batch_bytes = 1, .hosts = {}});
  // The largest first, by rank 1; the others have all but its share.
  EXPECT_EQ(plan.loads[1], newton_schulz_work(16, 16));
  EXPECT_EQ(*std::max_element(plan.loads.begin(), plan.loads.end()), plan.loads[1]);
  std::set<size_t> rows;
  for (int i = 0; i < 4; ++i) rows.insert(plan.assignments[static_cast<size_t>(i)]->owners[0].rows[0]);
  EXPECT_EQ(rows.size(), 3u);
}

TEST(MeshPlan, TiesTakeTurns) {
  std::vector<MeshTensor> tensors;
  for (int i = 0; i < 8; ++i)
    tensors.push_back(matrix("empty" + std::to_string(i), {0, 8}, "[replicate] over 4"));
  const MeshPlan plan = plan_mesh(tensors);
  std::map<size_t, int> by_row;
  for (const auto& assignment : plan.assignments) ++by_row[assignment->owners[0].rows[0]];
  EXPECT_EQ(by_row, (std::map<size_t, int>{{0, 2}, {1, 2}, {2, 2}, {3, 2}}));
}

TEST(MeshPlan, GroupsAreByMeshAndLayout) {
  MeshTensor frozen = matrix("frozen", {4, 4}, "[shard(0)] over 2");
  frozen.frozen = true;
  const MeshPlan plan =
      plan_mesh({matrix("a", {4, 4}, "[shard(0)] over 2"), matrix("b", {6, 6}, "[shard(-2)] over 2"),
                 matrix("c", {4, 4}, "[shard(1)] over 2"), elements("d", {4}, "[shard(0)] over 2"),
                 matrix("e", {4, 4}, "[shard(0)] over 2 on [1, 0]"), frozen});
  ASSERT_EQ(plan.groups.size(), 3u);
  EXPECT_EQ(plan.groups[0].batches[0].tensors, (std::vector<size_t>{1, 0, 3}));
  EXPECT_FALSE(plan.assignments[5].has_value());
  EXPECT_EQ(plan.owner_for(5, 0), nullptr);
  EXPECT_EQ(plan.owner_for(0, 7), nullptr);
  EXPECT_FALSE(plan.has_state(0, 7));
  EXPECT_TRUE(plan.has_state(0, 1));
}

TEST(MeshPlan, StateLayouts) {
  const MeshPlan plan = plan_mesh({matrix("hybrid", {8, 4}, "[replicate, shard(0)] over 2x2 on [3, 5, 0, 1]"),
                                   matrix("copies", {4, 4}, "[replicate] over 5")},
                                  {.hosts = hosts_of(6, 3)});
  EXPECT_EQ(*plan.state_layout(0),
            parse_layout(plan.assignments[0]->owners[0].rows[0] == 0 ? "[shard(0)] over 2 on [3, 5]"
                                                                     : "[shard(0)] over 2"));
  // Five replicas on hosts of three and two: an owner on each.
  ASSERT_EQ(plan.assignments[1]->owners.size(), 2u);
  const auto layout = plan.state_layout(1);
  EXPECT_EQ(layout->mesh().shape(), (Dims{2}));
  EXPECT_LT(layout->mesh().ranks()[0], 3);
  EXPECT_GE(layout->mesh().ranks()[1], 3);
  EXPECT_EQ(*plan_mesh({matrix("copies", {4, 4}, "[replicate] over 2 on [4, 5]")}).state_layout(0),
            parse_layout("[] over 0-d on [4]"));
}

TEST(MeshPlan, Text) {
  const MeshPlan plan = plan_mesh({matrix("w", {8, 4}, "[replicate, shard(0)] over 2x2"),
                                   matrix("v", {8, 4}, "[replicate, shard(-2)] over 2x2"),
                                   elements("norm", {4}, "[replicate, replicate] over 2x2")});
  EXPECT_EQ(plan.text(), R"(group 0: [replicate, shard(0)] over 2x2
  row 0 at [0]: ranks [0, 1]
  row 1 at [1]: ranks [2, 3]
  batch 0: 128 B, gathered within rows
    "w" float32 8x4: row 0 at [0], matrices on [0]
    "v" float32 8x4: row 1 at [1], matrices on [2]
group 1: [replicate, replicate] over 2x2
  row 0 at [0, 0]: ranks [0]
  row 1 at [0, 1]: ranks [1]
  row 2 at [1, 0]: ranks [2]
  row 3 at [1, 1]: ranks [3]
  batch 0: 16 B
    "norm" float32 4: row 3 at [1, 1]
loads: [1664, 0, 1664, 4]
)");
  EXPECT_EQ(plan.owned_text(0), "\"w\": row 0, 1 of 1 matrices\n");
  EXPECT_EQ(plan.owned_text(3), "\"v\": row 1, 0 of 1 matrices\n\"norm\": row 3\n");
}

TEST(MeshPlan, Json) {
  MeshTensor frozen = matrix("frozen", {4, 4}, "[shard(0)] over 2");
  frozen.frozen = true;
  const MeshPlan plan = plan_mesh({matrix("experts", {4, 2, 2}, "[replicate, shard(0)] over 2x2", kExperts),
                                   matrix("w", {4, 1}, "[replicate, shard(0)] over 2x2"), frozen});
  EXPECT_EQ(plan.json(), nlohmann::ordered_json::parse(R"({
    "all": {
      "experts": {"dtype": "float32", "shape": [4, 2, 2], "group": 1, "batch": 0,
                  "owners": [{"rows": [1, 0], "coordinates": [[1], [0]], "matrices": [2, 0, 3, 1]}]},
      "w": {"dtype": "float32", "shape": [4, 1], "group": 1, "batch": 0,
            "owners": [{"rows": [0], "coordinates": [[0]], "matrices": [0]}]},
      "frozen": {"dtype": "float32", "shape": [4, 4]}},
    "owned": {"0": ["experts", "w"], "1": ["experts", "w"], "2": ["experts"], "3": ["experts"]},
    "groups": [
      {"layout": "[shard(0)] over 2", "rows": [{"coordinates": [], "ranks": [0, 1]}], "replica_groups": [[0]],
       "batches": []},
      {"layout": "[replicate, shard(0)] over 2x2",
       "rows": [{"coordinates": [0], "ranks": [0, 1]}, {"coordinates": [1], "ranks": [2, 3]}],
       "replica_groups": [[0, 1]],
       "batches": [{"bytes": 24, "exchanges": true, "tensors": ["experts", "w"]}]}],
    "loads": [198, 160, 160, 160]})"));
  EXPECT_NE(
      plan.text().find("\"experts\" float32 4x2x2: row 1 at [1] and row 0 at [0], matrices on [2, 0, 3, 1]"),
      std::string::npos)
      << plan.text();
  EXPECT_EQ(plan.owned_text(3), "\"experts\": row 1, part 0 of 2, 1 of 4 matrices\n");
}

TEST(MeshPlan, Refusals) {
  EXPECT_THROW(plan_mesh({matrix("w", {4, 4}, "[partial(sum)] over 2")}), InvalidArgumentError);
  EXPECT_THROW(plan_mesh({matrix("w", {4, 4, 4}, "[replicate] over 2")}), InvalidArgumentError);
  EXPECT_THROW(plan_mesh({matrix("w", {4, 4}, "[shard(2)] over 2")}), InvalidArgumentError);
  EXPECT_THROW(
      plan_mesh({matrix("w", {4, 4}, "[replicate] over 2"), matrix("w", {4, 4}, "[replicate] over 2")}),
      InvalidArgumentError);
  EXPECT_THROW(plan_mesh({}, {.batch_bytes = 0, .hosts = {}}), InvalidArgumentError);
  try {
    plan_mesh({matrix("layers.w", {4, 4}, "[replicate] over 2")}, {.hosts = {}, .replica_groups = 3});
    ADD_FAILURE();
  } catch (const InvalidArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("layers.w"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("2 replicas cannot be split into 3 groups"), std::string::npos);
  }
}

}  // namespace
}  // namespace spolia
