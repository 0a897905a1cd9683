#include "spolia/optim/mesh_optimizer.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"
#include "spolia/optim/element_blocks.h"
#include "spolia/optim/group_options.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr std::string_view kStep = "step", kMoments = "row_moments", kMaster = "master_param",
                           kMomentum = "momentum_buffer";

std::pair<Buffer, View> zeros(DType dtype, const Dims& shape) {
  Buffer buffer(byte_size(dtype, shape));
  if (buffer.size() > 0) std::memset(buffer.data(), 0, static_cast<size_t>(buffer.size()));
  View view = dense_view(buffer.data(), dtype, shape);
  return {std::move(buffer), std::move(view)};
}

DType dtype_of(std::string_view name) {
  if (const auto dtype = dtype_from_name(name)) return *dtype;
  throw CorruptError("{} is no dtype", quote(name));
}

double read_scalar(const View& view) {
  double value = 0;
  cast(DType::kFloat64, &value, view.dtype, view.data, 1);
  return value;
}

// What ranks tell each other of their parameters.

std::string packed(const std::vector<MeshTensor>& tensors) {
  Packer packer;
  packer.number(std::ssize(tensors));
  for (const MeshTensor& tensor : tensors) {
    packer.text(tensor.name);
    packer.text(name_of(tensor.dtype));
    packer.text(name_of(tensor.update));
    packer.numbers(tensor.shape);
    packer.text(tensor.layout->text());
    packer.number(tensor.frozen);
    packer.number(tensor.row_moments);
    packer.number(tensor.matrices ? static_cast<int64_t>(tensor.matrices->kind) : -1);
    if (!tensor.matrices) continue;
    packer.number(std::ssize(tensor.matrices->parts));
    for (const RowPart& part : tensor.matrices->parts) {
      packer.number(std::ssize(part));
      for (const RowRange& range : part) {
        packer.number(range.begin);
        packer.number(range.end);
      }
    }
  }
  return packer.take();
}

std::vector<MeshTensor> unpacked(std::string_view bytes) {
  Unpacker in(bytes);
  std::map<std::string, std::shared_ptr<const Layout>> layouts;
  std::vector<MeshTensor> tensors(in.count());
  for (MeshTensor& tensor : tensors) {
    tensor.name = in.text();
    tensor.dtype = dtype_of(in.text());
    tensor.update = dtype_of(in.text());
    tensor.shape.resize(in.count());
    for (int64_t& size : tensor.shape) size = in.number();
    const std::string text(in.text());
    std::shared_ptr<const Layout>& layout = layouts[text];
    if (!layout) layout = std::make_shared<const Layout>(parse_layout(text));
    tensor.layout = layout;
    tensor.frozen = in.number() != 0;
    tensor.row_moments = in.number() != 0;
    const int64_t kind = in.number();
    if (kind < 0) continue;
    MatrixRule& rule = tensor.matrices.emplace();
    rule.kind = static_cast<MatrixKind>(kind);
    rule.parts.resize(in.count());
    for (RowPart& part : rule.parts) {
      part.resize(in.count());
      for (RowRange& range : part) {
        range.begin = in.number();
        range.end = in.number();
      }
    }
  }
  return tensors;
}

bool same(const MeshTensor& a, const MeshTensor& b) {
  return a.dtype == b.dtype && a.update == b.update && a.shape == b.shape && *a.layout == *b.layout &&
         a.frozen == b.frozen && a.row_moments == b.row_moments && a.matrices == b.matrices;
}

