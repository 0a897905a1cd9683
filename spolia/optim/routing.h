// Which optimizer a parameter goes to: by its role, not by its number of dims.
//
// Muon takes hidden matrices. Embeddings, heads, norms, biases, routers and depthwise convolutions go to
// AdamW, and so does what is not known to be matrices. Roles are read from names, as models usually have
// them; rules override them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/optim/muon.h"

namespace spolia {

enum class ParameterRole : uint8_t {
  kHiddenMatrix,
  kExperts,  // three dims, a matrix for each expert
  kConvolution,
  kEmbedding,
  kHead,
  kNorm,
  kBias,
  kRouter,
  kDepthwiseConvolution,
  kVector,   // one dim or none, with no other role
  kUnknown,  // three dims or more, and the name does not say of what
};
std::string_view name_of(ParameterRole role);

enum class OptimizerKind : uint8_t { kMuon, kAdamW };

struct Route {
  OptimizerKind to = OptimizerKind::kAdamW;
  ParameterRole role = ParameterRole::kUnknown;
  MatrixRule matrix;  // for Muon
};

/// Overrides what names say. The last rule whose pattern (glob_match, text.h) matches the name wins.
struct RoutingRule {
  std::string pattern;
  /// Where it goes; nothing: where its role says.
  std::optional<OptimizerKind> to;
  std::optional<ParameterRole> role;
  /// How a parameter for Muon is matrices. Nothing: as its role says.
  std::optional<MatrixRule> matrix;
};

/// The role that a name and a logical shape (the whole tensor's, not a shard's) suggest.
ParameterRole role_of(std::string_view name, std::span<const int64_t> shape);

/// `names` are all the names of one parameter: of tied ones there are several, and one that goes to AdamW
/// takes all there. InvalidArgumentError without names, or where a rule sends to Muon what its matrix rule
/// does not fit.
Route route(std::span<const std::string> names, std::span<const int64_t> shape,
            std::span<const RoutingRule> rules = {});

}  // namespace spolia
