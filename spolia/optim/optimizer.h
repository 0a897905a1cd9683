// What all optimizers have in common: steps, gradients, parameter groups and state dicts, with PyTorch's
// names.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/optim/muon.h"
#include "spolia/state/state_dict.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// A parameter on this rank. All memory is borrowed: dense host memory that outlives the optimizer's use of
/// it.
struct OptimizerParameter {
  std::string name;
  View value;
  View gradient;  // of the value's shape and any floating-point dtype; without data there is none just now
  View master;    // float32 values that the steps are taken on, the value being their rounding; without data:
                  // none
  bool frozen = false;  // never stepped, and has no state
  MatrixRule matrix;    // for Muon: how it is one matrix or several

  // Empty ones need no memory.
  bool has_gradient() const { return is_there(gradient); }
  bool has_master() const { return is_there(master); }
  bool takes_part() const { return !frozen && has_gradient(); }

 private:
  static bool is_there(const View& view) {
    return view.data || (!view.shape.empty() && numel(view.shape) == 0);
  }
};

/// A group's parameters and options as PyTorch's param_groups have them, keys in PyTorch's order.
struct ParamGroup {
  std::vector<std::string> params;
  std::vector<std::pair<std::string, Value>> options;

  const Value* find(std::string_view key) const;  // nullptr where there is none
  void set(std::string_view key, Value value);    // adds or replaces
};

/// A tensor of a parameter's state: exp_avg, momentum_buffer ...
struct StateTensor {
  std::string parameter;
  std::string field;
  LocalTensor tensor;
};

/// How a state dict names things; both are PyTorch's.
enum class StateForm : uint8_t {
  kNested,     // {"state": {name: {field: tensor}}, "param_groups": [{key: value, ..., "params": [names]}]}
  kFlattened,  // {"state.name.field": tensor, "param_groups.name.key": value}
};

struct StateLoadOptions {
  /// How a momentum was kept whose state dict does not say so. PyTorch's do not.
  MomentumRule momentum_rule = MomentumRule::kAverage;
};

/// What loading did not find, or did not use: names of entries.
struct LoadReport {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

/// A state dict of either form, taken apart by parameter.
class SavedState {
 public:
  struct Parameter {
    std::vector<std::pair<std::string, const Value*>> options;
    std::vector<std::pair<std::string, const StateDict::Entry*>> fields;

    const Value* option(std::string_view key) const;
    const StateDict::Entry* field(std::string_view name) const;
  };

  /// `names` are the parameters in the order of their groups: where the dict counts them, number k is the
  /// k-th. Keeps pointers into `dict`. CorruptError where param_groups of the nested form have no list of
  /// params.
  SavedState(const StateDict& dict, std::span<const std::string> names);

  /// nullptr where nothing of it is saved.
  const Parameter* find(std::string_view name) const;
  /// Entries that belong to no known parameter.
  std::span<const std::string> unknown() const { return unknown_; }

 private:
  std::map<std::string, Parameter, std::less<>> parameters_;
  std::vector<std::string> unknown_;
};

/// An optimizer of one rank's parameters. Not thread-safe.
class Optimizer {
 public:
  using Closure = std::function<double()>;  // computes the loss and the gradients

  virtual ~Optimizer() = default;

  /// Evaluates `closure`, where there is one, then takes one step; gives back the loss. Parameters without a
  /// gradient, and frozen ones, are left alone, as in PyTorch.
  std::optional<double> step(const Closure& closure = {});

  /// Forgets all gradients, or fills them with zeros.
  virtual void zero_grad(bool set_to_none = true) = 0;
  /// A parameter's gradient for the steps to come; without data: none. NotFoundError for an unknown name,
  /// InvalidArgumentError where it has another shape or gaps.
  void set_gradient(std::string_view name, const View& gradient);

  /// All parameters in the order of their groups.
  virtual std::vector<OptimizerParameter*> parameters() = 0;

  virtual std::vector<ParamGroup> param_groups() const = 0;
  /// Sets the options of all groups; keys that are not given stay. Keys that no optimizer here has are kept
  /// and saved again. Nothing is changed by a call that throws: InvalidArgumentError where the number of
  /// groups, or a group's params, differ or a value makes no sense.
  void set_param_groups(std::span<const ParamGroup> groups);

  /// Makes the state of every parameter that is not frozen, as of a step that changed nothing.
  virtual void allocate_state() = 0;
  /// The state there is; the memory belongs to the optimizer, and stays until the state is loaded anew.
  virtual std::vector<StateTensor> state() = 0;
  /// The distinct numbers of steps that parameters have taken, rising. Muon counts none.
  virtual std::vector<int64_t> steps() const = 0;
  /// Sets the counter of every parameter that has one.
  virtual void set_steps(int64_t steps) = 0;

  /// All state and groups; the tensors are the optimizer's own memory. MismatchError where two have the same
  /// name.
  StateDict state_dict(StateForm form = StateForm::kFlattened);
  /// Takes groups and state from a dict of either form and of another split into groups or optimizers. State
  /// keeps its saved dtype unless the optimizer was told one; a parameter of which nothing is saved keeps
  /// what it has, and is reported. Options that a dict does not have stay. MismatchError where shapes differ,
  /// or where parameters of one group were saved with unequal options.
  LoadReport load_state_dict(const StateDict& dict, const StateLoadOptions& options = {});
  /// For who reads the tensors from elsewhere: to `wanted` those of `saved`, whose memory need not be there,
  /// that are state of this optimizer's parameters and that this rank has, in the saved dtypes and with new
  /// memory of the optimizer's, which load_state_dict() then takes over; to `unexpected` the names of those
  /// of its parameters that none here takes. MismatchError where a shape is another.
  virtual void collect_wanted(const SavedState& saved, StateDict& wanted,
                              std::vector<std::string>& unexpected) = 0;

 protected:
  friend class ChainedOptimizer;
  virtual void take_step() = 0;
  /// `check_only`: throws what setting would throw, and changes nothing. As many groups as param_groups().
  virtual void set_groups(std::span<const ParamGroup> groups, bool check_only) = 0;
  virtual void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) = 0;
};

/// InvalidArgumentError where two parameters share a name or memory: tied ones are listed once, in one
/// optimizer.
void check_distinct(std::span<OptimizerParameter* const> parameters);

}  // namespace spolia
