#include "spolia/optim/routing.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TEST(Routing, RolesOfTheUsualNames) {
  struct Case {
    const char* name;
    std::vector<int64_t> shape;
    ParameterRole role;
  };
  for (const Case& c : std::vector<Case>{
           {"model.layers.0.self_attn.q_proj.weight", {8, 8}, ParameterRole::kHiddenMatrix},
           {"model.layers.0.mlp.gate_proj.weight", {8, 8}, ParameterRole::kHiddenMatrix},
           {"transformer.h.0.attn.c_attn.weight", {8, 24}, ParameterRole::kHiddenMatrix},
           {"w", {8, 8}, ParameterRole::kHiddenMatrix},
           {"model.layers.0.mlp.experts.w1", {4, 8, 8}, ParameterRole::kExperts},
           {"model.layers.0.mlp.experts.3.up_proj.weight", {8, 8}, ParameterRole::kHiddenMatrix},
           {"features.0.conv.weight", {16, 3, 3, 3}, ParameterRole::kConvolution},
           {"features.0.conv1d.weight", {16, 8, 4}, ParameterRole::kConvolution},
           {"mamba.conv1d.weight", {16, 1, 4}, ParameterRole::kDepthwiseConvolution},
           {"model.embed_tokens.weight", {100, 8}, ParameterRole::kEmbedding},
           {"transformer.wte.weight", {100, 8}, ParameterRole::kEmbedding},
           {"embedding.word_embeddings.weight", {100, 8}, ParameterRole::kEmbedding},
           {"lm_head.weight", {100, 8}, ParameterRole::kHead},
           {"model.unembed.weight", {100, 8}, ParameterRole::kHead},
           {"model.norm.weight", {8}, ParameterRole::kNorm},
           {"model.layers.0.input_layernorm.weight", {8}, ParameterRole::kNorm},
           {"transformer.ln_f.weight", {8}, ParameterRole::kNorm},
           {"model.layers.0.q_norm.weight", {2, 4}, ParameterRole::kNorm},
           {"model.layers.0.self_attn.q_proj.bias", {8}, ParameterRole::kBias},
           {"model.layers.0.mlp.experts.up_bias", {4, 8}, ParameterRole::kBias},
           {"model.layers.0.mlp.gate.weight", {4, 8}, ParameterRole::kRouter},
           {"model.layers.0.mlp.router.weight", {4, 8}, ParameterRole::kRouter},
           {"alpha", {}, ParameterRole::kVector},
           {"model.mystery", {2, 8, 8}, ParameterRole::kUnknown}})
    EXPECT_EQ(role_of(c.name, c.shape), c.role) << c.name << ": " << name_of(role_of(c.name, c.shape));
}

Route route_of(std::vector<std::string> names, std::vector<int64_t> shape,
               std::vector<RoutingRule> rules = {}) {
  return route(names, shape, rules);
}

TEST(Routing, ByRole) {
  EXPECT_EQ(route_of({"a.q_proj.weight"}, {4, 4}).to, OptimizerKind::kMuon);
  EXPECT_EQ(route_of({"a.experts.w"}, {2, 4, 4}).matrix.kind, MatrixKind::kBatch);
  EXPECT_EQ(route_of({"a.conv.weight"}, {2, 4, 4}).matrix.kind, MatrixKind::kConvolution);
  for (const char* name : {"embed.weight", "lm_head.weight", "a.gate.weight", "a.norm.weight"})
    EXPECT_EQ(route_of({name}, {4, 4}).to, OptimizerKind::kAdamW) << name;
  EXPECT_EQ(route_of({"mystery"}, {2, 4, 4}).to, OptimizerKind::kAdamW);
}

TEST(Routing, TheLastMatchingRuleWins) {
  const std::vector<RoutingRule> rules{
      {"*", OptimizerKind::kAdamW, {}, {}},
      {"*.attn.*", {}, {}, {}},
      {"*.qkv.weight", {}, {}, MatrixRule{MatrixKind::kMatrix, stacked_rows({4, 8})}},
      {"mystery", {}, ParameterRole::kExperts, {}}};
  EXPECT_EQ(route_of({"a.mlp.weight"}, {4, 4}, rules).to, OptimizerKind::kAdamW);
  EXPECT_EQ(route_of({"a.attn.o.weight"}, {4, 4}, rules).to, OptimizerKind::kMuon);
  EXPECT_EQ(route_of({"a.attn.qkv.weight"}, {12, 4}, rules).matrix.parts.size(), 2u);
  EXPECT_EQ(route_of({"mystery"}, {2, 4, 4}, rules).to, OptimizerKind::kMuon);
  EXPECT_THROW(route_of({"a.attn.qkv.weight"}, {13, 4}, rules), InvalidArgumentError);
  EXPECT_THROW(route_of({"bias"}, {4}, {{"bias", OptimizerKind::kMuon, {}, {}}}), InvalidArgumentError);
}

TEST(Routing, TiedParametersGoTogether) {
  EXPECT_EQ(route_of({"a.proj.weight", "embed.weight"}, {4, 4}).to, OptimizerKind::kAdamW);
  EXPECT_EQ(route_of({"embed.weight", "a.proj.weight"}, {4, 4}).to, OptimizerKind::kAdamW);
  EXPECT_EQ(route_of({"a.proj.weight", "b.proj.weight"}, {4, 4}).to, OptimizerKind::kMuon);
  EXPECT_THROW(route_of({}, {4, 4}), InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
