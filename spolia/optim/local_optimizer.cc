#include "spolia/optim/local_optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/element_blocks.h"
#include "spolia/optim/group_options.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

constexpr std::string_view kStep = "step", kMaster = "master_param";

std::pair<Buffer, View> new_tensor(DType dtype, const Dims& shape) {
  Buffer buffer(byte_size(dtype, shape));
  if (buffer.size() > 0) std::memset(buffer.data(), 0, static_cast<size_t>(buffer.size()));
  View view = dense_view(buffer.data(), dtype, shape);
  return {std::move(buffer), std::move(view)};
}

double read_scalar(const View& view) {
  double value = 0;
  cast(DType::kFloat64, &value, view.dtype, view.data, 1);
  return value;
}
void write_scalar(const View& view, double value) { cast(view.dtype, view.data, DType::kFloat64, &value, 1); }

std::string state_name(const OptimizerParameter& parameter, std::string_view field) {
  return fmt::format("state.{}.{}", parameter.name, field);
}

}  // namespace

View LocalOptimizer::Slot::find(std::string_view field) const {
  for (const auto& [name, tensor] : state)
    if (name == field) return tensor.second;
  return {};
}

void LocalOptimizer::add_group(std::vector<OptimizerParameter> parameters) {
  Group& group = groups_.emplace_back();
  for (OptimizerParameter& parameter : parameters) {
    const int64_t count = numel(parameter.value.shape);
    const std::string what = "the parameter " + quote(parameter.name);
    check_elements(parameter.value, count, what);
    check_elements(parameter.gradient, count, "the gradient of " + what, true);
    check_elements(parameter.master, count, "the master of " + what, true);
    group.slots.push_back({std::move(parameter), {}});
  }
  const std::vector<OptimizerParameter*> all = LocalOptimizer::parameters();
  check_distinct(all);
}

View LocalOptimizer::master_of(const Slot& slot) const {
  return slot.parameter.master.data ? slot.parameter.master : slot.find(kMaster);
}

DType LocalOptimizer::state_dtype(const Slot& slot) const {
  if (local_.state_dtype) return *local_.state_dtype;
  if (slot.parameter.master.data) return slot.parameter.master.dtype;
  const DType own = slot.parameter.value.dtype;
  return local_.masters && element_bytes(own) < 4 ? DType::kFloat32 : own;
}

void LocalOptimizer::make_state(size_t group, Slot& slot) {
  std::vector<Field> wanted = fields(group, slot);
  const View& value = slot.parameter.value;
  if (local_.masters && !slot.parameter.master.data && element_bytes(value.dtype) < 4)
    wanted.push_back({std::string(kMaster), DType::kFloat32, value.shape});
  for (const Field& field : wanted) {
    if (std::any_of(slot.state.begin(), slot.state.end(),
                    [&](const auto& tensor) { return tensor.first == field.name; }))
      continue;
    slot.state.emplace_back(field.name, new_tensor(field.dtype, field.shape));
    if (field.name == kMaster)
      cast(field.dtype, slot.state.back().second.second.data, value.dtype, value.data, numel(value.shape));
  }
}

void LocalOptimizer::zero_grad(bool set_to_none) {
  for (OptimizerParameter* parameter : parameters()) {
    View& gradient = parameter->gradient;
    if (set_to_none) {
      gradient = {};
    } else if (gradient.data) {
      std::memset(gradient.data, 0, static_cast<size_t>(gradient.bytes()));
    }
  }
}

std::vector<OptimizerParameter*> LocalOptimizer::parameters() {
  std::vector<OptimizerParameter*> all;
  for (Group& group : groups_)
    for (Slot& slot : group.slots) all.push_back(&slot.parameter);
  return all;
}

std::vector<ParamGroup> LocalOptimizer::param_groups() const {
  std::vector<ParamGroup> all;
  for (size_t i = 0; i < groups_.size(); ++i) {
    ParamGroup& group = all.emplace_back();
    for (const Slot& slot : groups_[i].slots) group.params.push_back(slot.parameter.name);
    group.options = option_values(i);
    for (const auto& [key, value] : groups_[i].foreign) group.options.emplace_back(key, value);
  }
  return all;
}

void LocalOptimizer::allocate_state() {
  for (size_t i = 0; i < groups_.size(); ++i)
    for (Slot& slot : groups_[i].slots)
      if (!slot.parameter.frozen) make_state(i, slot);
}

std::vector<StateTensor> LocalOptimizer::state() {
  std::vector<StateTensor> all;
  for (Group& group : groups_)
    for (Slot& slot : group.slots)
      for (auto& [name, tensor] : slot.state)
        all.push_back({slot.parameter.name, name, plain_tensor(tensor.second)});
  return all;
}

