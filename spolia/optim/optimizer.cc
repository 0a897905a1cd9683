#include "spolia/optim/optimizer.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/element_blocks.h"

namespace spolia {
namespace {

constexpr std::string_view kState = "state.", kGroups = "param_groups.";

/// "a.b" and "c" of "a.b.c": fields and keys have no dots, names may.
std::pair<std::string_view, std::string_view> split_last(std::string_view name) {
  size_t dot = name.rfind('.');
  if (dot == name.npos) return {{}, name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

template <class Pairs>
auto find_key(Pairs& pairs, std::string_view key) {
  return std::find_if(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first == key; });
}

const std::vector<Value>* items_of(const Value& value) {
  if (auto* list = value.get_if<List>()) return &list->items;
  if (auto* tuple = value.get_if<Tuple>()) return &tuple->items;
  return nullptr;
}

Value name_list(const std::vector<std::string>& names) {
  List list;
  for (const std::string& name : names) list.items.emplace_back(name);
  return Value(std::move(list));
}

}  // namespace

const Value* ParamGroup::find(std::string_view key) const {
  auto found = find_key(options, key);
  return found == options.end() ? nullptr : &found->second;
}

void ParamGroup::set(std::string_view key, Value value) {
  auto found = find_key(options, key);
  if (found == options.end()) {
    options.emplace_back(key, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

const Value* SavedState::Parameter::option(std::string_view key) const {
  auto found = find_key(options, key);
  return found == options.end() ? nullptr : found->second;
}

const StateDict::Entry* SavedState::Parameter::field(std::string_view name) const {
  auto found = find_key(fields, name);
  return found == fields.end() ? nullptr : found->second;
}

SavedState::SavedState(const StateDict& dict, std::span<const std::string> names) {
  // What the dict calls parameters: their names, or where it counts them, their numbers.
  std::map<std::string, std::string, std::less<>> known;
  for (const std::string& name : names) known.emplace(name, name);
  std::map<std::string, std::vector<std::string>, std::less<>> groups;  // of the nested form
  for (const StateDict::Entry& entry : dict.entries()) {
    if (!entry.name.starts_with(kGroups)) continue;
    auto [group, key] = split_last(std::string_view(entry.name).substr(kGroups.size()));
    if (key != "params" || known.contains(group)) continue;
    const std::vector<Value>* items = entry.value() ? items_of(*entry.value()) : nullptr;
    if (!items) throw CorruptError("{} is no list of parameters", quote(entry.name));
    std::vector<std::string>& members = groups[std::string(group)];
    for (const Value& item : *items) {
      if (auto* name = item.get_if<std::string>()) {
        members.push_back(*name);
      } else if (auto* number = item.get_if<int64_t>()) {
        members.push_back(std::to_string(*number));
        if (*number >= 0 && *number < std::ssize(names))
          known.emplace(members.back(), names[static_cast<size_t>(*number)]);
      } else {
        throw CorruptError("{} lists a parameter that is neither a name nor a number: {}", quote(entry.name),
                           item.text());
      }
    }
  }
  for (const StateDict::Entry& entry : dict.entries()) {
    std::string_view name = entry.name;
    const bool is_state = name.starts_with(kState), is_option = name.starts_with(kGroups);
    if (is_state || is_option) {
      auto [owner, key] = split_last(name.substr(is_state ? kState.size() : kGroups.size()));
      if (auto found = known.find(owner); found != known.end()) {
        Parameter& parameter = parameters_[found->second];
        if (is_state) {
          parameter.fields.emplace_back(key, &entry);
        } else if (entry.value()) {
          parameter.options.emplace_back(key, entry.value());
        }
        continue;
      }
      if (auto group = groups.find(owner); is_option && group != groups.end() && entry.value()) {
        if (key == "params") continue;
        for (const std::string& member : group->second)
          if (auto found = known.find(member); found != known.end())
            parameters_[found->second].options.emplace_back(key, entry.value());
        continue;
      }
    }
    unknown_.push_back(entry.name);
  }
}

const SavedState::Parameter* SavedState::find(std::string_view name) const {
  auto found = parameters_.find(name);
  return found == parameters_.end() ? nullptr : &found->second;
}

std::optional<double> Optimizer::step(const Closure& closure) {
  std::optional<double> loss;
  if (closure) loss = closure();
  take_step();
  return loss;
}

void Optimizer::set_gradient(std::string_view name, const View& gradient) {
  for (OptimizerParameter* parameter : parameters()) {
    if (parameter->name != name) continue;
    if (gradient.data || !gradient.shape.empty()) {
      check_elements(gradient, numel(parameter->value.shape), "the gradient of " + quote(name));
      if (gradient.shape != parameter->value.shape)
        throw InvalidArgumentError("the gradient of {} is {}, and the parameter {}", quote(name),
                                   shape_text(gradient.shape), shape_text(parameter->value.shape));
    }
    parameter->gradient = gradient;
    return;
  }
  throw NotFoundError("the optimizer has no parameter {}", quote(name));
}

void Optimizer::set_param_groups(std::span<const ParamGroup> groups) {
  const std::vector<ParamGroup> own = param_groups();
  if (groups.size() != own.size())
    throw InvalidArgumentError("the optimizer has {} parameter groups, and is given {}", own.size(),
                               groups.size());
  for (size_t i = 0; i < own.size(); ++i) {
    if (groups[i].params.size() != own[i].params.size())
      throw InvalidArgumentError("parameter group {} has {} parameters, and is given {}", i,
                                 own[i].params.size(), groups[i].params.size());
    if (groups[i].params != own[i].params)
      throw InvalidArgumentError("parameter group {} is given other parameters, or in another order", i);
  }
  set_groups(groups, true);
  set_groups(groups, false);
}

StateDict Optimizer::state_dict(StateForm form) {
  StateDict dict;
  auto add = [&](KeyPath path, auto content) {
    std::string name = joined(path);
    if (dict.find(name))
      throw MismatchError("two optimizers, or two groups, have {} in their state", quote(name));
    if (form == StateForm::kFlattened) path = {std::move(name)};
    dict.add(std::move(path), std::move(content));
  };
  for (StateTensor& tensor : state())
    add({"state", tensor.parameter, tensor.field}, std::move(tensor.tensor));
  std::set<std::string> seen;
  int64_t number = 0;
  for (const ParamGroup& group : param_groups()) {
    for (const std::string& name : group.params)
      if (!seen.insert(name).second)
        throw MismatchError("two optimizers, or two groups, have the parameter {}", quote(name));
    if (form == StateForm::kNested) {
      for (const auto& [key, value] : group.options) add({"param_groups", number, key}, value);
      add({"param_groups", number, "params"}, name_list(group.params));
    } else {
      for (const std::string& name : group.params)
        for (const auto& [key, value] : group.options) add({"param_groups", name, key}, value);
    }
    ++number;
  }
  return dict;
}

LoadReport Optimizer::load_state_dict(const StateDict& dict, const StateLoadOptions& options) {
  std::vector<std::string> names;
  for (const OptimizerParameter* parameter : parameters()) names.push_back(parameter->name);
  SavedState saved(dict, names);
  LoadReport report;
  report.unexpected.assign(saved.unknown().begin(), saved.unknown().end());
  load(saved, options, report);
  return report;
}

void check_distinct(std::span<OptimizerParameter* const> parameters) {
  std::map<std::string_view, const OptimizerParameter*> by_name;
  std::map<const std::byte*, const OptimizerParameter*> by_memory;
  for (const OptimizerParameter* parameter : parameters) {
    if (!by_name.emplace(parameter->name, parameter).second)
      throw InvalidArgumentError("the parameter {} is given twice", quote(parameter->name));
    if (numel(parameter->value.shape) == 0) continue;
    auto [other, fresh] = by_memory.emplace(parameter->value.data, parameter);
    if (!fresh)
      throw InvalidArgumentError("{} and {} are the same memory: give tied parameters once",
                                 quote(other->second->name), quote(parameter->name));
  }
}

}  // namespace spolia
