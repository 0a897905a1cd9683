#include "spolia/optim/routing.h"

#include <algorithm>
#include <cctype>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

/// The keys on the way to a parameter, in lower case.
std::vector<std::string> parts_of(std::string_view name) {
  std::vector<std::string> parts(1);
  for (char c : name) {
    if (c == '.' || c == '/') {
      parts.emplace_back();
    } else {
      parts.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return parts;
}

bool is_one_of(std::string_view part, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), part) != names.end();
}

MatrixRule rule_for(ParameterRole role, size_t dims) {
  if (role == ParameterRole::kConvolution || role == ParameterRole::kDepthwiseConvolution)
    return {MatrixKind::kConvolution, {}};
  return {dims > 2 ? MatrixKind::kBatch : MatrixKind::kMatrix, {}};
}

Route route_one(const std::string& name, std::span<const int64_t> shape, std::span<const RoutingRule> rules) {
  const RoutingRule* chosen = nullptr;
  for (const RoutingRule& rule : rules)
    if (glob_match(rule.pattern, name)) chosen = &rule;
  Route result;
  result.role = chosen && chosen->role ? *chosen->role : role_of(name, shape);
  const bool matrices = result.role == ParameterRole::kHiddenMatrix ||
                        result.role == ParameterRole::kExperts || result.role == ParameterRole::kConvolution;
  result.to = chosen && chosen->to ? *chosen->to : matrices ? OptimizerKind::kMuon : OptimizerKind::kAdamW;
  if (result.to != OptimizerKind::kMuon) return result;
  result.matrix = chosen && chosen->matrix ? *chosen->matrix : rule_for(result.role, shape.size());
  try {
    matrix_shape(result.matrix, shape);
  } catch (const Error& error) {
    rethrow_with_context(error, fmt::format("{} cannot go to Muon", quote(name)));
  }
  return result;
}

}  // namespace

std::string_view name_of(ParameterRole role) {
  switch (role) {
    case ParameterRole::kHiddenMatrix:
      return "hidden matrix";
    case ParameterRole::kExperts:
      return "experts";
    case ParameterRole::kConvolution:
      return "convolution";
    case ParameterRole::kEmbedding:
      return "embedding";
    case ParameterRole::kHead:
      return "head";
    case ParameterRole::kNorm:
      return "norm";
    case ParameterRole::kBias:
      return "bias";
    case ParameterRole::kRouter:
      return "router";
    case ParameterRole::kDepthwiseConvolution:
      return "depthwise convolution";
    case ParameterRole::kVector:
      return "vector";
    case ParameterRole::kUnknown:
      return "unknown";
  }
  return "unknown";
}

ParameterRole role_of(std::string_view name, std::span<const int64_t> shape) {
  const std::vector<std::string> parts = parts_of(name);
  const std::string& last = parts.back();
  // The module that owns it: "norm" of "layers.0.norm.weight"; of a bare name, the name itself.
  const std::string& owner =
      parts.size() > 1 && is_one_of(last, {"weight", "bias", "scale", "gamma", "beta", "kernel"})
          ? parts[parts.size() - 2]
          : last;
  auto has = [](std::string_view text, std::string_view piece) { return text.find(piece) != text.npos; };
  if (last == "bias" || last.ends_with("_bias")) return ParameterRole::kBias;
  if (has(owner, "norm") || owner.starts_with("ln_") || is_one_of(owner, {"ln", "ln1", "ln2", "lnf"}))
    return ParameterRole::kNorm;
  if (is_one_of(owner, {"router", "gate", "gating", "wg"}) || owner.ends_with("_router"))
    return ParameterRole::kRouter;
  if (has(owner, "unembed") ||
      is_one_of(owner, {"lm_head", "head", "output_layer", "classifier", "score", "out_head"}) ||
      owner.ends_with("_head"))
    return ParameterRole::kHead;
  if (has(owner, "embed") || is_one_of(owner, {"wte", "wpe", "tok_emb", "pos_emb"}))
    return ParameterRole::kEmbedding;
  if (shape.size() < 2) return ParameterRole::kVector;
  if (shape.size() == 2) return ParameterRole::kHiddenMatrix;
  if (has(owner, "conv") || shape.size() > 3)
    return shape[1] == 1 ? ParameterRole::kDepthwiseConvolution : ParameterRole::kConvolution;
  for (const std::string& part : parts)
    if (has(part, "expert")) return ParameterRole::kExperts;
  return ParameterRole::kUnknown;
}

Route route(std::span<const std::string> names, std::span<const int64_t> shape,
            std::span<const RoutingRule> rules) {
  if (names.empty()) throw InvalidArgumentError("a parameter without a name cannot be routed");
  Route result = route_one(names.front(), shape, rules);
  for (const std::string& name : names.subspan(1)) {
    Route other = route_one(name, shape, rules);
    if (result.to == OptimizerKind::kMuon && other.to == OptimizerKind::kAdamW) result = other;
  }
  return result;
}

}  // namespace spolia
