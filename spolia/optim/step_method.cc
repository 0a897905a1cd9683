#include "spolia/optim/step_method.h"

#include <cstring>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/group_options.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr std::string_view kMean = "exp_avg", kSquare = "exp_avg_sq", kMaximum = "max_exp_avg_sq",
                           kMomentum = "momentum_buffer";

ConstView gradient_of(const Slot& slot) {
  return slot.parameter.has_gradient() ? ConstView(slot.gradient()) : ConstView();
}

}  // namespace

ZeroedTensor zeros(DType dtype, std::span<const int64_t> shape) {
  ZeroedTensor made{Buffer(byte_size(dtype, shape)), {}};
  if (made.memory.size() > 0) std::memset(made.memory.data(), 0, static_cast<size_t>(made.memory.size()));
  made.view = dense_view(made.memory.data(), dtype, shape);
  return made;
}

double read_scalar(const ConstView& view) {
  double value = 0;
  cast(DType::kFloat64, &value, view.dtype, view.data, 1);
  return value;
}
void write_scalar(const View& view, double value) { cast(view.dtype, view.data, DType::kFloat64, &value, 1); }

const Slot::State* Slot::find_state(std::string_view field) const {
  for (const State& own : state)
    if (own.field.name == field) return &own;
  return nullptr;
}

View Slot::find(std::string_view field) const {
  const State* found = find_state(field);
  return found ? found->tensor.view : View();
}

View Slot::master() const { return parameter.master.data ? part.of(parameter.master) : find(kMasterField); }

Dims Slot::shard_of(const StateField& field) const {
  if (!field.sharded) return field.whole;
  Dims shape = parameter.value.shape;
  if (!shape.empty() && field.whole.back() != whole.back()) shape.back() = field.whole.back();
  return shape;
}

// AdamW.

void AdamWMethod::check_options() const {
  for (const AdamWOptions& options : options_) check(options);
}

std::vector<std::pair<std::string, Value>> AdamWMethod::options_as_values(size_t group) const {
  return to_values(options_[group]);
}

void AdamWMethod::set_options(size_t group, const ParamGroup& values, bool check_only) {
  AdamWOptions options = with_values(options_[group], values);
  if (!check_only) options_[group] = options;
}

std::vector<StateField> AdamWMethod::fields(const Slot& slot, DType dtype) const {
  std::vector<StateField> all{{std::string(kStepField), DType::kFloat32, {}, false},
                              {std::string(kMean), dtype, slot.whole},
                              {std::string(kSquare), dtype, slot.whole}};
  if (options_[slot.group].amsgrad) all.push_back({std::string(kMaximum), dtype, slot.whole});
  return all;
}

void AdamWMethod::begin_step(const Slot& slot) const {
  const View step = slot.find(kStepField);
  write_scalar(step, read_scalar(step) + 1);
}

void AdamWMethod::apply(const Slot& slot, const View&) {
  ConstView gradient = gradient_of(slot);
  const View value = slot.value();
  if (!gradient.data) {
    if (no_gradient_.memory.size() < byte_size(DType::kFloat32, value.shape))
      no_gradient_ = zeros(DType::kFloat32, value.shape);
    gradient = dense_view(no_gradient_.memory.data(), DType::kFloat32, value.shape);
  }
  adamw_step(options_[slot.group], static_cast<int64_t>(read_scalar(slot.find(kStepField))),
             {value, slot.master(), gradient, slot.find(kMean), slot.find(kSquare), slot.find(kMaximum)});
}

// Muon.

void MuonMethod::check_options() const {
  for (const MuonOptions& options : options_) check(options);
}

void MuonMethod::check_parameter(const Slot& slot) const {
  try {
    matrix_shape(slot.parameter.matrix, slot.whole);
  } catch (const Error& error) {
    rethrow_with_context(error, "the parameter " + quote(slot.parameter.name));
  }
}

std::vector<std::pair<std::string, Value>> MuonMethod::options_as_values(size_t group) const {
  return to_values(options_[group]);
}

void MuonMethod::set_options(size_t group, const ParamGroup& values, bool check_only) {
  MuonOptions options = with_values(options_[group], values);
  if (normuon_is_fixed_ && options.normuon.has_value() != has_row_moments(group))
    throw InvalidArgumentError("NorMuon is chosen when the optimizer is made, not later");
  if (!check_only) options_[group] = std::move(options);
}

std::vector<StateField> MuonMethod::fields(const Slot& slot, DType dtype) const {
  std::vector<StateField> all{{std::string(kMomentum), dtype, slot.whole}};
  const MatrixRule& rule = slot.parameter.matrix;
  if (has_row_moments(slot.group))
    all.push_back({std::string(kMomentsField), DType::kFloat32, row_moments_shape(rule, slot.whole),
                   slot.layout && leaves_whole(rule, slot.whole, *slot.layout)});
  return all;
}

double MuonMethod::conversion(const Slot& slot, const StateField& field, const SavedState::Parameter& saved,
                              const StateLoadOptions& options) const {
  if (field.name != kMomentum) return 1;
  const MuonOptions& own = options_[slot.group];
  const MomentumRule from = momentum_rule_of(saved.option("momentum_rule")).value_or(options.momentum_rule);
  const Value* momentum = saved.option("momentum");
  return momentum_conversion(from, own.momentum_rule,
                             momentum ? number_of(*momentum, "momentum") : own.momentum);
}

void MuonMethod::step(const Slot& slot) {
  const View value = slot.value();
  const DType dtype = slot.find(kMomentum).dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (update_.size() < byte_size(dtype, value.shape)) update_ = Buffer(byte_size(dtype, value.shape));
  const View update = dense_view(update_.data(), dtype, value.shape);
  fill_update(slot, update);
  calculator_.update(options_[slot.group], slot.parameter.matrix, update, update, slot.find(kMomentsField));
  if (hook_) show_matrices(slot, update);
  apply(slot, update);
}

void MuonMethod::fill_update(const Slot& slot, const View& update) {
  muon_momentum(options_[slot.group], gradient_of(slot), slot.find(kMomentum), update);
}

void MuonMethod::orthogonalise(const Slot& slot, const MatrixUnit& unit, const View& matrix,
                               const View& row_moments) {
  calculator_.update(options_[slot.group], MatrixRule{}, matrix, matrix, row_moments);
  if (hook_) hook_(slot.parameter, unit, matrix);
}

void MuonMethod::apply(const Slot& slot, const View& update) {
  muon_apply(options_[slot.group], slot.value(), slot.master(), update);
}

/// Each matrix of a whole update to the hook, and back.
void MuonMethod::show_matrices(const Slot& slot, const View& update) {
  const RankShard whole = Layout(DeviceMesh(Dims{}), {}).shard(update.shape, 0);
  const int64_t width = element_bytes(update.dtype);
  for (const MatrixUnit& unit : matrix_units(slot.parameter.matrix, update.shape)) {
    const ZeroedTensor matrix = zeros(update.dtype, std::array{unit.rows, unit.columns});
    const std::vector<UnitPiece> pieces = unit_pieces(unit, whole);
    copy_pieces(pieces, width, update.data, matrix.view.data, true);
    hook_(slot.parameter, unit, matrix.view);
    copy_pieces(pieces, width, update.data, matrix.view.data, false);
  }
}

}  // namespace spolia