/// The parameters of all ranks, in the order in which ranks list them, lower ranks first. Each distinct list
/// is sent once.
std::vector<MeshTensor> union_of(Group& all, const std::vector<MeshTensor>& own) {
  const std::string text = packed(own);
  const std::vector<int64_t> hashes = all_gather_number(all, static_cast<int64_t>(xxh3_64(bytes_of(text))));
  const int64_t mine = hashes[static_cast<size_t>(all.place())];
  const bool first = std::find(hashes.begin(), hashes.end(), mine) - hashes.begin() == all.place();
  std::vector<MeshTensor> result;
  std::map<std::string, size_t> by_name;
  const std::vector<std::string> texts = all_gather_texts(all, first ? text : "");
  for (size_t place = 0; place < texts.size(); ++place) {
    if (texts[place].empty()) continue;
    for (MeshTensor& tensor : unpacked(texts[place])) {
      const auto [found, fresh] = by_name.emplace(tensor.name, result.size());
      if (fresh) {
        result.push_back(std::move(tensor));
      } else if (!same(result[found->second], tensor)) {
        throw MismatchError("rank {} describes the parameter {} otherwise than a lower rank",
                            all.ranks()[place], quote(tensor.name));
      }
    }
  }
  return result;
}

}  // namespace

void MeshOptimizer::build(std::vector<std::vector<MeshParameter>> groups, bool matrices,
                          const std::vector<bool>& row_moments) {
  const int64_t rank = world_.rank();
  std::vector<MeshTensor> own;
  agree(*world_.all(), "making an optimizer", [&] {
    for (size_t g = 0; g < groups.size(); ++g) {
      std::vector<OptimizerParameter> parameters;
      places_.emplace_back();
      for (MeshParameter& given : groups[g]) {
        OptimizerParameter& parameter = given.parameter;
        Place& place = places_.back().emplace_back();
        place.whole = given.layout ? given.shape : parameter.value.shape;
        place.layout = given.layout;
        if (matrices) {
          try {
            place.units = matrix_units(parameter.matrix, place.whole);
          } catch (const Error& error) {
            rethrow_with_context(error, "the parameter " + quote(parameter.name));
          }
        }
        if (given.layout) {
          place.in_mesh = given.layout->mesh().coordinates_of(rank).has_value();
          const DType dtype = parameter.master.data ? parameter.master.dtype : parameter.value.dtype;
          if (!place.in_mesh) {
            parameter.value = dense_view<std::byte>(nullptr, parameter.value.dtype, std::array{int64_t{0}});
            parameter.gradient = parameter.master = {};
          } else if (const Dims local = given.layout->shard(given.shape, rank).local_shape;
                     parameter.value.shape != local) {
            throw InvalidArgumentError("the parameter {} is {} on rank {}, and {} of {} is {} there",
                                       quote(parameter.name), shape_text(parameter.value.shape), rank,
                                       given.layout->text(), shape_text(given.shape), shape_text(local));
          }
          MeshTensor tensor{.name = parameter.name,
                            .dtype = dtype,
                            .update = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
                            .shape = given.shape,
                            .layout = given.layout,
                            .frozen = parameter.frozen,
                            .matrices = {},
                            .row_moments = row_moments[g]};
          if (matrices) tensor.matrices = parameter.matrix;
          if (place.in_mesh) own.push_back(std::move(tensor));
        } else {
          place.owner = !parameter.frozen;
        }
        parameters.push_back(std::move(parameter));
      }
      add_group(std::move(parameters));
    }
  });
  MeshPlan plan;
  agree(*world_.all(), "planning an optimizer", [&] {
    const auto hosts = world_.hosts();
    plan = plan_mesh(union_of(*world_.all(), own), {.batch_bytes = options_.batch_bytes,
                                                    .hosts = {hosts.begin(), hosts.end()},
                                                    .replica_groups = options_.replica_groups});
  });
  slots_.resize(plan.tensors.size());
  std::map<std::string_view, size_t> by_name;
  for (size_t t = 0; t < plan.tensors.size(); ++t) by_name.emplace(plan.tensors[t].name, t);
  for (size_t g = 0; g < groups_.size(); ++g)
    for (size_t s = 0; s < groups_[g].slots.size(); ++s) {
      Place& place = places_[g][s];
      if (!place.layout) continue;
      const auto found = by_name.find(groups_[g].slots[s].parameter.name);
      place.owner = false;
      if (found == by_name.end()) continue;  // nobody of its mesh lists it
      place.tensor = found->second;
      slots_[found->second] = SlotPlace{g, s};
      if (!plan.assignments[found->second]) continue;
      place.state_layout = plan.state_layout(found->second);
      place.owner = plan.has_state(found->second, rank);
    }
  // A rank that does not list a parameter whose mesh it is in would leave the others waiting.
  agree(*world_.all(), "making an optimizer", [&] {
    for (size_t t = 0; t < plan.tensors.size(); ++t)
      if (!slots_[t] && plan.tensors[t].layout->mesh().coordinates_of(rank))
        throw InvalidArgumentError("the parameter {} is shared with this rank, which does not list it",
                                   quote(plan.tensors[t].name));
  });
  engine_ = std::make_unique<MeshEngine>(world_, std::move(plan), options_.engine);
}

