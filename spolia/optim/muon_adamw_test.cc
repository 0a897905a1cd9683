#include "spolia/optim/muon_adamw.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/world.h"
#include "spolia/layout/layout_text.h"
#include "spolia/optim/testing_mesh.h"

namespace spolia {
namespace {

const std::map<std::string, Dims> kModel{
    {"embed.weight", {8, 4}},          {"layers.0.qkv.weight", {12, 4}},
    {"layers.0.norm.weight", {4}},     {"layers.0.special.weight", {4, 4}},
    {"layers.0.experts.w", {2, 4, 4}}, {"out.weight", {8, 4}}};

MuonAdamWOptions options() {
  MuonAdamWOptions options{.muon = {.lr = .02}, .adamw = {.lr = 1e-3}, .rules = {}, .tied = {}};
  options.rules.push_back({.pattern = "*.special.*", .to = OptimizerKind::kAdamW, .role = {}, .matrix = {}});
  options.tied = {{"out.weight", "lm_head.weight"}};
  return options;
}

/// This rank's parameters, by name.
std::vector<MeshParameter> parameters_of(std::map<std::string, Elements>& values,
                                         const std::shared_ptr<const Layout>& layout, int64_t rank) {
  std::vector<MeshParameter> all;
  for (const auto& [name, shape] : kModel) {
    const Elements whole(DType::kFloat32, shape,
                         random_values(static_cast<size_t>(numel(shape)), name.size()));
    Elements& own = values.emplace(name, shard_of(whole, *layout, rank)).first->second;
    all.push_back({{.name = name, .value = own.view(), .gradient = own.view()}, shape, layout});
    if (name == "layers.0.qkv.weight") all.back().parameter.matrix.parts = stacked_rows({4, 4, 4});
  }
  return all;
}

std::map<std::string, bool> on_muon(ChainedOptimizer& chain) {
  std::map<std::string, bool> found;
  for (size_t child = 0; child < chain.size(); ++child)
    for (const OptimizerParameter* parameter : chain[child].parameters()) found[parameter->name] = child == 0;
  return found;
}

const std::map<std::string, bool> kExpected{
    {"embed.weight", false},         {"layers.0.qkv.weight", true},
    {"layers.0.norm.weight", false}, {"layers.0.special.weight", false},
    {"layers.0.experts.w", true},    {"out.weight", false}};

TEST(MuonAdamW, RoutesAndStepsAlikeOnOneRankAndOnMany) {
  const auto alone = std::make_shared<const Layout>(parse_layout("[] over 0-d"));
  std::map<std::string, Elements> expected;
  std::vector<OptimizerParameter> own;
  for (MeshParameter& parameter : parameters_of(expected, alone, 0)) own.push_back(parameter.parameter);
  const auto local = make_muon_adamw(std::move(own), options());
  EXPECT_EQ(on_muon(*local), kExpected);
  local->step();
  EXPECT_EQ(local->find<Muon>()->newton_schulz().matrices(), 3 + 2);
  EXPECT_EQ(local->find<MeshMuon>(), nullptr);
  launch(4, [&](World& world) {
    const auto layout = std::make_shared<const Layout>(parse_layout("[replicate, shard(0)] over 2x2"));
    std::map<std::string, Elements> values;
    const auto chain = make_muon_adamw(world, parameters_of(values, layout, world.rank()), options());
    EXPECT_EQ(on_muon(*chain), kExpected);
    chain->step();
    for (const auto& [name, value] : values)
      EXPECT_EQ(value.bytes, shard_of(expected.at(name), *layout, world.rank()).bytes) << name;
  });
}

TEST(MuonAdamW, WhatCannotBeRoutedIsEverybodysError) {
  EXPECT_THROW(launch(2,
                      [&](World& world) {
                        const auto layout =
                            std::make_shared<const Layout>(parse_layout("[replicate] over 2"));
                        std::map<std::string, Elements> values;
                        MuonAdamWOptions wrong = options();
                        if (world.rank() == 1)
                          wrong.rules.push_back(
                              {.pattern = "*.norm.*", .to = OptimizerKind::kMuon, .role = {}, .matrix = {}});
                        make_muon_adamw(world, parameters_of(values, layout, world.rank()), wrong);
                      }),
               InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
