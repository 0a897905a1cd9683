#include "spolia/optim/local_optimizer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/element_blocks.h"
#include "spolia/optim/group_options.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

const StateField* find_field(std::span<const StateField> fields, std::string_view name) {
  const auto found =
      std::find_if(fields.begin(), fields.end(), [&](const StateField& field) { return field.name == name; });
  return found == fields.end() ? nullptr : &*found;
}

/// A counter may have been saved as one number in any shape.
void check_saved_shape(const StateField& field, const StateDict::Entry& entry) {
  const Dims& shape = entry.tensor()->shape;
  if (field.name == kStepField ? numel(shape) != 1 : shape != field.whole)
    throw MismatchError("{} is {}, and the parameter takes {}", quote(entry.name), shape_text(shape),
                        shape_text(field.whole));
}

/// Casts the elements that `from` and `to` have in common; their number.
int64_t cast_common(const LocalTensor& from, const LocalTensor& to, int64_t rank) {
  auto cast_view = [](const Dims& sizes, const View& target, const std::byte* source, const View& of) {
    cast_strided(sizes, target.dtype, target.data, target.strides, of.dtype, source, of.strides);
    return numel(sizes);
  };
  if (!from.box && (from.layout && to.layout ? *from.layout == *to.layout : from.layout == to.layout)) {
    from.pieces(rank);  // checks
    return cast_view(to.memory.shape, to.memory, from.memory.data, from.memory);
  }
  int64_t count = 0;
  const std::vector<LocalTensor::Piece> targets = to.pieces(rank);
  for (const LocalTensor::Piece& piece : from.pieces(rank))
    for (const LocalTensor::Piece& own : targets) {
      const Box common = intersect(piece.global, own.global);
      if (common.empty()) continue;
      const std::byte* source = piece.view.data;
      View target = own.view;
      for (size_t d = 0; d < common.ndim(); ++d) {
        source += (common.offsets[d] - piece.global.offsets[d]) * piece.view.strides[d];
        target.data += (common.offsets[d] - own.global.offsets[d]) * target.strides[d];
      }
      count += cast_view(common.sizes, target, source, piece.view);
    }
  return count;
}

}  // namespace

void LocalOptimizer::add_groups(size_t count, std::vector<Slot> slots) {
  method_->check_options();
  groups_.resize(count);
  slots_ = std::move(slots);
  for (const Slot& slot : slots_) {
    const OptimizerParameter& parameter = slot.parameter;
    const int64_t elements = numel(parameter.value.shape);
    const std::string what = "the parameter " + quote(parameter.name);
    for (const View* view : {&parameter.gradient, &parameter.master})
      if (view->data && view->shape != parameter.value.shape)
        throw InvalidArgumentError("{} is {}, and its {} {}", what, shape_text(parameter.value.shape),
                                   view == &parameter.master ? "master" : "gradient",
                                   shape_text(view->shape));
    check_elements(parameter.value, elements, what);
    check_elements(parameter.gradient, elements, "the gradient of " + what, true);
    check_elements(parameter.master, elements, "the master of " + what, true);
    method_->check_parameter(slot);
    groups_[slot.group].params.push_back(parameter.name);
  }
  const std::vector<OptimizerParameter*> all = LocalOptimizer::parameters();
  check_distinct(all);
}

std::vector<StateField> LocalOptimizer::fields(const Slot& slot) const {
  const OptimizerParameter& parameter = slot.parameter;
  const bool narrow = element_bytes(parameter.value.dtype) < 4;
  const DType dtype = local_.state_dtype         ? *local_.state_dtype
                      : parameter.has_master()   ? parameter.master.dtype
                      : local_.masters && narrow ? DType::kFloat32
                                                 : parameter.value.dtype;
  std::vector<StateField> all = method_->fields(slot, dtype);
  all.push_back({std::string(kMasterField), DType::kFloat32, slot.whole});
  return all;
}