MeshOptimizer::Place& MeshOptimizer::place_of(size_t group, const Slot& slot) {
  return places_[group][static_cast<size_t>(&slot - groups_[group].slots.data())];
}
const MeshOptimizer::Place& MeshOptimizer::place_of(size_t group, const Slot& slot) const {
  return places_[group][static_cast<size_t>(&slot - groups_[group].slots.data())];
}

LocalOptimizer::Slot& MeshOptimizer::slot_of(size_t tensor, size_t& group) {
  const SlotPlace& at = *slots_[tensor];
  group = at.group;
  return groups_[at.group].slots[at.slot];
}

std::vector<LocalOptimizer::Field> MeshOptimizer::fields(size_t group, const Slot& slot) const {
  const Place& place = place_of(group, slot);
  std::vector<Field> all;
  if (slot.parameter.frozen || !place.in_mesh) return all;
  all = owned_fields(group, slot, place.whole);
  if (!place.owner) std::erase_if(all, [](const Field& field) { return field.name != kStep; });
  return all;
}

void MeshOptimizer::allocate_state() {
  for (size_t g = 0; g < groups_.size(); ++g)
    for (Slot& slot : groups_[g].slots) {
      if (slot.parameter.frozen) continue;
      if (place_of(g, slot).owner) {
        make_state(g, slot);
        continue;
      }
      for (const Field& field : fields(g, slot))  // counters
        if (!slot.find(field.name).data) slot.state.emplace_back(field.name, zeros(field.dtype, field.shape));
    }
}

void MeshOptimizer::take_step() {
  release();
  allocate_state();
  for (size_t g = 0; g < groups_.size(); ++g)
    for (Slot& slot : groups_[g].slots) {
      const Place& place = place_of(g, slot);
      if (slot.parameter.frozen || !place.in_mesh) continue;
      if (!place.layout && !slot.parameter.has_gradient()) continue;
      begin_step(g, slot);
      if (!place.layout) step_alone(g, slot);
    }
  for (size_t group = 0; group < plan().groups.size(); ++group) engine_->flush_group(group, *this);
  engine_->wait_all();
}

void MeshOptimizer::fill_update(size_t tensor, const View& update) {
  size_t group;
  Slot& slot = slot_of(tensor, group);
  fill(group, slot, update);
}

void MeshOptimizer::compute(size_t tensor, size_t unit, const View& matrix, const View& row_moments) {
  size_t group;
  Slot& slot = slot_of(tensor, group);
  orthogonalise(group, slot, place_of(group, slot).units[unit], matrix, row_moments);
}

void MeshOptimizer::apply(size_t tensor, const View& update) {
  size_t group;
  Slot& slot = slot_of(tensor, group);
  apply_step(group, slot, update);
}

View MeshOptimizer::result(size_t tensor) {
  size_t group;
  const OptimizerParameter& parameter = slot_of(tensor, group).parameter;
  return parameter.master.data ? parameter.master : parameter.value;
}

View MeshOptimizer::row_moments(size_t tensor) {
  size_t group;
  return slot_of(tensor, group).find(kMoments);
}

