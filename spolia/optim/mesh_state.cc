#include "spolia/optim/mesh_state.h"

#include <optional>
#include <utility>
#include <vector>

#include "spolia/comm/agree.h"

namespace spolia {

LoadReport load_optimizer(World& world, const Source& source, Optimizer& optimizer,
                          const LoadOptimizerOptions& options) {
  const std::string prefix = options.key.empty() ? "" : options.key + ".";
  LoadOptions loading = options.checkpoint;
  loading.hook = [&](const StateDict::Entry& entry) {
    StateDict::Entry renamed = entry;
    renamed.name = prefix + entry.name;
    renamed.path = {renamed.name};
    return std::optional(std::move(renamed));
  };
  const Catalog& catalog = source.catalog();
  StateDict values;
  for (const ValueEntry& entry : catalog.values)
    if (entry.name.starts_with(prefix + "param_groups.") || entry.name.starts_with(prefix + "state."))
      values.add(std::string_view(entry.name).substr(prefix.size()), Value());
  load(world, source, values, loading);

  // What was saved, without its contents, and of that what is wanted here.
  StateDict described = values;
  for (const TensorEntry& tensor : catalog.tensors) {
    if (!tensor.name.starts_with(prefix + "state.")) continue;
    LocalTensor empty{.memory = {}, .shape = tensor.shape, .layout = {}, .box = {}, .requires_grad = false};
    empty.memory.dtype = tensor.dtype;
    described.add(std::string_view(tensor.name).substr(prefix.size()), std::move(empty));
  }
  std::vector<std::string> unexpected;
  LoadReport report;
  StateDict tensors;
  agree(*world.all(), "loading an optimizer", [&] {
    std::vector<std::string> names;
    for (const OptimizerParameter* parameter : optimizer.parameters()) names.push_back(parameter->name);
    const SavedState saved(described, names);
    report.unexpected.assign(saved.unknown().begin(), saved.unknown().end());
    optimizer.collect_wanted(saved, tensors, unexpected);
  });
  load(world, source, tensors, loading);
  agree(*world.all(), "loading an optimizer", [&] {
    StateDict all = values;
    for (const StateDict::Entry& entry : tensors.entries()) all.add(entry);
    report.missing = optimizer.load_state_dict(all, options.state).missing;
  });
  report.unexpected.insert(report.unexpected.end(), unexpected.begin(), unexpected.end());
  return report;
}

}  // namespace spolia