std::vector<int64_t> LocalOptimizer::steps() const {
  std::set<int64_t> distinct;
  for (const Group& group : groups_)
    for (const Slot& slot : group.slots)
      if (View step = slot.find(kStep); step.data) distinct.insert(static_cast<int64_t>(read_scalar(step)));
  return {distinct.begin(), distinct.end()};
}

void LocalOptimizer::set_steps(int64_t steps) {
  for (Group& group : groups_)
    for (Slot& slot : group.slots)
      if (View step = slot.find(kStep); step.data) write_scalar(step, static_cast<double>(steps));
}

void LocalOptimizer::set_groups(std::span<const ParamGroup> groups, bool check_only) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    set_options(i, groups[i], check_only);
    if (check_only) continue;
    ParamGroup foreign{{}, std::move(groups_[i].foreign)};
    for (const auto& [key, value] : groups[i].options)
      if (!is_known_option(key)) foreign.set(key, value);
    groups_[i].foreign = std::move(foreign.options);
  }
}

void LocalOptimizer::load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) {
  // No state changes before all of it is checked and copied; which there is follows from the options.
  std::vector<ParamGroup> group_values(groups_.size());
  struct Loaded {
    Slot* slot;
    std::vector<std::pair<std::string, std::pair<Buffer, View>>> state;
  };
  std::vector<Loaded> loaded;
  for (size_t i = 0; i < groups_.size(); ++i) {
    for (const Slot& slot : groups_[i].slots) {
      const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
      if (!parameter || parameter->option(foreign_option())) continue;
      for (const auto& [key, value] : parameter->options) {
        const Value* before = group_values[i].find(key);
        if (before && !(*before == *value))
          throw MismatchError(
              "the parameters of one group were saved with unequal options: {} of {} is {}, and {} before it",
              quote(key), quote(slot.parameter.name), value->text(), before->text());
        if (!before) group_values[i].set(key, *value);
      }
    }
    // A momentum is converted to the rule of this optimizer, which stays.
    std::erase_if(group_values[i].options,
                  [](const auto& option) { return option.first == "momentum_rule"; });
    set_options(i, group_values[i], true);
  }
  set_groups(group_values, false);

  for (size_t i = 0; i < groups_.size(); ++i)
    for (Slot& slot : groups_[i].slots) {
      const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
      std::vector<Field> wanted = fields(i, slot);
      wanted.push_back({std::string(kMaster), DType::kFloat32, slot.parameter.value.shape});
      if (parameter)
        for (const auto& [name, entry] : parameter->fields)
          if (std::none_of(wanted.begin(), wanted.end(),
                           [&, &key = name](const Field& field) { return field.name == key; }))
            report.unexpected.push_back(entry->name);
      Loaded& next = loaded.emplace_back(Loaded{&slot, {}});
      for (const Field& field : wanted) {
        const StateDict::Entry* entry = parameter ? parameter->field(field.name) : nullptr;
        if (!entry) {
          if (field.name != kMaster && !slot.parameter.frozen)
            report.missing.push_back(state_name(slot.parameter, field.name));
          continue;
        }
        if (const Value* value = entry->value()) {
          if (field.name != kStep)
            throw MismatchError("{} is no tensor: {}", quote(entry->name), value->text());
          next.state.emplace_back(field.name, new_tensor(field.dtype, field.shape));
          write_scalar(next.state.back().second.second, number_of(*value, field.name));
          continue;
        }
        const View& from = entry->tensor()->memory;
        const bool is_step = field.name == kStep;
        if (is_step ? numel(from.shape) != 1 : from.shape != field.shape)
          throw MismatchError("{} is {}, and the parameter takes {}", quote(entry->name),
                              shape_text(from.shape), shape_text(field.shape));
        if (!can_cast(DType::kFloat32, from.dtype))
          throw UnsupportedError("{} has to be floating-point numbers, and is {}", quote(entry->name),
                                 name_of(from.dtype));
        // Counters stay float32: narrower ones stop counting.
        const DType dtype = is_step || field.name == kMaster ? field.dtype
                            : local_.state_dtype             ? *local_.state_dtype
                                                             : from.dtype;
        auto [buffer, view] = new_tensor(dtype, field.shape);
        if (is_step) {
          cast(dtype, view.data, from.dtype, from.data, 1);
        } else {
          cast_strided(from.shape, dtype, view.data, view.strides, from.dtype, from.data, from.strides);
        }
        if (double factor = conversion(i, field.name, *parameter, options); factor != 1)
          for_each_block<float>(numel(view.shape), std::array{update_run(view)},
                                [&](const std::array<float*, 1>& p, int64_t n) {
                                  for (int64_t k = 0; k < n; ++k)
                                    p[0][k] = static_cast<float>(p[0][k] * factor);
                                });
        next.state.emplace_back(field.name, std::pair{std::move(buffer), std::move(view)});
      }
    }
  for (Loaded& next : loaded)
    if (!next.state.empty()) next.slot->state = std::move(next.state);
}

