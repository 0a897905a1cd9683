// Several optimizers as one: say Muon for the hidden matrices and AdamW for the rest.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "spolia/optim/optimizer.h"

namespace spolia {

/// Steps its children in their order; a closure is evaluated once. Groups and state are those of all
/// children, one after the other, so that it can itself be a child.
class ChainedOptimizer final : public Optimizer {
 public:
  /// InvalidArgumentError where a child is null, or two parameters share a name or memory.
  explicit ChainedOptimizer(std::vector<std::unique_ptr<Optimizer>> children);

  size_t size() const { return children_.size(); }
  Optimizer& operator[](size_t index) { return *children_.at(index); }
  auto begin() const { return children_.begin(); }  // of std::unique_ptr<Optimizer>
  auto end() const { return children_.end(); }
  /// The first child of a kind: chain.find<Muon>(); nullptr where there is none.
  template <class Kind>
  Kind* find() const {
    for (const auto& child : children_)
      if (auto* found = dynamic_cast<Kind*>(child.get())) return found;
    return nullptr;
  }

  void zero_grad(bool set_to_none = true) override;
  std::vector<OptimizerParameter*> parameters() override;
  std::vector<ParamGroup> param_groups() const override;
  void allocate_state() override;
  std::vector<StateTensor> state() override;
  std::vector<int64_t> steps() const override;
  void set_steps(int64_t steps) override;
  void collect_wanted(const SavedState& saved, StateDict& wanted,
                      std::vector<std::string>& unexpected) override;

  /// Gives every parameter the number of steps that those have which have taken any; gives it back, 0 where
  /// none has. MismatchError where there are several such numbers.
  int64_t synchronise_steps();

 protected:
  void take_step() override;
  void set_groups(std::span<const ParamGroup> groups, bool check_only) override;
  void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) override;

 private:
  std::vector<std::unique_ptr<Optimizer>> children_;
};

}  // namespace spolia
