// Muon for the hidden matrices and AdamW for the rest, as one optimizer.
//
//   auto optimizer = make_muon_adamw(world, std::move(parameters), {.muon = {.lr = .02}, .adamw = {.lr =
//   3e-4}}); optimizer->step();
//
// What goes where is said by route() (routing.h), from the names and shapes of the parameters and from rules.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spolia/optim/chained_optimizer.h"
#include "spolia/optim/local_optimizer.h"
#include "spolia/optim/mesh_optimizer.h"
#include "spolia/optim/routing.h"

namespace spolia {

struct MuonAdamWOptions {
  MuonOptions muon;
  AdamWOptions adamw;
  std::vector<RoutingRule> rules;
  /// Of each tied parameter, all its names. It is given once, under any of them.
  std::vector<std::vector<std::string>> tied;
};

/// A chain of Muon and AdamW, each with the parameters that route() gives it, in their order; either may have
/// none. A parameter whose `matrix` says already that it is fused, a batch or a convolution keeps that.
/// Throws what route() and the constructors of Muon and AdamW do.
std::unique_ptr<ChainedOptimizer> make_muon_adamw(std::vector<OptimizerParameter> parameters,
                                                  const MuonAdamWOptions& options = {},
                                                  const LocalOptions& local = {});
/// The same of MeshMuon and MeshAdamW; collective over the world. Ranks give the same options.
std::unique_ptr<ChainedOptimizer> make_muon_adamw(World& world, std::vector<MeshParameter> parameters,
                                                  const MuonAdamWOptions& options = {},
                                                  const MeshOptions& mesh = {});

}  // namespace spolia
