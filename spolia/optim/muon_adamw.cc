#include "spolia/optim/muon_adamw.h"

#include <algorithm>
#include <utility>

#include "spolia/comm/agree.h"

namespace spolia {
namespace {

/// Whether the parameter goes to Muon; its matrix rule is then set.
bool goes_to_muon(OptimizerParameter& parameter, const Dims& whole, const MuonAdamWOptions& options) {
  std::vector<std::string> names{parameter.name};
  for (const std::vector<std::string>& tied : options.tied)
    if (std::find(tied.begin(), tied.end(), parameter.name) != tied.end()) names = tied;
  const Route found = route(names, whole, options.rules);
  if (found.to == OptimizerKind::kMuon && parameter.matrix == MatrixRule{}) parameter.matrix = found.matrix;
  return found.to == OptimizerKind::kMuon;
}

template <class First, class Second>
std::unique_ptr<ChainedOptimizer> chain(std::unique_ptr<First> first, std::unique_ptr<Second> second) {
  std::vector<std::unique_ptr<Optimizer>> children;
  children.push_back(std::move(first));
  children.push_back(std::move(second));
  return std::make_unique<ChainedOptimizer>(std::move(children));
}

}  // namespace

std::unique_ptr<ChainedOptimizer> make_muon_adamw(std::vector<OptimizerParameter> parameters,
                                                  const MuonAdamWOptions& options,
                                                  const LocalOptions& local) {
  MuonGroup matrices{{}, options.muon};
  AdamWGroup rest{{}, options.adamw};
  for (OptimizerParameter& parameter : parameters) {
    const bool muon = goes_to_muon(parameter, parameter.value.shape, options);
    (muon ? matrices.parameters : rest.parameters).push_back(std::move(parameter));
  }
  return chain(std::make_unique<Muon>(std::vector{std::move(matrices)}, local),
               std::make_unique<AdamW>(std::vector{std::move(rest)}, local));
}

std::unique_ptr<ChainedOptimizer> make_muon_adamw(World& world, std::vector<MeshParameter> parameters,
                                                  const MuonAdamWOptions& options, const MeshOptions& mesh) {
  MeshMuonGroup matrices{{}, options.muon};
  MeshAdamWGroup rest{{}, options.adamw};
  agree(*world.all(), "routing parameters", [&] {
    for (MeshParameter& given : parameters) {
      const Dims& whole = given.layout ? given.shape : given.parameter.value.shape;
      const bool muon = goes_to_muon(given.parameter, whole, options);
      (muon ? matrices.parameters : rest.parameters).push_back(std::move(given));
    }
  });
  auto muon = std::make_unique<MeshMuon>(world, std::vector{std::move(matrices)}, mesh);
  return chain(std::move(muon), std::make_unique<MeshAdamW>(world, std::vector{std::move(rest)}, mesh));
}

}  // namespace spolia
