// AdamW and Muon over parameters that this rank has whole.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/optim/step_method.h"

namespace spolia {

struct LocalOptions {
  /// The dtype of new state, and what loaded state is cast to. Nothing: new state has its parameter's, or its
  /// master's dtype, as in PyTorch, and loaded state keeps the saved one.
  std::optional<DType> state_dtype;
  /// Keep a float32 master of each bfloat16 or float16 parameter that has none, as the state "master_param".
  bool masters = false;
  int threads = 1;  // for matrix products
};

/// Groups of parameters with their state, stepped by a method.
class LocalOptimizer : public Optimizer {
 public:
  void zero_grad(bool set_to_none) override;
  std::vector<OptimizerParameter*> parameters() override;
  std::vector<ParamGroup> param_groups() const override;
  void allocate_state() override;
  std::vector<StateTensor> state() override;
  std::vector<int64_t> steps() const override;
  void set_steps(int64_t steps) override;
  void collect_wanted(const SavedState& saved, StateDict& wanted,
                      std::vector<std::string>& unexpected) override;

 protected:
  LocalOptimizer(std::unique_ptr<StepMethod> method, const LocalOptions& options)
      : local_(options), method_(std::move(method)) {}
  /// Checks options and slots, and takes these over: group by group, without state.
  void add_groups(size_t count, std::vector<Slot> slots);
  template <class Method>
  const Method& method() const {
    return static_cast<const Method&>(*method_);
  }
  template <class Method>
  Method& method() {
    return static_cast<Method&>(*method_);
  }

  void take_step() override;
  void set_groups(std::span<const ParamGroup> groups, bool check_only) override;
  void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) override;

  /// The state of a slot that this rank has, made where it is not there: zeros, and a master's values.
  void make_state(Slot& slot);
  /// The state that a slot may have on any rank: the method's, and a master.
  std::vector<StateField> fields(const Slot& slot) const;
  /// Whether this rank has it.
  virtual bool has(const Slot& slot, const StateField&) const { return !slot.parameter.frozen; }
  /// State in memory of slot.shape_of(field), as a part of the whole.
  virtual LocalTensor as_tensor(const Slot&, const StateField&, const View& memory) const {
    return plain_tensor(memory);
  }

  const LocalOptions local_;
  const std::unique_ptr<StepMethod> method_;
  std::vector<Slot> slots_;  // group by group; all slots that methods here are given are of these
  int64_t rank_ = 0;

 private:
  std::vector<std::vector<Slot::State>> loaded_state(const SavedState& saved, const StateLoadOptions& options,
                                                     LoadReport& report);
  ZeroedTensor loaded(Slot& slot, const StateField& field, const StateDict::Entry& entry) const;

  std::vector<ParamGroup> groups_;  // their options: those that nothing here reads
};

/// Parameters with options in common.
template <class Parameter, class Options>
struct OptimizerGroup {
  std::vector<Parameter> parameters;
  Options options;
};
using AdamWGroup = OptimizerGroup<OptimizerParameter, AdamWOptions>;
using MuonGroup = OptimizerGroup<OptimizerParameter, MuonOptions>;

template <class Parameter, class Options>
std::vector<Options> options_of(const std::vector<OptimizerGroup<Parameter, Options>>& groups) {
  std::vector<Options> all;
  for (const auto& group : groups) all.push_back(group.options);
  return all;
}

class AdamW final : public LocalOptimizer {
 public:
  /// InvalidArgumentError for parameters with gaps, shared names or memory, or options that make no sense;
  /// UnsupportedError for dtypes that are no floats.
  explicit AdamW(std::vector<AdamWGroup> groups, const LocalOptions& options = {});
  const AdamWOptions& options(size_t group) const { return method<AdamWMethod>().options(group); }
};

class Muon final : public LocalOptimizer {
 public:
  /// As AdamW; and a parameter's matrix rule has to fit its shape.
  explicit Muon(std::vector<MuonGroup> groups, const LocalOptions& options = {});
  const MuonOptions& options(size_t group) const { return method<MuonMethod>().options(group); }
  void set_update_hook(MuonUpdateHook hook) { method<MuonMethod>().set_update_hook(std::move(hook)); }
  const NewtonSchulz& newton_schulz() const { return method<MuonMethod>().newton_schulz(); }
};

}  // namespace spolia
