// Optimizer state from checkpoints, on any mesh, whoever saved it: Spolia or PyTorch, on any other mesh,
// split between optimizers in any other way.
//
// Saving needs nothing of its own: what each rank's state_dict() has goes into the state dict that save()
// takes.
//
//   state.add("optimizer", optimizer.state_dict());
//   save(*world.all(), state, *posix_store(), "step-100");
//   ...
//   load_optimizer(world, *open_together(*world.all(), posix_store(), "step-100"), optimizer,
//                  {.key = "optimizer"});
#pragma once

#include <string>

#include "spolia/checkpoint/load.h"
#include "spolia/optim/optimizer.h"

namespace spolia {

struct LoadOptimizerOptions {
  std::string key;  // below which the state is; none: at the top
  StateLoadOptions state;
  LoadOptions checkpoint;  // but for its hook, which is ours
};

/// Loads state and groups into an optimizer: MeshAdamW, MeshMuon, those of one rank, or a chain of them. Each
/// rank reads its shards of what its own parameters take, in the dtypes that were saved; names may be
/// PyTorch's numbers. Collective over the world. The report is this rank's: what its parameters did not find,
/// and what no parameter here takes.
LoadReport load_optimizer(World& world, const Source& source, Optimizer& optimizer,
                          const LoadOptimizerOptions& options = {});

}  // namespace spolia
