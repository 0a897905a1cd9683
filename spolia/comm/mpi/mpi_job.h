// A job under MPI, as one of its processes sees it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "spolia/comm/mpi/mpi_engine.h"
#include "spolia/comm/world.h"

namespace spolia {

/// Used by one thread. All processes of the job make it, run the same bodies with it, and let it go together.
class MpiJob {
 public:
  /// Loads the plugin (plugin.h: UnsupportedError where it is not there) and starts the communication thread,
  /// which initialises MPI, unless someone has before: then calls have to be allowed from any thread
  /// (MPI_THREAD_MULTIPLE, or _SERIALIZED where nobody else calls meanwhile), or it is an UnsupportedError.
  MpiJob();
  /// For tests.
  explicit MpiJob(std::function<Transport*()> open);
  /// Finalises MPI, if it was initialised here and the last run() ended together. Where it did not, MPI is
  /// left as it is: `mpirun` then ends the job, with an error.
  ~MpiJob();

  int64_t rank() const { return engine_->rank(); }
  int64_t size() const { return engine_->size(); }

  /// As launch() (world.h), with this process for one of the ranks: throws the same error on all ranks. Where
  /// some rank is lost, so that they cannot agree on one, each throws its own.
  /// `options.ranks_per_host` means nothing here.
  void run(const std::function<void(World& world)>& body, const LaunchOptions& options = {});

  /// How long a rank whose body has thrown waits for the others at the end of run(), before it goes on alone:
  /// five seconds unless told.
  void set_patience(milliseconds patience) { patience_ = patience; }

  /// Ends all processes of the job: for main(), after it has said why.
  void abort(int code) { engine_->abort(code); }

 private:
  void agree_on_ids();
  void end_together(const std::exception_ptr& own);

  std::shared_ptr<MpiEngine> engine_;
  std::unique_ptr<Group> lobby_;  // where ranks meet before and after a run
  int64_t next_id_ = 1;           // of groups
  milliseconds patience_ = std::chrono::seconds(5);
};

/// Whether this process was started by mpirun, or what stands for it: by the environment that it leaves.
bool is_under_mpi();

/// Runs `body` once with MpiJob where this process is one of an MPI job, else on one rank alone.
void run_world(const std::function<void(World& world)>& body, const LaunchOptions& options = {});

}  // namespace spolia
