// Operations of groups on MPI against MPI's own calls, in one process each: run under mpirun (mpi_bench.sh).
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "spolia/comm/mpi/mpi_job.h"

namespace {

using namespace spolia;

/// Microseconds a call, the best of three series: on a busy machine others take part of the rest.
double microseconds(int64_t rounds, const std::function<void()>& call) {
  double best = 1e30;
  for (int series = 0; series < 3; ++series) {
    call();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < rounds; ++i) call();
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count() / static_cast<double>(rounds));
  }
  return best;
}

void report(World& world, const char* what, int64_t bytes, double ours, double theirs) {
  if (world.rank() != 0) return;
  std::printf("%-12s %11ld bytes %12.1f us %12.1f us by MPI alone\n", what, static_cast<long>(bytes), ours,
              theirs);
  std::fflush(stdout);
}

void compare(World& world) {
  Group& group = *world.all();
  report(world, "barrier", 0, microseconds(500, [&] { group.barrier().wait(); }),
         microseconds(500, [] { MPI_Barrier(MPI_COMM_WORLD); }));
  for (int64_t bytes :
       {int64_t{1} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{16} << 20, int64_t{128} << 20}) {
    std::vector<float> buffer(static_cast<size_t>(bytes / 4), 1.0f), other(buffer.size());
    const int64_t shape[] = {std::ssize(buffer)};
    const View view = dense_view(reinterpret_cast<std::byte*>(buffer.data()), DType::kFloat32, shape);
    const View result = dense_view(reinterpret_cast<std::byte*>(other.data()), DType::kFloat32, shape);
    const int count = static_cast<int>(buffer.size());
    const int64_t rounds = std::clamp<int64_t>((int64_t{64} << 20) / bytes, 2, 300);
    report(world, "broadcast", bytes, microseconds(rounds, [&] { group.broadcast(view, 0).wait(); }),
           microseconds(rounds, [&] { MPI_Bcast(buffer.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); }));
    report(world, "all-reduce", bytes, microseconds(rounds, [&] { group.all_reduce(view, result).wait(); }),
           microseconds(rounds, [&] {
             MPI_Allreduce(buffer.data(), other.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
           }));
    const int64_t part = shape[0] / group.size();
    const int64_t piece_shape[] = {part}, all_shape[] = {group.size(), part};
    const View piece = dense_view(reinterpret_cast<std::byte*>(buffer.data()), DType::kFloat32, piece_shape);
    const View all = dense_view(reinterpret_cast<std::byte*>(other.data()), DType::kFloat32, all_shape);
    const int part_count = static_cast<int>(part);
    report(world, "all-gather", bytes, microseconds(rounds, [&] { group.all_gather(piece, all).wait(); }),
           microseconds(rounds, [&] {
             MPI_Allgather(buffer.data(), part_count, MPI_FLOAT, other.data(), part_count, MPI_FLOAT,
                           MPI_COMM_WORLD);
           }));
  }
}

}  // namespace

int main(int count, char** arguments) {
  int provided = 0;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided);
  {
    MpiJob job;
    job.run(compare);
  }
  MPI_Finalize();
}