void LocalOptimizer::make_state(Slot& slot) {
  const View value = slot.value();
  for (const StateField& field : fields(slot)) {
    const bool is_master = field.name == kMasterField;
    if (is_master && (!local_.masters || slot.parameter.has_master() || element_bytes(value.dtype) >= 4))
      continue;
    if (!has(slot, field) || slot.find_state(field.name)) continue;
    slot.state.push_back({field, zeros(field.dtype, slot.shape_of(field))});
    if (is_master)
      cast(field.dtype, slot.state.back().tensor.view.data, value.dtype, value.data, numel(value.shape));
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
  for (Slot& slot : slots_) all.push_back(&slot.parameter);
  return all;
}

std::vector<ParamGroup> LocalOptimizer::param_groups() const {
  std::vector<ParamGroup> all;
  for (size_t g = 0; g < groups_.size(); ++g) {
    all.push_back({groups_[g].params, method_->options_as_values(g)});
    for (const auto& [key, value] : groups_[g].options) all.back().options.emplace_back(key, value);
  }
  return all;
}

void LocalOptimizer::take_step() {
  for (Slot& slot : slots_) {
    if (!slot.parameter.takes_part()) continue;
    make_state(slot);
    method_->begin_step(slot);
    method_->step(slot);
  }
}

void LocalOptimizer::allocate_state() {
  for (Slot& slot : slots_) make_state(slot);
}

std::vector<StateTensor> LocalOptimizer::state() {
  std::vector<StateTensor> all;
  for (const Slot& slot : slots_)
    for (const auto& [field, tensor] : slot.state)
      all.push_back({slot.parameter.name, field.name, as_tensor(slot, field, tensor.view)});
  return all;
}

std::vector<int64_t> LocalOptimizer::steps() const {
  std::set<int64_t> distinct;
  for (const Slot& slot : slots_)
    if (View step = slot.find(kStepField); step.data)
      distinct.insert(static_cast<int64_t>(read_scalar(step)));
  return {distinct.begin(), distinct.end()};
}

void LocalOptimizer::set_steps(int64_t steps) {
  for (const Slot& slot : slots_)
    if (View step = slot.find(kStepField); step.data) write_scalar(step, static_cast<double>(steps));
}

void LocalOptimizer::set_groups(std::span<const ParamGroup> groups, bool check_only) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    method_->set_options(g, groups[g], check_only);
    for (const auto& [key, value] : groups[g].options)
      if (!check_only && !is_known_option(key)) groups_[g].set(key, value);
  }
}

void LocalOptimizer::collect_wanted(const SavedState& saved, StateDict& wanted,
                                    std::vector<std::string>& unexpected) {
  for (Slot& slot : slots_) {
    slot.incoming.clear();
    const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
    if (!parameter) continue;
    const std::vector<StateField> known = fields(slot);
    for (const auto& [name, entry] : parameter->fields) {
      const StateField* field = find_field(known, name);
      if (!field) unexpected.push_back(entry->name);
      if (!field || !has(slot, *field) || !entry->tensor()) continue;
      check_saved_shape(*field, *entry);
      const LocalTensor& from = *entry->tensor();
      const Dims shape = name == kStepField ? from.shape : slot.shape_of(*field);
      slot.incoming.push_back({*field, zeros(from.memory.dtype, shape)});
      wanted.add(entry->name, as_tensor(slot, *field, slot.incoming.back().tensor.view));
    }
  }
}

void LocalOptimizer::load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) {
  // No state changes before all of it is checked and copied; which there is follows from the options.
  std::vector<ParamGroup> groups(groups_.size());
  for (const Slot& slot : slots_) {
    const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
    if (!parameter || parameter->option(method_->foreign_option())) continue;
    ParamGroup& group = groups[slot.group];
    for (const auto& [key, value] : parameter->options) {
      const Value* before = group.find(key);
      if (before && !(*before == *value))
        throw MismatchError(
            "the parameters of one group were saved with unequal options: {} of {} is {}, and {} before it",
            quote(key), quote(slot.parameter.name), value->text(), before->text());
      // A momentum is converted to the rule of this optimizer, which stays.
      if (!before && key != "momentum_rule") group.set(key, *value);
    }
  }
  set_groups(groups, true);
  const std::vector<ParamGroup> before = param_groups(), foreign = groups_;
  set_groups(groups, false);
  std::vector<std::vector<Slot::State>> all;
  try {
    all = loaded_state(saved, options, report);
  } catch (...) {
    set_groups(before, false);
    groups_ = foreign;
    throw;
  }
  for (size_t s = 0; s < slots_.size(); ++s) {
    if (!all[s].empty()) slots_[s].state = std::move(all[s]);
    slots_[s].incoming.clear();
  }
}

