// Random programs of what is built upon groups: the registry, batches, hierarchical broadcasts. The same on
// every rank for the same seed; each throws on a rank that finds something else than it has to.
#pragma once

#include <cstdint>

#include "spolia/comm/world.h"

namespace spolia {

/// Groups that are needed, kept and handed in by some ranks or by all.
void run_registry_program(World& world, uint32_t seed);
/// Pieces of all sizes, dense and strided, to several groups from several roots.
void run_batches_program(World& world, uint32_t seed);
/// Buffers from ranks of a grid of one to three dims.
void run_hierarchical_program(World& world, uint32_t seed);

}  // namespace spolia
