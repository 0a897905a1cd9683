#include "spolia/optim/mesh_state.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/save.h"
#include "spolia/comm/exchange.h"
#include "spolia/optim/testing_mesh.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

/// A mesh for the small model: of matrices, and of what AdamW takes.
struct Mesh {
  int ranks;
  std::string matrices, others;
};

const std::vector<Mesh> kMeshes{
    {1, "[] over 0-d", "[] over 0-d"},
    {4, "[replicate, shard(0)] over 2x2", "[replicate, shard(0)] over 2x2"},
    {3, "[shard(1)] over 3", "[shard(0)] over 3"},
    {4, "[replicate] over 4", "[replicate] over 4"},
    {6, "[shard(0), replicate] over 3x2", "[replicate] over 6"},
    {4, "[shard(0), shard(0)] over 2x2", "[shard(0)] over 2 on [3, 1]"},
    {3, "[ragged([0], [3, 0, 1])] over 3", "[replicate] over 2 on [2, 0]"},
};

MeshCase model_on(const Mesh& mesh) {
  MeshCase test;
  test.add("layers.0.w", {8, 6}, mesh.matrices);
  test.add("layers.1.w", {4, 10}, mesh.matrices);
  test.add("layers.2.w", {12, 4}, mesh.matrices, {MatrixKind::kMatrix, stacked_rows({6, 3, 3})});
  test.add("embed", {7, 4}, mesh.others).adamw = true;
  test.add("norm", {5}, mesh.others).adamw = true;
  return test;
}

/// Parameters that several rows own, where there are replicas.
MeshCase large_model_on(const Mesh& mesh) {
  MeshCase test;
  test.add("experts", {8, 3, 5}, mesh.matrices, {MatrixKind::kBatch, {}});
  test.add("embed", {7, 4}, mesh.others).adamw = true;
  return test;
}

StateDict checkpoint_of(const MeshCase& test, MeshCase::Rank& rank, StateForm form) {
  StateDict state;
  for (const MeshCase::Tensor& tensor : test.tensors)
    state.add("model." + tensor.name,
              sharded_tensor(rank.values.at(tensor.name).view(), tensor.initial.shape, tensor.layout));
  state.add("optimizer", rank.optimizer->state_dict(form));
  return state;
}

void load_checkpoint(World& world, const std::shared_ptr<const Store>& store, const fs::path& path,
                     const MeshCase& test, MeshCase::Rank& rank) {
  const auto source = open_source(store, path);
  StateDict state;
  for (const MeshCase::Tensor& tensor : test.tensors)
    state.add("model." + tensor.name,
              sharded_tensor(rank.values.at(tensor.name).view(), tensor.initial.shape, tensor.layout));
  load(world, *source, state);
  const LoadReport report = load_optimizer(world, *source, *rank.optimizer, {.key = "optimizer"});
  EXPECT_TRUE(report.missing.empty()) << report.missing[0];
  EXPECT_TRUE(report.unexpected.empty()) << report.unexpected[0];
}

