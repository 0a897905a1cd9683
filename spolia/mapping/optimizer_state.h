// Which tensors are an optimizer's states, and of which parameter: they follow it wherever a mapping takes
// it.
//
// By their names, in the styles in which trainers save them:
//   PyTorch   optimizer.state.PARAMETER.exp_avg, state.PARAMETER.step, with any word for the state; the
//             parameter may lie under "model." or "module."
//   Paddle    PARAMETER.moment1_0, PARAMETER.w_0 and others of its words; PARAMETER_moment1_0 as well
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/mapping/tensor_list.h"

namespace spolia {

/// One of the states that parameters have, and how its name is made of theirs.
struct StateSlot {
  std::string before, after;
  std::string stripped;  // what the parameter's name begins with and the state's name leaves out
  bool scalar = false;   // a counter, or a power of a constant: one number whatever the parameter's shape

  std::string name_for(std::string_view parameter) const;
  friend auto operator<=>(const StateSlot&, const StateSlot&) = default;
};

/// A tensor that is a state.
struct StateEntry {
  size_t parameter;  // an index into the tensors, or past them into virtual_parameters()
  size_t slot;
  size_t tensor;
  friend auto operator<=>(const StateEntry&, const StateEntry&) = default;
};

class OptimizerStates {
 public:
  OptimizerStates() = default;
  /// `tensors` are in order of their names and borrowed.
  explicit OptimizerStates(std::span<const TensorDescription> tensors);

  /// Parameters that are not there themselves, while states of theirs are.
  const std::vector<TensorDescription>& virtual_parameters() const { return virtual_; }
  const std::vector<StateSlot>& slots() const { return slots_; }
  /// What tensor `i` is a state of; nullptr where it is none.
  const StateEntry* owner(size_t tensor) const;
  /// The states of a parameter, by slot.
  std::span<const StateEntry> states_of(size_t parameter) const;

 private:
  std::vector<TensorDescription> virtual_;  // in order of their names
  std::vector<StateSlot> slots_;            // in order
  std::vector<StateEntry> entries_;         // in order
  std::vector<size_t> entry_of_;            // for each tensor an index into entries_, or their number
};

}  // namespace spolia
