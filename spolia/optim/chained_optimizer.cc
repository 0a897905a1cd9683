#include "spolia/optim/chained_optimizer.h"

#include <algorithm>
#include <iterator>
#include <set>

#include <fmt/ranges.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

template <class Item>
void append(std::vector<Item>& to, std::vector<Item> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

ChainedOptimizer::ChainedOptimizer(std::vector<std::unique_ptr<Optimizer>> children)
    : children_(std::move(children)) {
  for (const auto& child : children_)
    if (!child) throw InvalidArgumentError("a chain of optimizers is given one that is null");
  const std::vector<OptimizerParameter*> all = parameters();
  check_distinct(all);
}

void ChainedOptimizer::take_step() {
  for (auto& child : children_) child->take_step();
}

void ChainedOptimizer::zero_grad(bool set_to_none) {
  for (auto& child : children_) child->zero_grad(set_to_none);
}

std::vector<OptimizerParameter*> ChainedOptimizer::parameters() {
  std::vector<OptimizerParameter*> all;
  for (auto& child : children_) append(all, child->parameters());
  return all;
}

std::vector<ParamGroup> ChainedOptimizer::param_groups() const {
  std::vector<ParamGroup> all;
  for (const auto& child : children_) append(all, child->param_groups());
  return all;
}

void ChainedOptimizer::allocate_state() {
  for (auto& child : children_) child->allocate_state();
}

std::vector<StateTensor> ChainedOptimizer::state() {
  std::vector<StateTensor> all;
  for (auto& child : children_) append(all, child->state());
  return all;
}

std::vector<int64_t> ChainedOptimizer::steps() const {
  std::set<int64_t> distinct;
  for (const auto& child : children_)
    for (int64_t steps : child->steps()) distinct.insert(steps);
  return {distinct.begin(), distinct.end()};
}

void ChainedOptimizer::set_steps(int64_t steps) {
  for (auto& child : children_) child->set_steps(steps);
}

void ChainedOptimizer::collect_wanted(const SavedState& saved, StateDict& wanted,
                                      std::vector<std::string>& unexpected) {
  for (auto& child : children_) child->collect_wanted(saved, wanted, unexpected);
}

int64_t ChainedOptimizer::synchronise_steps() {
  std::vector<int64_t> taken = steps();
  std::erase(taken, 0);
  if (taken.size() > 1)
    throw MismatchError("the optimizers' parameters have taken unequal numbers of steps: {}",
                        fmt::join(taken, ", "));
  if (taken.empty()) return 0;
  set_steps(taken[0]);
  return taken[0];
}

void ChainedOptimizer::set_groups(std::span<const ParamGroup> groups, bool check_only) {
  for (auto& child : children_) {
    const size_t own = child->param_groups().size();
    child->set_groups(groups.first(own), check_only);
    groups = groups.subspan(own);
  }
}

void ChainedOptimizer::load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) {
  for (auto& child : children_) child->load(saved, options, report);
}

}  // namespace spolia
