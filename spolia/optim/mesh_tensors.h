// What ranks tell each other of their parameters.
#pragma once

#include <vector>

#include "spolia/comm/group.h"
#include "spolia/optim/mesh_plan.h"

namespace spolia {

/// The parameters of all ranks, in the order in which ranks list them, lower ranks first. Each distinct list
/// is sent once. Collective over the group; MismatchError, on every rank, where two describe a parameter
/// differently.
std::vector<MeshTensor> tensors_of_all(Group& all, const std::vector<MeshTensor>& own);

}  // namespace spolia