/// What this rank takes, by slot.
std::vector<std::vector<Slot::State>> LocalOptimizer::loaded_state(const SavedState& saved,
                                                                   const StateLoadOptions& options,
                                                                   LoadReport& report) {
  std::vector<std::vector<Slot::State>> all;
  for (Slot& slot : slots_) {
    std::vector<Slot::State>& state = all.emplace_back();
    const std::vector<StateField> known = fields(slot);
    const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
    if (parameter)
      for (const auto& [name, entry] : parameter->fields)
        if (!find_field(known, name)) report.unexpected.push_back(entry->name);
    for (const StateField& field : known) {
      if (!has(slot, field)) continue;
      const StateDict::Entry* entry = parameter ? parameter->field(field.name) : nullptr;
      if (!entry) {
        if (field.name != kMasterField)
          report.missing.push_back(fmt::format("state.{}.{}", slot.parameter.name, field.name));
        continue;
      }
      state.push_back({field, loaded(slot, field, *entry)});
      const View& view = state.back().tensor.view;
      if (double factor = method_->conversion(slot, field, *parameter, options); factor != 1)
        for_each_block<double>(
            numel(view.shape), std::array{update_run(view)},
            [&](const std::array<double*, 1>& p, int64_t n) { kernels<double>().scale(n, factor, p[0]); });
    }
  }
  return all;
}

/// What this rank takes of a saved tensor.
ZeroedTensor LocalOptimizer::loaded(Slot& slot, const StateField& field,
                                    const StateDict::Entry& entry) const {
  const bool is_step = field.name == kStepField;
  if (const Value* value = entry.value()) {
    if (!is_step) throw MismatchError("{} is no tensor: {}", quote(entry.name), value->text());
    ZeroedTensor made = zeros(field.dtype, field.whole);
    write_scalar(made.view, number_of(*value, field.name));
    return made;
  }
  const LocalTensor& from = *entry.tensor();
  check_saved_shape(field, entry);
  if (!can_cast(DType::kFloat32, from.memory.dtype))
    throw UnsupportedError("{} has to be floating-point numbers, and is {}", quote(entry.name),
                           name_of(from.memory.dtype));
  // Counters stay float32: narrower ones stop counting.
  const DType dtype = is_step || field.name == kMasterField ? field.dtype
                      : local_.state_dtype                  ? *local_.state_dtype
                                                            : from.memory.dtype;
  const Dims shape = slot.shape_of(field);
  for (auto& [_, tensor] : slot.incoming)  // it is there already
    if (tensor.view.data && tensor.view.data == from.memory.data && from.memory.dtype == dtype &&
        from.memory.shape == shape)
      return std::move(tensor);
  ZeroedTensor made = zeros(dtype, shape);
  if (is_step) {
    cast(dtype, made.view.data, from.memory.dtype, from.memory.data, 1);
    return made;
  }
  const int64_t count = cast_common(from, as_tensor(slot, field, made.view), rank_);
  if (count != numel(made.view.shape))
    throw MismatchError("{} has {} of the {} elements that rank {} takes", quote(entry.name), count,
                        numel(made.view.shape), rank_);
  return made;
}

namespace {

template <class Group>
std::vector<Slot> slots_of(std::vector<Group> groups) {
  std::vector<Slot> slots;
  for (size_t g = 0; g < groups.size(); ++g)
    for (OptimizerParameter& parameter : groups[g].parameters) {
      Slot& slot = slots.emplace_back();
      slot.group = g;
      slot.parameter = std::move(parameter);
      slot.whole = slot.parameter.value.shape;
    }
  return slots;
}

}  // namespace

AdamW::AdamW(std::vector<AdamWGroup> groups, const LocalOptions& options)
    : LocalOptimizer(std::make_unique<AdamWMethod>(options_of(groups)), options) {
  add_groups(groups.size(), slots_of(groups));
}

Muon::Muon(std::vector<MuonGroup> groups, const LocalOptions& options)
    : LocalOptimizer(std::make_unique<MuonMethod>(options_of(groups), options.threads, false), options) {
  add_groups(groups.size(), slots_of(groups));
}

}  // namespace spolia
