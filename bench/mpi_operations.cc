// Operations of groups on MPI against MPI's own calls, on the same processes: run under mpirun
// (mpi_bench.sh). Ours and MPI's take turns, so that a busy machine is as busy for both. Medians, as rank 0
// sees them.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "spolia/comm/broadcast_batches.h"
#include "spolia/comm/mpi/mpi_job.h"

namespace {

using namespace spolia;

using Call = std::function<void()>;

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

/// Microseconds a call of each, in series of so many calls. All ranks have ended a series when the next
/// begins.
std::vector<double> microseconds(int64_t calls, const std::vector<Call>& ways) {
  const int series = calls > 10 ? 15 : 7;
  std::vector<std::vector<double>> taken(ways.size());
  for (int s = -1; s < series; ++s) {
    for (size_t way = 0; way < ways.size(); ++way) {
      MPI_Barrier(MPI_COMM_WORLD);
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < calls; ++i) ways[way]();
      MPI_Barrier(MPI_COMM_WORLD);
      const std::chrono::duration<double, std::micro> all = std::chrono::steady_clock::now() - begin;
      if (s >= 0) taken[way].push_back(all.count() / static_cast<double>(calls));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& values : taken) medians.push_back(median(std::move(values)));
  return medians;
}

void compare(World& world, const char* what, int64_t bytes, int64_t calls, const Call& ours,
             const Call& theirs) {
  const std::vector<double> medians = microseconds(calls, {ours, theirs});
  if (world.rank() != 0) return;
  std::printf("%-12s %11ld bytes %12.1f us %12.1f us by MPI alone, ratio %.2f\n", what,
              static_cast<long>(bytes), medians[0], medians[1], medians[0] / medians[1]);
  std::fflush(stdout);
}

View floats(std::vector<float>& values, std::vector<int64_t> shape) {
  return dense_view(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, shape);
}

void compare_operations(World& world) {
  Group& group = *world.all();
  compare(
      world, "barrier", 0, 300, [&] { group.barrier().wait(); }, [] { MPI_Barrier(MPI_COMM_WORLD); });
  for (int64_t bytes : {int64_t{64}, int64_t{1} << 10, int64_t{4} << 10, int64_t{64} << 10, int64_t{1} << 20,
                        int64_t{16} << 20, int64_t{128} << 20}) {
    std::vector<float> buffer(static_cast<size_t>(bytes / 4), 1.0f), other(buffer.size());
    const int count = static_cast<int>(buffer.size());
    const View view = floats(buffer, {count}), result = floats(other, {count});
    const int64_t calls = std::clamp<int64_t>((int64_t{16} << 20) / bytes, 1, 100);
    compare(
        world, "broadcast", bytes, calls, [&] { group.broadcast(view, 0).wait(); },
        [&] { MPI_Bcast(buffer.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    compare(
        world, "all-reduce", bytes, calls, [&] { group.all_reduce(view, result).wait(); },
        [&] { MPI_Allreduce(buffer.data(), other.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    const int part = count / group.size();
    const View piece = floats(buffer, {part}), all = floats(other, {group.size(), part});
    compare(
        world, "all-gather", bytes, calls, [&] { group.all_gather(piece, all).wait(); },
        [&] {
          MPI_Allgather(buffer.data(), part, MPI_FLOAT, other.data(), part, MPI_FLOAT, MPI_COMM_WORLD);
        });
  }
}

/// 512 broadcasts of some bytes.
void compare_pieces(World& world, int64_t piece_bytes) {
  constexpr int64_t kPieces = 512;
  std::vector<std::byte> memory(static_cast<size_t>(kPieces * piece_bytes), std::byte{1});
  const auto piece = [&](int64_t p) {
    const int64_t at = p * 197 % kPieces;  // no two in a row lie side by side
    return std::span(memory).subspan(static_cast<size_t>(at * piece_bytes), static_cast<size_t>(piece_bytes));
  };
  Group& group = *world.all();
  BroadcastBatches one_by_one({.batch_bytes = 0}), batched;
  const auto add_all = [&](BroadcastBatches& batches) {
    for (int64_t p = 0; p < kPieces; ++p) batches.add(group, 0, byte_view(piece(p)));
    batches.wait_all();
  };
  const std::vector<double> medians = microseconds(
      1, {[&] { add_all(one_by_one); }, [&] { add_all(batched); },
          [&] { group.broadcast(byte_view(std::span(memory)), 0).wait(); },
          [&] {
            for (int64_t p = 0; p < kPieces; ++p)
              MPI_Bcast(piece(p).data(), static_cast<int>(piece_bytes), MPI_BYTE, 0, MPI_COMM_WORLD);
          },
          [&] { MPI_Bcast(memory.data(), static_cast<int>(memory.size()), MPI_BYTE, 0, MPI_COMM_WORLD); }});
  if (world.rank() != 0) return;
  std::printf(
      "512 pieces of %6ld bytes, ms: one by one %.2f, batched %.2f, as one %.2f; by MPI alone one by one "
      "%.2f, as one %.2f\n",
      static_cast<long>(piece_bytes), medians[0] / 1e3, medians[1] / 1e3, medians[2] / 1e3, medians[3] / 1e3,
      medians[4] / 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  int provided = 0;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided);
  {
    MpiJob job;
    job.run([](World& world) {
      compare_operations(world);
      compare_pieces(world, 4 << 10);
      compare_pieces(world, 64 << 10);
    });
  }
  MPI_Finalize();
}
