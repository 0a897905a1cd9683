#include "spolia/optim/group_options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

using Options = std::vector<std::pair<std::string, Value>>;

Value none() { return Value(); }
Value number(double value) { return Value(value); }
Value flag(bool value) { return Value(value); }
Value text(std::string value) { return Value(std::move(value)); }
Value tuple(std::vector<Value> items) { return Value(Tuple{std::move(items)}); }

bool is_none(const Value& value) { return value.get_if<std::monostate>() != nullptr; }

[[noreturn]] void refuse(std::string_view key, const Value& value, std::string_view wanted) {
  throw InvalidArgumentError("the option {} has to be {}, not {}", quote(key), wanted, value.text());
}

bool flag_of(const Value& value, std::string_view key) {
  if (auto* found = value.get_if<bool>()) return *found;
  refuse(key, value, "True or False");
}

const std::vector<Value>& items_of(const Value& value, std::string_view key) {
  if (auto* list = value.get_if<List>()) return list->items;
  if (auto* items = value.get_if<Tuple>()) return items->items;
  refuse(key, value, "a tuple");
}

std::vector<double> numbers_of(const Value& value, std::string_view key, size_t count) {
  std::vector<double> numbers;
  for (const Value& item : items_of(value, key)) numbers.push_back(number_of(item, key));
  if (numbers.size() != count) refuse(key, value, fmt::format("{} numbers", count));
  return numbers;
}

const std::string& text_of(const Value& value, std::string_view key) {
  if (auto* found = value.get_if<std::string>()) return *found;
  refuse(key, value, "a string");
}

Value triple(const NewtonSchulzCoefficients& set) {
  return tuple({number(set.a), number(set.b), number(set.c)});
}

NewtonSchulzCoefficients triple_of(const Value& value, std::string_view key) {
  const std::vector<double> numbers = numbers_of(value, key, 3);
  return {numbers[0], numbers[1], numbers[2]};
}

}  // namespace

double number_of(const Value& value, std::string_view key) {
  if (auto* found = value.get_if<double>()) return *found;
  if (auto* found = value.get_if<int64_t>()) return static_cast<double>(*found);
  refuse(key, value, "a number");
}

Options to_values(const AdamWOptions& options) {
  return {{"lr", number(options.lr)},
          {"betas", tuple({number(options.beta1), number(options.beta2)})},
          {"eps", number(options.epsilon)},
          {"weight_decay", number(options.weight_decay)},
          {"amsgrad", flag(options.amsgrad)},
          {"maximize", flag(options.maximize)},
          {"foreach", none()},
          {"capturable", flag(false)},
          {"differentiable", flag(false)},
          {"fused", none()},
          {"decoupled_weight_decay", flag(true)}};
}

Options to_values(const MuonOptions& options) {
  const NewtonSchulzOptions& newton_schulz = options.newton_schulz;
  Value coefficients = triple(newton_schulz.coefficients.front());
  if (newton_schulz.coefficients.size() > 1) {
    std::vector<Value> all;
    for (const NewtonSchulzCoefficients& set : newton_schulz.coefficients) all.push_back(triple(set));
    coefficients = tuple(std::move(all));
  }
  Value scale = none();  // PyTorch's default, which is the original one
  if (options.scale == MuonScale::kMatchRmsAdamW) scale = text("match_rms_adamw");
  if (options.scale == MuonScale::kSpectral) scale = text("spectral");
  Options values{{"lr", number(options.lr)},
                 {"weight_decay", number(options.weight_decay)},
                 {"momentum", number(options.momentum)},
                 {"nesterov", flag(options.nesterov)},
                 {"ns_coefficients", std::move(coefficients)},
                 {"eps", number(newton_schulz.epsilon)},
                 {"ns_steps", Value(int64_t{newton_schulz.steps})},
                 {"adjust_lr_fn", std::move(scale)}};
  if (options.momentum_rule == MomentumRule::kSum) values.emplace_back("momentum_rule", text("sum"));
  if (newton_schulz.norm_factor != 1)
    values.emplace_back("ns_norm_factor", number(newton_schulz.norm_factor));
  if (newton_schulz.epsilon_rule == EpsilonRule::kAdded)
    values.emplace_back("ns_epsilon_rule", text("added"));
  if (options.normuon) {
    values.emplace_back("normuon", number(options.normuon->beta2));
    values.emplace_back("normuon_eps", number(options.normuon->epsilon));
  }
  return values;
}