void resume_everywhere(MeshCase (*model)(const Mesh&), const std::vector<std::pair<size_t, size_t>>& pairs) {
  size_t number = 0;
  for (const auto& [from, to] : pairs) {
    SCOPED_TRACE(kMeshes[from].matrices + " to " + kMeshes[to].matrices);
    const auto store = std::make_shared<MemoryStore>();
    const MeshCase before = model(kMeshes[from]), after = model(kMeshes[to]);
    const StateForm form = number % 2 == 0 ? StateForm::kFlattened : StateForm::kNested;
    const TargetFormat format = number++ % 3 == 0 ? TargetFormat::kDcp : TargetFormat::kSpolia;
    const auto expected = before.reference(6);
    std::mutex mutex;
    std::map<std::string, std::map<int64_t, Elements>> unbroken;
    launch(kMeshes[from].ranks, [&](World& world) {
      MeshCase::Rank rank = before.make(world);
      for (int step = 1; step <= 3; ++step) before.step(rank, world, step);
      save(*world.all(), checkpoint_of(before, rank, form), *store, "saved", {.to = format});
      for (int step = 4; step <= 6; ++step) before.step(rank, world, step);
      std::lock_guard lock(mutex);
      for (const auto& [name, value] : rank.values) unbroken[name].emplace(world.rank(), value);
    });
    launch(kMeshes[to].ranks, [&](World& world) {
      MeshCase::Rank rank = after.make(world);
      load_checkpoint(world, store, "saved", after, rank);
      EXPECT_EQ(rank.adamw->steps(), rank.values.at("embed").bytes.empty() && rank.adamw->steps().empty()
                                         ? std::vector<int64_t>{}
                                         : std::vector<int64_t>{3});
      for (int step = 4; step <= 6; ++step) after.step(rank, world, step);
      rank.muon->require_equal_replicas();
      rank.adamw->require_equal_replicas();
      std::lock_guard lock(mutex);
      for (const MeshCase::Tensor& tensor : after.tensors) {
        const Elements& local = rank.values.at(tensor.name);
        const Elements wanted =
            shard_of(Elements(DType::kFloat64, tensor.initial.shape, expected.at(tensor.name)),
                     *tensor.layout, world.rank());
        EXPECT_LT(distance(local.values(), wanted.values()), 2e-5)
            << tensor.name << " on rank " << world.rank();
        if (from == to) {
          EXPECT_EQ(local.bytes, unbroken.at(tensor.name).at(world.rank()).bytes) << tensor.name;
        }
      }
    });
  }
}

TEST(MeshState, ResumesOnOtherMeshes) {
  resume_everywhere(model_on, {{1, 1}, {0, 1}, {1, 0}, {1, 2}, {3, 4}, {4, 5}, {5, 6}, {6, 3}});
  resume_everywhere(large_model_on, {{1, 1}, {3, 3}, {1, 3}, {3, 4}, {4, 2}, {5, 4}, {6, 1}, {4, 0}});
}

TEST(MeshState, ResumesOnOtherMeshesSlow) {
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t from = 0; from < kMeshes.size(); ++from)
    for (size_t to = 0; to < kMeshes.size(); ++to) pairs.emplace_back(from, to);
  resume_everywhere(model_on, pairs);
  resume_everywhere(large_model_on, pairs);
}

/// The digests of all tensors of a checkpoint.
std::map<std::string, std::string> digests_of(const std::shared_ptr<const Store>& store,
                                              const fs::path& path) {
  const auto source = open_source(store, path);
  const std::vector<std::string> digests = digest_tensors(*source, {});
  std::map<std::string, std::string> all;
  for (size_t i = 0; i < digests.size(); ++i) all[source->catalog().tensors[i].name] = digests[i];
  return all;
}

TEST(MeshState, OwnersHoldEachPieceOnceAndReplicasOnlyWhenMaterialised) {
  const auto store = std::make_shared<MemoryStore>();
  for (auto [mesh, large] : std::vector<std::pair<size_t, bool>>{
           {1, false}, {3, false}, {4, false}, {1, true}, {3, true}, {4, true}}) {
    const MeshCase test = large ? large_model_on(kMeshes[mesh]) : model_on(kMeshes[mesh]);
    const std::string folder = std::to_string(mesh) + (large ? "large" : "");
    int64_t moments = 0;
    for (const MeshCase::Tensor& tensor : test.tensors)
      moments += (tensor.adamw ? 2 : 1) * numel(tensor.initial.shape);
    launch(kMeshes[mesh].ranks, [&](World& world) {
      MeshCase::Rank rank = test.make(world);
      rank.optimizer->allocate_state();
      test.step(rank, world, 1);
      auto elements = [&] {
        int64_t own = 0, all = 0;
        for (const StateTensor& tensor : rank.optimizer->state())
          if (tensor.field != "step") own += numel(tensor.tensor.memory.shape);
        for (int64_t n : all_gather_number(*world.all(), own)) all += n;
        return all;
      };
      EXPECT_EQ(elements(), moments);
      save(*world.all(), checkpoint_of(test, rank, StateForm::kFlattened), *store, "owners" + folder);
      rank.muon->materialise();
      rank.adamw->materialise();
      int64_t replicated = 0;
      for (const MeshCase::Tensor& tensor : test.tensors) {
        const auto ranks =
            static_cast<int64_t>(tensor.layout->replicas(tensor.layout->mesh().ranks()[0]).size());
        replicated += (tensor.adamw ? 2 : 1) * ranks * numel(tensor.initial.shape);
      }
      EXPECT_EQ(elements(), replicated);
      for (const StateTensor& tensor : rank.optimizer->state())
        if (tensor.tensor.layout) tensor.tensor.pieces(world.rank());
      save(*world.all(), checkpoint_of(test, rank, StateForm::kFlattened), *store, "all" + folder);
      rank.muon->release();
      EXPECT_LE(elements(), replicated);
      rank.adamw->materialise();
      rank.adamw->allocate_state();  // has it as the owners have it
      EXPECT_EQ(elements(), moments);
      test.step(rank, world, 2);  // releases the rest
      EXPECT_EQ(elements(), moments);
    });
    EXPECT_EQ(digests_of(store, "owners" + folder), digests_of(store, "all" + folder));
  }
}

