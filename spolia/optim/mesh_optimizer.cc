#include "spolia/optim/mesh_optimizer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/optim/mesh_tensors.h"
#include "spolia/tensor/cast.h"

namespace spolia {

MeshOptimizer::MeshOptimizer(World& world, std::unique_ptr<StepMethod> method,
                             std::vector<std::vector<MeshParameter>> groups, const MeshOptions& options)
    : LocalOptimizer(std::move(method), options.local), world_(world) {
  rank_ = world.rank();
  Group& all = *world.all();
  std::vector<MeshTensor> own;
  agree(all, "making an optimizer", [&] { own = take_over(std::move(groups)); });
  MeshPlan plan;
  agree(all, "planning an optimizer", [&] {
    const auto hosts = world.hosts();
    plan = plan_mesh(tensors_of_all(all, own), {.batch_bytes = options.batch_bytes,
                                                .hosts = {hosts.begin(), hosts.end()},
                                                .replica_groups = options.replica_groups});
  });
  std::map<std::string_view, size_t> by_name;
  for (size_t t = 0; t < plan.tensors.size(); ++t) by_name.emplace(plan.tensors[t].name, t);
  slot_numbers_.resize(plan.tensors.size());
  for (size_t s = 0; s < slots_.size(); ++s) {
    Place& place = places_[s];
    if (!slots_[s].layout) continue;
    place.owner = false;
    const auto found = by_name.find(slots_[s].parameter.name);
    if (found == by_name.end()) continue;  // nobody of its mesh lists it
    slot_numbers_[found->second] = s;
    place.frozen = plan.tensors[found->second].frozen;
    if (!plan.assignments[found->second]) continue;
    place.state_layout = plan.state_layout(found->second);
    const std::optional<LeadingPart> part = plan.owned_part(found->second, rank_);
    place.owner = part.has_value();
    slots_[s].part = part.value_or(LeadingPart{});
  }
  // A rank that does not list a parameter whose mesh it is in would leave the others waiting.
  agree(all, "making an optimizer", [&] {
    for (size_t t = 0; t < plan.tensors.size(); ++t)
      if (!slot_numbers_[t] && plan.tensors[t].layout->mesh().coordinates_of(rank_))
        throw InvalidArgumentError("the parameter {} is shared with this rank, which does not list it",
                                   quote(plan.tensors[t].name));
  });
  engine_ = std::make_unique<MeshEngine>(world, std::move(plan), options.engine);
}

/// Makes the slots and their places; what this rank knows of the parameters that it shares.
std::vector<MeshTensor> MeshOptimizer::take_over(std::vector<std::vector<MeshParameter>> groups) {
  std::vector<MeshTensor> shared;
  std::vector<Slot> slots;
  for (size_t g = 0; g < groups.size(); ++g)
    for (MeshParameter& given : groups[g]) {
      Slot& slot = slots.emplace_back();
      slot.group = g;
      slot.parameter = std::move(given.parameter);
      slot.whole = given.layout ? given.shape : slot.parameter.value.shape;
      slot.layout = given.layout;
      Place& place = places_.emplace_back();
      if (!slot.layout) continue;
      OptimizerParameter& parameter = slot.parameter;
      place.in_mesh = slot.layout->mesh().coordinates_of(rank_).has_value();
      if (!place.in_mesh) {
        parameter.value = dense_view<std::byte>(nullptr, parameter.value.dtype, std::array{int64_t{0}});
        parameter.gradient = parameter.master = {};
        continue;
      }
      const Dims local = slot.layout->shard(slot.whole, rank_).local_shape;
      if (parameter.value.shape != local)
        throw InvalidArgumentError("the parameter {} is {} on rank {}, and {} of {} is {} there",
                                   quote(parameter.name), shape_text(parameter.value.shape), rank_,
                                   slot.layout->text(), shape_text(slot.whole), shape_text(local));
      const DType dtype = parameter.has_master() ? parameter.master.dtype : parameter.value.dtype;
      shared.push_back({.name = parameter.name,
                        .dtype = dtype,
                        .update = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
                        .shape = slot.whole,
                        .layout = slot.layout,
                        .frozen = parameter.frozen,
                        .matrices = {},
                        .row_moments = method_->has_row_moments(g)});
      if (method_->has_matrices()) shared.back().matrices = parameter.matrix;
    }
  add_groups(groups.size(), std::move(slots));
  return shared;
}

bool MeshOptimizer::has(const Slot& slot, const StateField& field) const {
  const Place& place = place_of(slot);
  return !slot.parameter.frozen && place.in_mesh && (place.owner || field.name == kStepField);
}

LocalTensor MeshOptimizer::as_tensor(const Slot& slot, const StateField& field, const View& memory) const {
  const Place& place = place_of(slot);
  if (field.name == kStepField || !slot.layout) return plain_tensor(memory);
  std::shared_ptr<const Layout> layout = materialised_ ? slot.layout : place.state_layout;
  if (!field.sharded) {
    std::vector<Placement> placements(layout->mesh().ndim(), Replicate{});
    if (!materialised_ && !slot.part.is_all()) placements.back() = layout->placements().back();
    layout = std::make_shared<const Layout>(layout->mesh(), std::move(placements));
  }
  return sharded_tensor(memory, field.whole, std::move(layout));
}

void MeshOptimizer::take_step() {
  release();
  engine_->guarded([&] {
    for (Slot& slot : slots_) {
      const Place& place = place_of(slot);
      if (slot.layout && place.in_mesh && slot.parameter.frozen != place.frozen)
        throw InvalidArgumentError(
            "the parameter {} was {}frozen when the optimizer was made; on a mesh it stays so",
            quote(slot.parameter.name), place.frozen ? "" : "not ");
      if (slot.parameter.frozen || !place.in_mesh || (!slot.layout && !slot.parameter.has_gradient()))
        continue;
      make_state(slot);
      method_->begin_step(slot);
      if (!slot.layout) method_->step(slot);
    }
  });
  for (size_t group = 0; group < plan().groups.size(); ++group) engine_->flush_group(group, *this);
  engine_->wait_all();
}

void MeshOptimizer::fill_update(size_t tensor, const View& update) {
  method_->fill_update(slot_of(tensor), update);
}

void MeshOptimizer::compute(size_t tensor, const MatrixUnit& unit, const View& matrix,
                            const View& row_moments) {
  method_->orthogonalise(slot_of(tensor), unit, matrix, row_moments);
}

void MeshOptimizer::apply(size_t tensor, const View& update) { method_->apply(slot_of(tensor), update); }

View MeshOptimizer::result(size_t tensor) {
  const OptimizerParameter& parameter = slot_of(tensor).parameter;
  return parameter.has_master() ? parameter.master : parameter.value;
}

View MeshOptimizer::row_moments(size_t tensor) { return slot_of(tensor).find(kMomentsField); }

void MeshOptimizer::received(size_t tensor, const LeadingPart& part) {
  const OptimizerParameter& parameter = slot_of(tensor).parameter;
  if (!parameter.master.data) return;
  const View value = part.of(parameter.value), master = part.of(parameter.master);
  cast(value.dtype, value.data, master.dtype, master.data, numel(value.shape));
}

void MeshOptimizer::release() {
  materialised_ = false;
  copies_.clear();
}

void MeshOptimizer::allocate_state() {
  release();
  LocalOptimizer::allocate_state();
}

std::vector<StateTensor> MeshOptimizer::state() {
  if (!materialised_) return LocalOptimizer::state();
  std::vector<StateTensor> all;
  for (size_t s = 0; s < slots_.size(); ++s) {
    auto add = [&](const Slot::State& own) {
      all.push_back(
          {slots_[s].parameter.name, own.field.name, as_tensor(slots_[s], own.field, own.tensor.view)});
    };
    const std::vector<Slot::State>& copies = copies_[s];
    for (const Slot::State& own : slots_[s].state)
      if (std::none_of(copies.begin(), copies.end(),
                       [&](const Slot::State& copy) { return copy.field.name == own.field.name; }))
        add(own);
    for (const Slot::State& copy : copies) add(copy);
  }
  return all;
}

void MeshOptimizer::materialise() {
  if (materialised_) return;
  // The first of the owning ranks tells what there is of each tensor: which of fields(), in which dtype.
  std::vector<int64_t> own;
  for (size_t t = 0; t < slot_numbers_.size(); ++t) {
    if (!slot_numbers_[t] || !plan().assignments[t]) continue;
    const Slot& slot = slot_of(t);
    if (place_of(slot).state_layout->mesh().ranks()[0] != rank_) continue;
    const std::vector<StateField> known = fields(slot);
    for (size_t f = 0; f < known.size(); ++f)
      if (const Slot::State* state = slot.find_state(known[f].name); state && known[f].name != kStepField)
        own.insert(own.end(), {static_cast<int64_t>(t), static_cast<int64_t>(f),
                               static_cast<int64_t>(state->tensor.view.dtype)});
  }
  copies_ = std::vector<std::vector<Slot::State>>(slots_.size());
  for (const std::vector<int64_t>& told : all_gather_lists(*world_.all(), own))
    for (size_t i = 0; i < told.size(); i += 3) {
      const auto t = static_cast<size_t>(told[i]);
      if (!slot_numbers_[t] || !place_of(slot_of(t)).in_mesh) continue;
      const Slot& slot = slot_of(t);
      StateField field = fields(slot)[static_cast<size_t>(told[i + 1])];
      const bool owner = place_of(slot).owner;
      View view = slot.find(field.name);
      if (!owner || !slot.part.is_all()) {
        ZeroedTensor copy = zeros(static_cast<DType>(told[i + 2]), slot.shard_of(field));
        if (const View part = slot.part.of(copy.view); owner && part.bytes() > 0)
          std::memcpy(part.data, view.data, static_cast<size_t>(part.bytes()));
        view = copy.view;
        copies_[*slot_numbers_[t]].push_back({std::move(field), std::move(copy)});
      }
      engine_->send_to_replicas(t, view);
    }
  engine_->wait_all();
  materialised_ = true;
}

void MeshOptimizer::require_equal_replicas() {
  // Of each tensor a hash, and the lowest rank of its column.
  std::vector<int64_t> own;
  for (size_t t = 0; t < slot_numbers_.size(); ++t) {
    if (!slot_numbers_[t] || !place_of(slot_of(t)).in_mesh) continue;
    const std::vector<int64_t> column = plan().tensors[t].layout->replicas(rank_);
    const OptimizerParameter& parameter = slot_of(t).parameter;
    uint64_t hash = 0;
    for (const View& view : {parameter.value, parameter.master})
      if (view.data && view.bytes() > 0)
        hash = hash * 31 + xxh3_64(std::span<const std::byte>(view.data, static_cast<size_t>(view.bytes())));
    own.insert(own.end(), {static_cast<int64_t>(t), *std::min_element(column.begin(), column.end()),
                           static_cast<int64_t>(hash)});
  }
  std::map<std::pair<int64_t, int64_t>, std::pair<int64_t, size_t>> seen;
  const auto all = all_gather_lists(*world_.all(), own);
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (size_t i = 0; i < all[rank].size(); i += 3) {
      const auto [found, fresh] =
          seen.try_emplace({all[rank][i], all[rank][i + 1]}, std::pair{all[rank][i + 2], rank});
      if (!fresh && found->second.first != all[rank][i + 2])
        throw MismatchError("the ranks {} and {} are replicas of the parameter {}, and differ",
                            found->second.second, rank,
                            quote(plan().tensors[static_cast<size_t>(all[rank][i])].name));
    }
}

void MeshOptimizer::collect_wanted(const SavedState& saved, StateDict& wanted,
                                   std::vector<std::string>& unexpected) {
  release();
  LocalOptimizer::collect_wanted(saved, wanted, unexpected);
}

void MeshOptimizer::load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) {
  release();
  LocalOptimizer::load(saved, options, report);
}

namespace {

template <class Group>
std::vector<std::vector<MeshParameter>> parameters_of(std::vector<Group>& groups) {
  std::vector<std::vector<MeshParameter>> all;
  for (Group& group : groups) all.push_back(std::move(group.parameters));
  return all;
}

}  // namespace

MeshAdamW::MeshAdamW(World& world, std::vector<MeshAdamWGroup> groups, const MeshOptions& options)
    : MeshOptimizer(world, std::make_unique<AdamWMethod>(options_of(groups)), parameters_of(groups),
                    options) {}

MeshMuon::MeshMuon(World& world, std::vector<MeshMuonGroup> groups, const MeshOptions& options)
    : MeshOptimizer(world, std::make_unique<MuonMethod>(options_of(groups), options.local.threads, true),
                    parameters_of(groups), options) {}

}  // namespace spolia