AdamWOptions with_values(AdamWOptions options, const ParamGroup& values) {
  for (const auto& [key, value] : values.options) {
    if (key == "lr") options.lr = number_of(value, key);
    if (key == "betas") {
      const std::vector<double> betas = numbers_of(value, key, 2);
      options.beta1 = betas[0];
      options.beta2 = betas[1];
    }
    if (key == "eps") options.epsilon = number_of(value, key);
    if (key == "weight_decay") options.weight_decay = number_of(value, key);
    if (key == "amsgrad") options.amsgrad = flag_of(value, key);
    if (key == "maximize") options.maximize = flag_of(value, key);
    if (key == "decoupled_weight_decay" && !flag_of(value, key))
      throw UnsupportedError("weight decay that is not decoupled (Adam's) is not computed here");
  }
  check(options);
  return options;
}

MuonOptions with_values(MuonOptions options, const ParamGroup& values) {
  NewtonSchulzOptions& newton_schulz = options.newton_schulz;
  for (const auto& [key, value] : values.options) {
    if (key == "lr") options.lr = number_of(value, key);
    if (key == "weight_decay") options.weight_decay = number_of(value, key);
    if (key == "momentum") options.momentum = number_of(value, key);
    if (key == "nesterov") options.nesterov = flag_of(value, key);
    if (key == "eps") newton_schulz.epsilon = number_of(value, key);
    if (key == "ns_steps") {
      const double steps = number_of(value, key);
      if (!(steps >= 0 && steps < 100) || steps != std::floor(steps))
        refuse(key, value, "a whole number from 0 to 99");
      newton_schulz.steps = static_cast<int>(steps);
    }
    if (key == "ns_coefficients") {
      const std::vector<Value>& items = items_of(value, key);
      const bool several = !items.empty() && (items[0].get_if<Tuple>() || items[0].get_if<List>());
      newton_schulz.coefficients.clear();
      if (several) {
        for (const Value& item : items) newton_schulz.coefficients.push_back(triple_of(item, key));
      } else {
        newton_schulz.coefficients.push_back(triple_of(value, key));
      }
    }
    if (key == "adjust_lr_fn") {
      const std::string name = is_none(value) ? "original" : text_of(value, key);
      if (name == "original") {
        options.scale = MuonScale::kOriginal;
      } else if (name == "match_rms_adamw") {
        options.scale = MuonScale::kMatchRmsAdamW;
      } else if (name == "spectral") {
        options.scale = MuonScale::kSpectral;
      } else {
        refuse(key, value, "None, 'original', 'match_rms_adamw' or 'spectral'");
      }
    }
    if (key == "momentum_rule") options.momentum_rule = *momentum_rule_of(&value);
    if (key == "ns_norm_factor") newton_schulz.norm_factor = number_of(value, key);
    if (key == "ns_epsilon_rule") {
      if (text_of(value, key) != "added" && text_of(value, key) != "clamped")
        refuse(key, value, "'added' or 'clamped'");
      newton_schulz.epsilon_rule =
          text_of(value, key) == "added" ? EpsilonRule::kAdded : EpsilonRule::kClamped;
    }
    if (key == "normuon" || key == "normuon_eps") {
      if (!options.normuon) options.normuon.emplace();
      (key == "normuon" ? options.normuon->beta2 : options.normuon->epsilon) = number_of(value, key);
    }
  }
  check(options);
  return options;
}

std::optional<MomentumRule> momentum_rule_of(const Value* momentum_rule) {
  if (!momentum_rule) return std::nullopt;
  const std::string& name = text_of(*momentum_rule, "momentum_rule");
  if (name == "sum") return MomentumRule::kSum;
  if (name == "average") return MomentumRule::kAverage;
  refuse("momentum_rule", *momentum_rule, "'sum' or 'average'");
}

bool is_known_option(std::string_view key) {
  static constexpr std::string_view kKnown[] = {"lr",
                                                "betas",
                                                "eps",
                                                "weight_decay",
                                                "amsgrad",
                                                "maximize",
                                                "foreach",
                                                "capturable",
                                                "differentiable",
                                                "fused",
                                                "decoupled_weight_decay",
                                                "momentum",
                                                "nesterov",
                                                "ns_coefficients",
                                                "ns_steps",
                                                "adjust_lr_fn",
                                                "momentum_rule",
                                                "ns_norm_factor",
                                                "ns_epsilon_rule",
                                                "normuon",
                                                "normuon_eps",
                                                "params"};
  return std::find(std::begin(kKnown), std::end(kKnown), key) != std::end(kKnown);
}

}  // namespace spolia