void MeshOptimizer::received(size_t tensor) {
  size_t group;
  const OptimizerParameter& parameter = slot_of(tensor, group).parameter;
  if (!parameter.master.data) return;
  cast(parameter.value.dtype, parameter.value.data, parameter.master.dtype, parameter.master.data,
       numel(parameter.value.shape));
}

LocalTensor MeshOptimizer::as_tensor(const Place& place, std::string_view field, const View& memory) const {
  if (field == kStep || !place.layout) return plain_tensor(memory);
  const std::shared_ptr<const Layout>& layout = materialised_ ? place.layout : place.state_layout;
  if (field != kMoments) return sharded_tensor(memory, place.whole, layout);
  return sharded_tensor(memory, memory.shape,
                        std::make_shared<const Layout>(
                            layout->mesh(), std::vector<Placement>(layout->mesh().ndim(), Replicate{})));
}

std::vector<StateTensor> MeshOptimizer::state() {
  std::vector<StateTensor> all;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (Slot& slot : groups_[g].slots)
      for (auto& [name, tensor] : slot.state)
        all.push_back({slot.parameter.name, name, as_tensor(place_of(g, slot), name, tensor.second)});
  return all;
}

void MeshOptimizer::materialise() {
  if (materialised_) return;
  // What owners have is told by the first rank of each owning row.
  const int64_t rank = world_.rank();
  Packer packer;
  for (size_t t = 0; t < slots_.size(); ++t) {
    if (!plan().assignments[t]) continue;
    const MeshPlan::Assignment& assignment = *plan().assignments[t];
    if (plan().groups[assignment.group].rows[assignment.owners[0].row][0] != rank) continue;
    size_t group;
    for (const auto& [name, tensor] : slot_of(t, group).state) {
      if (name == kStep) continue;
      packer.number(static_cast<int64_t>(t));
      packer.text(name);
      packer.text(name_of(tensor.second.dtype));
    }
  }
  std::map<size_t, std::vector<std::pair<std::string, DType>>> there;
  for (const std::string& text : all_gather_texts(*world_.all(), packer.take()))
    for (Unpacker in(text); !in.at_end();) {
      const auto tensor = static_cast<size_t>(in.number());
      std::string name(in.text());
      there[tensor].emplace_back(std::move(name), dtype_of(in.text()));
    }
  for (const auto& [t, fields] : there) {
    if (!slots_[t]) continue;
    size_t group;
    Slot& slot = slot_of(t, group);
    const Place& place = place_of(group, slot);
    if (!place.in_mesh) continue;
    for (const auto& [name, dtype] : fields) {
      const bool listed = std::any_of(slot.state.begin(), slot.state.end(),
                                      [&, &key = name](const auto& tensor) { return tensor.first == key; });
      if (!listed)
        slot.state.emplace_back(
            name, zeros(dtype, name == kMoments ? row_moments_shape(slot.parameter.matrix, place.whole)
                                                : slot.parameter.value.shape));
      engine_->send_to_replicas(t, slot.find(name));
    }
  }
  engine_->wait_all();
  materialised_ = true;
}

void MeshOptimizer::release() {
  if (!materialised_) return;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (Slot& slot : groups_[g].slots)
      if (!place_of(g, slot).owner)
        std::erase_if(slot.state, [](const auto& tensor) { return tensor.first != kStep; });
  materialised_ = false;
}