TEST(MeshState, RowMomentsMoveBetweenMeshes) {
  const auto store = std::make_shared<MemoryStore>();
  std::map<std::string, std::string> digests;
  for (size_t mesh : {3, 0, 2, 4, 1}) {
    SCOPED_TRACE(mesh);  // whole, or a part on each row, or on one row only
    MeshCase test;
    test.muon.normuon = NorMuonOptions{};
    test.add("experts", {8, 3, 5}, mesh == 2 ? "[shard(2)] over 3" : kMeshes[mesh].matrices,
             {MatrixKind::kBatch, {}});
    launch(kMeshes[mesh].ranks, [&](World& world) {
      MeshCase::Rank rank = test.make(world);
      if (mesh == 3) {
        test.step(rank, world, 1);
      } else {
        load_checkpoint(world, store, "saved", test, rank);
      }
      save(*world.all(), checkpoint_of(test, rank, StateForm::kNested), *store, "saved",
           {.existing = Existing::kExchange});
      rank.muon->materialise();
      save(*world.all(), checkpoint_of(test, rank, StateForm::kNested), *store, "materialised",
           {.existing = Existing::kExchange});
    });
    if (mesh == 3) digests = digests_of(store, "saved");
    EXPECT_EQ(digests.count("optimizer.state.experts.row_moments"), 1u);
    EXPECT_EQ(digests_of(store, "saved"), digests) << mesh;
    EXPECT_EQ(digests_of(store, "materialised"), digests) << mesh;
  }
}

TEST(MeshState, StateMovesBetweenOneRankAndAMesh) {
  // A mesh's checkpoint into the optimizers of one rank, split otherwise, and their state dict into a mesh.
  const MeshCase test = model_on(kMeshes[1]);
  const auto store = std::make_shared<MemoryStore>();
  launch(4, [&](World& world) {
    MeshCase::Rank rank = test.make(world);
    for (int step = 1; step <= 2; ++step) test.step(rank, world, step);
    save(*world.all(), checkpoint_of(test, rank, StateForm::kNested), *store, "saved");
  });
  launch(1, [&](World& world) {
    std::map<std::string, Elements> values;
    std::vector<std::unique_ptr<Optimizer>> children;
    for (const MeshCase::Tensor& tensor : test.tensors) {
      Elements& value = values.emplace(tensor.name, tensor.initial).first->second;
      const OptimizerParameter parameter{tensor.name, value.view(), {}, {}, false, tensor.rule};
      if (tensor.adamw) {
        children.push_back(std::make_unique<AdamW>(std::vector<AdamWGroup>{{{parameter}, {}}}));
      } else {
        children.push_back(std::make_unique<Muon>(std::vector<MuonGroup>{{{parameter}, {}}}));
      }
    }
    ChainedOptimizer local(std::move(children));
    const LoadReport report =
        load_optimizer(world, *open_source(store, "saved"), local, {.key = "optimizer"});
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    EXPECT_EQ(local.steps(), std::vector<int64_t>{2});
    EXPECT_EQ(*local.param_groups()[0].find("lr"), Value(test.muon.lr));
    StateDict state;
    state.add("optimizer", local.state_dict());
    save(*world.all(), state, *store, "again");

    // Whole tensors in memory into shards.
    const StateDict dict = local.state_dict();
    launch(4, [&](World& inner) {
      MeshCase::Rank rank = test.make(inner);
      const LoadReport loaded = rank.optimizer->load_state_dict(dict);
      EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
      StateDict out;
      out.add("optimizer", rank.optimizer->state_dict());
      save(*inner.all(), out, *store, "third");
    });
  });
  const auto again = digests_of(store, "again");
  EXPECT_EQ(again, digests_of(store, "third"));
  for (const auto& [name, digest] : digests_of(store, "saved"))
    if (name.starts_with("optimizer")) {
      EXPECT_EQ(again.at(name), digest) << name;
    }
}

