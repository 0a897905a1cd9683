// Verbs that run on several ranks: threads of this process, or processes under mpirun.
#pragma once

#include <functional>
#include <optional>

#include <CLI/CLI.hpp>

#include "spolia/comm/world.h"

namespace spolia::cli {

/// --ranks N. Under mpirun it need not be given.
void add_ranks_option(CLI::App& verb, std::optional<int>& ranks);

/// How many ranks there will be.
int rank_count(std::optional<int> ranks);

/// Whether ranks are processes of their own.
bool ranks_are_processes();

/// Runs `body` on all ranks, on a thread of this process each, or, under mpirun, here for this process's
/// rank. Throws what launch() does; under mpirun, where all ranks have failed alike, on rank 0 alone. Returns
/// the exit code. InvalidArgumentError where --ranks and mpirun say different numbers.
int run_on_ranks(std::optional<int> ranks, const std::function<void(World& world)>& body);

}  // namespace spolia::cli
