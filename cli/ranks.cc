#include "cli/ranks.h"

#include <memory>

#include "cli/command.h"
#include "spolia/base/error.h"
#include "spolia/comm/mpi/mpi_job.h"

namespace spolia::cli {
namespace {

/// Made once, for a process takes part in one job, and let go of at the end.
MpiJob& mpi_job() {
  static MpiJob job;
  return job;
}

}  // namespace

void add_ranks_option(CLI::App& verb, std::optional<int>& ranks) {
  verb.add_option(
          "--ranks", ranks,
          "on so many ranks, which are threads; under mpirun each process is one, without this option")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
}

bool ranks_are_processes() { return is_under_mpi(); }

int rank_count(std::optional<int> ranks) {
  if (!is_under_mpi()) return ranks.value_or(1);
  const auto processes = static_cast<int>(mpi_job().size());
  if (ranks && *ranks != processes) {
    throw InvalidArgumentError("--ranks {}, but mpirun has started {} processes: leave --ranks out", *ranks,
                               processes);
  }
  return processes;
}

int run_on_ranks(std::optional<int> ranks, const std::function<void(World& world)>& body) {
  const int count = rank_count(ranks);
  if (!is_under_mpi()) {
    launch(count, body);
    return kFine;
  }
  try {
    mpi_job().run(body);
  } catch (const Error& error) {
    // All have the same error, unless one is gone: rank 0, maybe.
    const bool alone = error.kind() == ErrorKind::kPeerFailed || error.kind() == ErrorKind::kTimeout;
    if (mpi_job().rank() == 0 || alone) throw;
    return kFailure;
  }
  return kFine;
}

}  // namespace spolia::cli