TEST(MeshState, MomentaAreConvertedAndDtypesKept) {
  MeshCase average = model_on(kMeshes[1]), sum = model_on(kMeshes[2]);
  average.options.local.state_dtype = DType::kBFloat16;
  sum.muon.momentum_rule = MomentumRule::kSum;
  const auto store = std::make_shared<MemoryStore>();
  launch(4, [&](World& world) {
    MeshCase::Rank rank = average.make(world);
    average.step(rank, world, 1);
    save(*world.all(), checkpoint_of(average, rank, StateForm::kFlattened), *store, "saved");
  });
  launch(3, [&](World& world) {
    MeshCase::Rank rank = sum.make(world);
    load_checkpoint(world, store, "saved", sum, rank);
    for (const StateTensor& tensor : rank.optimizer->state()) {
      if (tensor.field == "step") continue;
      EXPECT_EQ(tensor.tensor.memory.dtype, DType::kBFloat16) << tensor.parameter << tensor.field;
      if (tensor.field != "momentum_buffer") continue;
      for (const MeshCase::Tensor& wanted : sum.tensors) {
        if (wanted.name != tensor.parameter) continue;
        const Elements gradient = shard_of(MeshCase::gradient(wanted, 1), *wanted.layout, world.rank());
        const View& memory = tensor.tensor.memory;
        Elements copy(memory.dtype, memory.shape);
        if (copy.bytes.empty()) continue;
        std::memcpy(copy.bytes.data(), memory.data, copy.bytes.size());
        EXPECT_LT(distance(copy.values(), gradient.values()), 1e-2);  // (1 - mu) g, then divided by that
      }
    }
    // And what was loaded steps on.
    sum.step(rank, world, 2);
    rank.muon->require_equal_replicas();
  });
}

TEST(MeshState, WhatIsNotThereIsReported) {
  const auto store = std::make_shared<MemoryStore>();
  MeshCase saved = model_on(kMeshes[1]), wanted = model_on(kMeshes[1]);
  saved.tensors.erase(saved.tensors.begin());
  wanted.tensors.back().adamw = true;
  wanted.tensors.erase(wanted.tensors.begin() + 1);
  launch(4, [&](World& world) {
    MeshCase::Rank rank = saved.make(world);
    saved.step(rank, world, 1);
    save(*world.all(), checkpoint_of(saved, rank, StateForm::kFlattened), *store, "saved");
    MeshCase::Rank other = wanted.make(world);
    const LoadReport report =
        load_optimizer(world, *open_source(store, "saved"), *other.optimizer, {.key = "optimizer"});
    const bool owner = other.muon->plan().has_state(0, world.rank());
    EXPECT_EQ(report.missing, owner ? std::vector<std::string>{"state.layers.0.w.momentum_buffer"}
                                    : std::vector<std::string>{});
    EXPECT_NE(
        std::find(report.unexpected.begin(), report.unexpected.end(), "state.layers.1.w.momentum_buffer"),
        report.unexpected.end());
  });
  MeshCase other = model_on(kMeshes[1]);
  other.tensors[1].initial = Elements(DType::kFloat32, {6, 10});
  EXPECT_THROW(launch(4,
                      [&](World& world) {
                        MeshCase::Rank rank = other.make(world);
                        load_optimizer(world, *open_source(store, "saved"), *rank.optimizer,
                                       {.key = "optimizer"});
                      }),
               MismatchError);
}

// PyTorch's checkpoints.

/// What PyTorch says its checkpoint holds, of the optimizer.
std::map<std::string, std::string> expected_digests(const std::string& name) {
  std::ifstream file(fs::path(SPOLIA_TEST_DATA) / "torch-2.14" / name / "expected.json");
  std::map<std::string, std::string> all;
  const nlohmann::json json = nlohmann::json::parse(file);
  for (const auto& [key, entry] : json.at("tensors").items())
    if (key.starts_with("optimizer.")) all[key] = entry.at("sha256").get<std::string>();
  return all;
}

