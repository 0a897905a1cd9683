// What AdamW is, and what Muon is: the options of their groups, the state of a parameter, and the arithmetic
// of a step. The same whether a parameter is one rank's (local_optimizer.h) or shared by many
// (mesh_optimizer.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/optim/adamw.h"
#include "spolia/optim/leading_part.h"
#include "spolia/optim/matrix_units.h"
#include "spolia/optim/optimizer.h"

namespace spolia {

/// A tensor of a parameter's state.
struct StateField {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims whole;           // its shape, however it is shared; the parameter's, but for the number of columns
  bool sharded = true;  // as the parameter is; else each rank that has it has all, and any shape is fine
};

struct ZeroedTensor {
  Buffer memory;
  View view;
};
/// A dense tensor of zeros.
ZeroedTensor zeros(DType dtype, std::span<const int64_t> shape);

/// A parameter and its state on this rank.
struct Slot {
  struct State {
    StateField field;
    ZeroedTensor tensor;
  };

  size_t group = 0;
  OptimizerParameter parameter;
  Dims whole;  // the shape of the tensor of which parameter.value is a shard, or all
  std::shared_ptr<const Layout> layout;  // how ranks share it; null: it is this rank's alone
  LeadingPart part;                      // of the shard: what is stepped here, and has state
  std::vector<State> state;
  std::vector<State> incoming;  // while it is read for loading

  const State* find_state(std::string_view field) const;  // nullptr where there is none
  View find(std::string_view field) const;                // without data where there is none
  /// The field's shard where the parameter's is this rank's; and the part of it.
  Dims shard_of(const StateField& field) const;
  Dims shape_of(const StateField& field) const { return part.shape_of(shard_of(field)); }
  // What is stepped.
  View value() const { return part.of(parameter.value); }
  View gradient() const { return part.of(parameter.gradient); }
  View master() const;  // the caller's, or the state's; without data: none
};

// Names of state fields that not only the method knows.
inline constexpr std::string_view kStepField = "step", kMasterField = "master_param",
                                  kMomentsField = "row_moments";

double read_scalar(const ConstView& view);
void write_scalar(const View& view, double value);

/// Not thread-safe. Groups are numbered as the optimizer's.
class StepMethod {
 public:
  virtual ~StepMethod() = default;

  /// InvalidArgumentError for options that make no sense.
  virtual void check_options() const = 0;
  /// InvalidArgumentError where the parameter is none for this method.
  virtual void check_parameter(const Slot&) const {}

  /// Options in PyTorch's order, and those of `values` that it knows taken over. InvalidArgumentError where a
  /// value makes no sense.
  virtual std::vector<std::pair<std::string, Value>> options_as_values(size_t group) const = 0;
  virtual void set_options(size_t group, const ParamGroup& values, bool check_only) = 0;
  /// An option that only the other method has: who was saved with it is new here, and brings no options.
  virtual std::string_view foreign_option() const = 0;

  /// The state that a parameter has, in PyTorch's order; new state is of `dtype`.
  virtual std::vector<StateField> fields(const Slot& slot, DType dtype) const = 0;
  /// What loaded state is multiplied by: the saved options of its parameter say how it was kept.
  virtual double conversion(const Slot&, const StateField&, const SavedState::Parameter&,
                            const StateLoadOptions&) const {
    return 1;
  }

  // A step of a parameter whose state is there.

  /// First, on every rank that has some of the parameter: counters.
  virtual void begin_step(const Slot&) const {}
  /// All the rest, where whole matrices are on this rank.
  virtual void step(const Slot& slot) { apply(slot, {}); }
  // Or in phases, as in muon.h. A gradient that is missing counts as zeros.
  virtual void fill_update(const Slot&, const View& /*update*/) {}
  virtual void orthogonalise(const Slot&, const MatrixUnit&, const View& /*matrix*/,
                             const View& /*row_moments*/) {}
  virtual void apply(const Slot& slot, const View& update) = 0;

  /// Whether there is such a phase between, and whether it has state for each row.
  virtual bool has_matrices() const { return false; }
  virtual bool has_row_moments(size_t /*group*/) const { return false; }
};

class AdamWMethod final : public StepMethod {
 public:
  explicit AdamWMethod(std::vector<AdamWOptions> options) : options_(std::move(options)) {}
  const AdamWOptions& options(size_t group) const { return options_.at(group); }

  void check_options() const override;
  std::vector<std::pair<std::string, Value>> options_as_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "ns_steps"; }
  std::vector<StateField> fields(const Slot& slot, DType dtype) const override;
  void begin_step(const Slot& slot) const override;
  void apply(const Slot& slot, const View& update) override;

 private:
  std::vector<AdamWOptions> options_;
  ZeroedTensor no_gradient_;
};

/// Sees, and may change, the update of each matrix before it is applied and sent, on the rank that computes
/// it. `update` is [unit.rows, unit.columns], dense.
using MuonUpdateHook =
    std::function<void(const OptimizerParameter& parameter, const MatrixUnit& unit, const View& update)>;

class MuonMethod final : public StepMethod {
 public:
  /// Where `normuon_is_fixed`, set_options() refuses to turn NorMuon on or off.
  MuonMethod(std::vector<MuonOptions> options, int threads, bool normuon_is_fixed)
      : options_(std::move(options)), calculator_(threads), normuon_is_fixed_(normuon_is_fixed) {}
  const MuonOptions& options(size_t group) const { return options_.at(group); }
  const NewtonSchulz& newton_schulz() const { return calculator_.newton_schulz(); }
  void set_update_hook(MuonUpdateHook hook) { hook_ = std::move(hook); }

  void check_options() const override;
  void check_parameter(const Slot& slot) const override;
  std::vector<std::pair<std::string, Value>> options_as_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "betas"; }
  std::vector<StateField> fields(const Slot& slot, DType dtype) const override;
  double conversion(const Slot& slot, const StateField& field, const SavedState::Parameter& saved,
                    const StateLoadOptions& options) const override;
  void step(const Slot& slot) override;
  void fill_update(const Slot& slot, const View& update) override;
  void orthogonalise(const Slot& slot, const MatrixUnit& unit, const View& matrix,
                     const View& row_moments) override;
  void apply(const Slot& slot, const View& update) override;
  bool has_matrices() const override { return true; }
  bool has_row_moments(size_t group) const override { return options_[group].normuon.has_value(); }

 private:
  void show_matrices(const Slot& slot, const View& update);

  std::vector<MuonOptions> options_;
  MuonCalculator calculator_;
  const bool normuon_is_fixed_;
  Buffer update_;
  MuonUpdateHook hook_;
};

}  // namespace spolia