void MeshOptimizer::require_equal_replicas() {
  // Of each tensor a hash, and the lowest rank of its column.
  std::vector<int64_t> own;
  for (size_t t = 0; t < slots_.size(); ++t) {
    if (!slots_[t]) continue;
    size_t group;
    const Slot& slot = slot_of(t, group);
    if (!place_of(group, slot).in_mesh) continue;
    const std::vector<int64_t> column = plan().tensors[t].layout->replicas(world_.rank());
    uint64_t hash = 0;
    for (const View& view : {slot.parameter.value, slot.parameter.master})
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

void MeshOptimizer::collect_wanted(const SavedState& saved, std::vector<WantedTensor>& wanted,
                                   std::vector<std::string>& unexpected) {
  release();
  for (size_t g = 0; g < groups_.size(); ++g)
    for (const Slot& slot : groups_[g].slots) {
      const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
      if (!parameter) continue;
      const Place& place = place_of(g, slot);
      std::vector<Field> known = owned_fields(g, slot, place.whole);
      known.push_back({std::string(kMaster), DType::kFloat32, slot.parameter.value.shape});
      for (const auto& [name, entry] : parameter->fields) {
        const auto field = std::find_if(known.begin(), known.end(),
                                        [&, &key = name](const Field& f) { return f.name == key; });
        if (field == known.end()) unexpected.push_back(entry->name);
        const bool has = !slot.parameter.frozen && place.in_mesh && (place.owner || name == kStep);
        if (field == known.end() || !has || !entry->tensor()) continue;
        const LocalTensor& from = *entry->tensor();
        check_saved_shape(slot, place, name, *entry);
        auto [buffer, view] = zeros(from.memory.dtype, name == kStep ? from.shape : field->shape);
        wanted.push_back({entry->name, as_tensor(place, name, view), std::move(buffer)});
      }
    }
}

/// Where it is another, MismatchError.
void MeshOptimizer::check_saved_shape(const Slot& slot, const Place& place, std::string_view field,
                                      const StateDict::Entry& entry) {
  const Dims& shape = entry.tensor()->shape;
  if (field == kStep && numel(shape) == 1) return;
  const Dims wanted = field == kStep      ? Dims{}
                      : field == kMoments ? row_moments_shape(slot.parameter.matrix, place.whole)
                                          : place.whole;
  if (shape != wanted)
    throw MismatchError("{} is {}, and the parameter takes {}", quote(entry.name), shape_text(shape),
                        shape_text(wanted));
}

void MeshOptimizer::load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) {
  release();
  // The same dict with this rank's shards in place of whatever each tensor has of the whole.
  const int64_t rank = world_.rank();
  StateDict local;
  std::vector<Buffer> memory;
  std::vector<std::string> names;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (Slot& slot : groups_[g].slots) {
      names.push_back(slot.parameter.name);
      const SavedState::Parameter* parameter = saved.find(slot.parameter.name);
      if (!parameter) continue;
      const Place& place = place_of(g, slot);
      for (const auto& [key, value] : parameter->options)
        local.add(KeyPath{fmt::format("param_groups.{}.{}", slot.parameter.name, key)}, *value);
      const bool has_state = !slot.parameter.frozen && place.in_mesh;
      for (const auto& [field, entry] : parameter->fields) {
        StateDict::Entry copy = *entry;
        copy.name = fmt::format("state.{}.{}", slot.parameter.name, field);
        copy.path = {copy.name};
        if (!has_state || (!place.owner && field != kStep)) continue;
        LocalTensor* tensor = copy.tensor();
        if (tensor && field != kStep && place.layout && tensor->layout &&
            *tensor->layout == *place.state_layout && tensor->shape == place.whole) {
          tensor->pieces(rank);  // checks
          copy.content = plain_tensor(tensor->memory);
        } else if (tensor && field != kStep && place.layout) {
          const bool moments = field == kMoments;
          check_saved_shape(slot, place, field, *entry);
          auto [buffer, view] =
              zeros(tensor->memory.dtype, moments ? tensor->shape : slot.parameter.value.shape);
          LocalTensor target = as_tensor(place, field, view);
          int64_t filled = 0;
          for (const LocalTensor::Piece& from : tensor->pieces(rank))
            for (const LocalTensor::Piece& to : target.pieces(rank)) {
              const Box common = intersect(from.global, to.global);
              if (common.empty()) continue;
              const std::byte* source = from.view.data;
              std::byte* destination = to.view.data;
              for (size_t d = 0; d < common.ndim(); ++d) {
                source += (common.offsets[d] - from.global.offsets[d]) * from.view.strides[d];
                destination += (common.offsets[d] - to.global.offsets[d]) * to.view.strides[d];
              }
              copy_strided(common.sizes, element_bytes(view.dtype), destination, to.view.strides, source,
                           from.view.strides);
              filled += common.numel();
            }
          if (filled != numel(view.shape))
            throw MismatchError("{} has {} of the {} elements that rank {} takes", quote(entry->name), filled,
                                numel(view.shape), rank);
          copy.content = plain_tensor(view);
          memory.push_back(std::move(buffer));
        }
        local.add(std::move(copy));
      }
    }
  LocalOptimizer::load(SavedState(local, names), options, report);
}

// AdamW.

namespace {
template <class Groups>
auto parameters_of(Groups& groups) {
  std::vector<std::vector<MeshParameter>> all;
  for (auto& group : groups) all.push_back(std::move(group.parameters));
  return all;
}
}  // namespace

MeshAdamW::MeshAdamW(World& world, std::vector<MeshAdamWGroup> groups, const MeshOptions& options)
    : MeshOptimizer(world, options) {
  for (const MeshAdamWGroup& group : groups) {
    check(group.options);
    options_.push_back(group.options);
  }
  build(parameters_of(groups), false, std::vector<bool>(options_.size()));
}

std::vector<LocalOptimizer::Field> MeshAdamW::owned_fields(size_t group, const Slot& slot,
                                                           const Dims&) const {
  const DType dtype = state_dtype(slot);
  const Dims& shape = slot.parameter.value.shape;
  std::vector<Field> all{
      {std::string(kStep), DType::kFloat32, {}}, {"exp_avg", dtype, shape}, {"exp_avg_sq", dtype, shape}};
  if (options_[group].amsgrad) all.push_back({"max_exp_avg_sq", dtype, shape});
  return all;
}

std::vector<std::pair<std::string, Value>> MeshAdamW::option_values(size_t group) const {
  return to_values(options_[group]);
}

void MeshAdamW::set_options(size_t group, const ParamGroup& values, bool check_only) {
  AdamWOptions options = with_values(options_[group], values);
  if (!check_only) options_[group] = options;
}

void MeshAdamW::begin_step(size_t, Slot& slot) {
  const View step = slot.find(kStep);
  const double next = read_scalar(step) + 1;
  cast(step.dtype, step.data, DType::kFloat64, &next, 1);
}

void MeshAdamW::apply_step(size_t group, Slot& slot, const View&) {
  ConstView gradient = slot.parameter.gradient;
  if (!slot.parameter.has_gradient()) {
    const int64_t bytes = byte_size(DType::kFloat32, slot.parameter.value.shape);
    if (zeros_.size() < bytes) {
      zeros_ = Buffer(bytes);
      std::memset(zeros_.data(), 0, static_cast<size_t>(bytes));
    }
    gradient = dense_view(zeros_.data(), DType::kFloat32, slot.parameter.value.shape);
  }
  adamw_step(options_[group], static_cast<int64_t>(read_scalar(slot.find(kStep))),
             {slot.parameter.value, master_of(slot), gradient, slot.find("exp_avg"), slot.find("exp_avg_sq"),
              slot.find("max_exp_avg_sq")});
}

// Muon.

MeshMuon::MeshMuon(World& world, std::vector<MeshMuonGroup> groups, const MeshOptions& options)
    : MeshOptimizer(world, options), calculator_(options.local.threads) {
  std::vector<bool> row_moments;
  for (MeshMuonGroup& group : groups) {
    check(group.options);
    row_moments.push_back(group.options.normuon.has_value());
    options_.push_back(group.options);
  }
  build(parameters_of(groups), true, row_moments);
}

std::vector<LocalOptimizer::Field> MeshMuon::owned_fields(size_t group, const Slot& slot,
                                                          const Dims& whole) const {
  std::vector<Field> all{{std::string(kMomentum), state_dtype(slot), slot.parameter.value.shape}};
  if (options_[group].normuon)
    all.push_back({std::string(kMoments), DType::kFloat32, row_moments_shape(slot.parameter.matrix, whole)});
  return all;
}

std::vector<std::pair<std::string, Value>> MeshMuon::option_values(size_t group) const {
  return to_values(options_[group]);
}

void MeshMuon::set_options(size_t group, const ParamGroup& values, bool check_only) {
  MuonOptions options = with_values(options_[group], values);
  if (options.normuon.has_value() != options_[group].normuon.has_value())
    throw InvalidArgumentError("NorMuon is chosen when the optimizer is made, not later");
  if (!check_only) options_[group] = std::move(options);
}

double MeshMuon::conversion(size_t group, std::string_view field, const SavedState::Parameter& saved,
                            const StateLoadOptions& options) const {
  if (field != kMomentum) return 1;
  const MomentumRule from = momentum_rule_of(saved.option("momentum_rule")).value_or(options.momentum_rule);
  const Value* momentum = saved.option("momentum");
  return momentum_conversion(from, options_[group].momentum_rule,
                             momentum ? number_of(*momentum, "momentum") : options_[group].momentum);
}

void MeshMuon::fill(size_t group, Slot& slot, const View& update) {
  const ConstView gradient = slot.parameter.has_gradient() ? ConstView(slot.parameter.gradient) : ConstView();
  muon_momentum(options_[group], gradient, slot.find(kMomentum), update);
}

void MeshMuon::orthogonalise(size_t group, Slot& slot, const MatrixUnit& unit, const View& matrix,
                             const View& row_moments) {
  calculator_.update(options_[group], MatrixRule{}, matrix, matrix, row_moments);
  if (hook_) hook_(slot.parameter, unit, matrix);
}

void MeshMuon::apply_step(size_t group, Slot& slot, const View& update) {
  muon_apply(options_[group], slot.parameter.value, master_of(slot), update);
}

/// Each matrix of a whole update to the hook, and back.
void MeshMuon::show_units(size_t group, const Slot& slot, const View& update) {
  const int64_t width = element_bytes(update.dtype);
  const RankShard whole = Layout(DeviceMesh(Dims{}), {}).shard(update.shape, 0);
  auto in_bytes = [&](Dims strides) {
    for (int64_t& stride : strides) stride *= width;
    return strides;
  };
  for (const MatrixUnit& unit : units(group, slot)) {
    auto [buffer, matrix] = zeros(update.dtype, Dims{unit.rows, unit.columns});
    for (bool back : {false, true}) {
      if (back) hook_(slot.parameter, unit, matrix);
      for (const UnitPiece& piece : unit_pieces(unit, whole)) {
        std::byte *of_whole = update.data + piece.local_offset * width,
                  *of_unit = matrix.data + piece.unit_offset * width;
        const Dims whole_strides = in_bytes(piece.local_strides), unit_strides = in_bytes(piece.unit_strides);
        if (back) {
          copy_strided(piece.sizes, width, of_whole, whole_strides, of_unit, unit_strides);
        } else {
          copy_strided(piece.sizes, width, of_unit, unit_strides, of_whole, whole_strides);
        }
      }
    }
  }
}

void MeshMuon::step_alone(size_t group, Slot& slot) {
  const View momentum = slot.find(kMomentum);
  const DType dtype = momentum.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const int64_t bytes = byte_size(dtype, slot.parameter.value.shape);
  if (update_.size() < bytes) update_ = Buffer(bytes);
  const View update = dense_view(update_.data(), dtype, slot.parameter.value.shape);
  fill(group, slot, update);
  calculator_.update(options_[group], slot.parameter.matrix, update, update, slot.find(kMoments));
  if (hook_) show_units(group, slot, update);
  muon_apply(options_[group], slot.parameter.value, master_of(slot), update);
}

}  // namespace spolia
