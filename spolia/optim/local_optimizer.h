// AdamW and Muon over parameters that this rank has whole.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/optim/adamw.h"
#include "spolia/optim/muon.h"
#include "spolia/optim/optimizer.h"

namespace spolia {

struct LocalOptions {
  /// The dtype of new state, and what loaded state is cast to. Nothing: new state has its parameter's, or its
  /// master's dtype, as in PyTorch, and loaded state keeps the saved one.
  std::optional<DType> state_dtype;
  /// Keep a float32 master of each bfloat16 or float16 parameter that has none, as the state "master_param".
  bool masters = false;
  int threads = 1;  // for matrix products
};

/// What AdamW and Muon share: groups of slots, each a parameter with its state.
class LocalOptimizer : public Optimizer {
 public:
  void zero_grad(bool set_to_none) override;
  std::vector<OptimizerParameter*> parameters() override;
  std::vector<ParamGroup> param_groups() const override;
  void allocate_state() override;
  std::vector<StateTensor> state() override;
  std::vector<int64_t> steps() const override;
  void set_steps(int64_t steps) override;

 protected:
  struct Field {  // of a parameter's state
    std::string name;
    DType dtype;
    Dims shape;
  };
  struct Slot {
    OptimizerParameter parameter;
    std::vector<std::pair<std::string, std::pair<Buffer, View>>> state;

    View find(std::string_view field) const;  // without data where there is none
  };
  struct Group {
    std::vector<Slot> slots;
    std::vector<std::pair<std::string, Value>> foreign;  // options that nothing here reads
  };

  explicit LocalOptimizer(const LocalOptions& options) : local_(options) {}
  /// Checks and takes over a group's parameters.
  void add_group(std::vector<OptimizerParameter> parameters);
  /// The state, made where it is not there: zeros, and a master's values.
  void make_state(size_t group, Slot& slot);
  View master_of(const Slot& slot) const;
  DType state_dtype(const Slot& slot) const;

  void set_groups(std::span<const ParamGroup> groups, bool check_only) override;
  void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) override;

  /// The fields that a parameter's state has, in PyTorch's order.
  virtual std::vector<Field> fields(size_t group, const Slot& slot) const = 0;
  /// The group's options, in PyTorch's order.
  virtual std::vector<std::pair<std::string, Value>> option_values(size_t group) const = 0;
  /// Sets options from those of `values` that it knows. InvalidArgumentError where a value makes no sense.
  virtual void set_options(size_t group, const ParamGroup& values, bool check_only) = 0;
  /// An option that only the other kind of optimizer has: who was saved with it is new here, and brings no
  /// options.
  virtual std::string_view foreign_option() const = 0;
  /// What loaded state is multiplied by: the saved options of its parameter say how it was kept.
  virtual double conversion(size_t, std::string_view /*field*/, const SavedState::Parameter&,
                            const StateLoadOptions&) const {
    return 1;
  }

  LocalOptions local_;
  std::vector<Group> groups_;
};

struct AdamWGroup {
  std::vector<OptimizerParameter> parameters;
  AdamWOptions options;
};

class AdamW final : public LocalOptimizer {
 public:
  /// InvalidArgumentError for parameters with gaps, shared names or memory, or options that make no sense;
  /// UnsupportedError for dtypes that are no floats.
  explicit AdamW(std::vector<AdamWGroup> groups, const LocalOptions& options = {});
  const AdamWOptions& options(size_t group) const { return options_.at(group); }

 protected:
  void take_step() override;
  std::vector<Field> fields(size_t group, const Slot& slot) const override;
  std::vector<std::pair<std::string, Value>> option_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "ns_steps"; }

 private:
  std::vector<AdamWOptions> options_;
};

struct MuonGroup {
  std::vector<OptimizerParameter> parameters;
  MuonOptions options;
};

class Muon final : public LocalOptimizer {
 public:
  /// Sees, and may change, a parameter's whole update O before it is applied.
  using UpdateHook = std::function<void(const OptimizerParameter& parameter, const View& update)>;

  /// As AdamW; and a parameter's matrix rule has to fit its shape.
  explicit Muon(std::vector<MuonGroup> groups, const LocalOptions& options = {});
  const MuonOptions& options(size_t group) const { return options_.at(group); }
  void set_update_hook(UpdateHook hook) { hook_ = std::move(hook); }
  const NewtonSchulz& newton_schulz() const { return calculator_.newton_schulz(); }

 protected:
  void take_step() override;
  std::vector<Field> fields(size_t group, const Slot& slot) const override;
  std::vector<std::pair<std::string, Value>> option_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "betas"; }
  double conversion(size_t group, std::string_view field, const SavedState::Parameter& saved,
                    const StateLoadOptions& options) const override;

 private:
  std::vector<MuonOptions> options_;
  MuonCalculator calculator_;
  Buffer update_;
  UpdateHook hook_;
};

}  // namespace spolia
