// The options of AdamW and Muon as PyTorch's param_groups have them.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/optim/adamw.h"
#include "spolia/optim/muon.h"
#include "spolia/optim/optimizer.h"

namespace spolia {

/// PyTorch's keys in its order; those that only its implementation reads (foreach, fused, ...) have its
/// defaults.
std::vector<std::pair<std::string, Value>> to_values(const AdamWOptions& options);
/// PyTorch's keys; then, where they are not as in PyTorch: momentum_rule ("sum"), ns_norm_factor,
/// ns_epsilon_rule ("added"), normuon (its beta2), normuon_eps. adjust_lr_fn may be "spectral" as well.
/// ns_coefficients are three numbers, or a tuple of such where steps differ.
std::vector<std::pair<std::string, Value>> to_values(const MuonOptions& options);

/// `options` with the keys that `values` has and that they know. InvalidArgumentError where a value has the
/// wrong type or makes no sense.
AdamWOptions with_values(AdamWOptions options, const ParamGroup& values);
MuonOptions with_values(MuonOptions options, const ParamGroup& values);

/// The rule that saved options say, or nothing. `values` are those of one parameter.
std::optional<MomentumRule> momentum_rule_of(const Value* momentum_rule);

/// Whether AdamW or Muon has such an option.
bool is_known_option(std::string_view key);

/// int, float or bool as a number. InvalidArgumentError for anything else; `key` names it.
double number_of(const Value& value, std::string_view key);

}  // namespace spolia