AdamW::AdamW(std::vector<AdamWGroup> groups, const LocalOptions& options) : LocalOptimizer(options) {
  for (AdamWGroup& group : groups) {
    check(group.options);
    options_.push_back(group.options);
    add_group(std::move(group.parameters));
  }
}

void AdamW::take_step() {
  for (size_t i = 0; i < groups_.size(); ++i)
    for (Slot& slot : groups_[i].slots) {
      const OptimizerParameter& parameter = slot.parameter;
      if (!parameter.takes_part()) continue;
      make_state(i, slot);
      const View step = slot.find(kStep);
      const double count = read_scalar(step) + 1;
      write_scalar(step, count);
      adamw_step(options_[i], static_cast<int64_t>(count),
                 {parameter.value, master_of(slot), parameter.gradient, slot.find("exp_avg"),
                  slot.find("exp_avg_sq"), slot.find("max_exp_avg_sq")});
    }
}

std::vector<LocalOptimizer::Field> AdamW::fields(size_t group, const Slot& slot) const {
  const DType dtype = state_dtype(slot);
  const Dims& shape = slot.parameter.value.shape;
  std::vector<Field> all{
      {std::string(kStep), DType::kFloat32, {}}, {"exp_avg", dtype, shape}, {"exp_avg_sq", dtype, shape}};
  if (options_[group].amsgrad) all.push_back({"max_exp_avg_sq", dtype, shape});
  return all;
}

std::vector<std::pair<std::string, Value>> AdamW::option_values(size_t group) const {
  return to_values(options_[group]);
}

void AdamW::set_options(size_t group, const ParamGroup& values, bool check_only) {
  AdamWOptions options = with_values(options_[group], values);
  if (!check_only) options_[group] = options;
}

Muon::Muon(std::vector<MuonGroup> groups, const LocalOptions& options)
    : LocalOptimizer(options), calculator_(options.threads) {
  for (MuonGroup& group : groups) {
    check(group.options);
    for (const OptimizerParameter& parameter : group.parameters) {
      try {
        matrix_shape(parameter.matrix, parameter.value.shape);
      } catch (const Error& error) {
        rethrow_with_context(error, "the parameter " + quote(parameter.name));
      }
    }
    options_.push_back(std::move(group.options));
    add_group(std::move(group.parameters));
  }
}

void Muon::take_step() {
  for (size_t i = 0; i < groups_.size(); ++i)
    for (Slot& slot : groups_[i].slots) {
      const OptimizerParameter& parameter = slot.parameter;
      if (!parameter.takes_part()) continue;
      make_state(i, slot);
      const View momentum = slot.find("momentum_buffer");
      const DType dtype = momentum.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
      const int64_t bytes = byte_size(dtype, parameter.value.shape);
      if (update_.size() < bytes) update_ = Buffer(bytes);
      const View update = dense_view(update_.data(), dtype, parameter.value.shape);
      muon_momentum(options_[i], parameter.gradient, momentum, update);
      calculator_.update(options_[i], parameter.matrix, update, update, slot.find("row_moments"));
      if (hook_) hook_(parameter, update);
      muon_apply(options_[i], parameter.value, master_of(slot), update);
    }
}

std::vector<LocalOptimizer::Field> Muon::fields(size_t group, const Slot& slot) const {
  const Dims& shape = slot.parameter.value.shape;
  std::vector<Field> all{{"momentum_buffer", state_dtype(slot), shape}};
  if (options_[group].normuon)
    all.push_back({"row_moments", DType::kFloat32, row_moments_shape(slot.parameter.matrix, shape)});
  return all;
}

std::vector<std::pair<std::string, Value>> Muon::option_values(size_t group) const {
  return to_values(options_[group]);
}

void Muon::set_options(size_t group, const ParamGroup& values, bool check_only) {
  MuonOptions options = with_values(options_[group], values);
  if (!check_only) options_[group] = std::move(options);
}

double Muon::conversion(size_t group, std::string_view field, const SavedState::Parameter& saved,
                        const StateLoadOptions& options) const {
  if (field != "momentum_buffer") return 1;
  const MomentumRule from = momentum_rule_of(saved.option("momentum_rule")).value_or(options.momentum_rule);
  const Value* momentum = saved.option("momentum");
  return momentum_conversion(from, options_[group].momentum_rule,
                             momentum ? number_of(*momentum, "momentum") : options_[group].momentum);
}

}  // namespace spolia
