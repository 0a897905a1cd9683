// A program under mpirun that ends as it is told to; mpi_endings.sh looks at how the job ends.
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "spolia/base/error.h"
#include "spolia/comm/mpi/mpi_job.h"

namespace {

using namespace spolia;

void barriers(World& world) {
  while (true) world.all()->barrier().wait();
}

void end(World& world, const std::string& how) {
  world.all()->set_timeout(std::chrono::seconds(1));
  world.all()->barrier().wait();
  if (how == "fine") return;
  if (world.rank() == 1) {
    if (how == "killed") kill(getpid(), SIGKILL);
    throw NotFoundError("nothing there");
  }
  if (how == "thrown-alone") std::this_thread::sleep_for(std::chrono::minutes(10));
  barriers(world);
}

/// MPI belongs to this program, which goes on with it.
int be_host(int level) {
  int provided = 0, size = 0, sum = 0, one = 1;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  int result = 0;
  try {
    MpiJob job;
    job.run([](World& world) { end(world, "fine"); });
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    result = 2;
  }
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (sum != size) result = 3;
  MPI_Finalize();
  return result;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string how = count > 1 ? arguments[1] : "fine";
  if (how == "host-multiple") return be_host(MPI_THREAD_MULTIPLE);
  if (how == "host-funneled") return be_host(MPI_THREAD_FUNNELED);
  try {
    run_world([&](World& world) { end(world, how); });
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