void import_and_export(const std::string& name, const Mesh& mesh) {
  SCOPED_TRACE(name + " on " + mesh.matrices);
  const fs::path path = fs::path(SPOLIA_TEST_DATA) / "torch-2.14" / name / "checkpoint";
  const auto store = std::make_shared<MemoryStore>();
  const std::string prefix = "optimizer.state.";
  launch(mesh.ranks, [&](World& world) {
    const auto source = open_source(posix_store(), path);
    MeshMuonGroup muons;
    MeshAdamWGroup adamws;
    std::map<std::string, Elements> values;
    for (const TensorEntry& entry : source->catalog().tensors) {
      const bool muon = entry.name.ends_with(".momentum_buffer");
      if (!entry.name.starts_with(prefix) || (!muon && !entry.name.ends_with(".exp_avg"))) continue;
      const std::string parameter = entry.name.substr(prefix.size(), entry.name.rfind('.') - prefix.size());
      const auto layout = std::make_shared<const Layout>(parse_layout(muon ? mesh.matrices : mesh.others));
      Elements& value =
          values
              .emplace(parameter, Elements(entry.dtype, layout->shard(entry.shape, world.rank()).local_shape))
              .first->second;
      MeshParameter own{{parameter, value.view(), {}, {}, false, {}}, entry.shape, layout};
      (muon ? muons.parameters : adamws.parameters).push_back(std::move(own));
    }
    EXPECT_EQ(muons.parameters.empty(), name != "muon-1");
    std::vector<std::unique_ptr<Optimizer>> children;
    children.push_back(std::make_unique<MeshAdamW>(world, std::vector{std::move(adamws)}));
    if (!muons.parameters.empty())
      children.push_back(std::make_unique<MeshMuon>(world, std::vector{std::move(muons)}));
    ChainedOptimizer optimizer(std::move(children));
    const LoadReport report = load_optimizer(world, *source, optimizer, {.key = "optimizer"});
    EXPECT_TRUE(report.missing.empty()) << report.missing[0];
    EXPECT_TRUE(report.unexpected.empty()) << report.unexpected[0];
    EXPECT_EQ(optimizer.steps().size(), optimizer[0].state().empty() ? 0u : 1u);
    StateDict state;
    const bool nested = source->catalog().find_value("optimizer.param_groups.0.params") != nullptr;
    state.add("optimizer", optimizer.state_dict(nested ? StateForm::kNested : StateForm::kFlattened));
    save(*world.all(), state, *store, "exported", {.to = TargetFormat::kDcp});
  });
  EXPECT_EQ(digests_of(store, "exported"), expected_digests(name));
  // The options are PyTorch's own.
  const auto source = open_source(posix_store(), path), exported = open_source(store, "exported");
  for (size_t i = 0; i < source->catalog().values.size(); ++i) {
    const std::string& key = source->catalog().values[i].name;
    // Names were listed in PyTorch's order, and here in that of the catalog.
    if (!key.starts_with("optimizer.") || key.ends_with(".params")) continue;
    const ValueEntry* found = exported->catalog().find_value(key);
    ASSERT_TRUE(found) << key;
    EXPECT_EQ(exported->value(static_cast<size_t>(found - exported->catalog().values.data())),
              source->value(i))
        << key;
  }
}

TEST(MeshState, PyTorchsCheckpointsComeAndGo) {
  import_and_export("muon-1", kMeshes[1]);
  import_and_export("muon-1", kMeshes[2]);
  import_and_export("fsdp2-3", kMeshes[1]);
  import_and_export("fsdp2-4-flat", kMeshes[4]);
  import_and_export("hsdp-2x2", kMeshes[3]);
}

TEST(MeshState, PyTorchsCheckpointsComeAndGoSlow) {
  for (const char* name : {"muon-1", "fsdp2-3", "fsdp2-4", "fsdp2-4-flat", "hsdp-2x2"})
    for (const Mesh& mesh : kMeshes)
      if (mesh.matrices.find("ragged") == std::string::npos) import_and_export(name, mesh);
}

}  // namespace
}  // namespace spolia
