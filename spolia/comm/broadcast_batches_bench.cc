// 512 broadcasts to 4 ranks: one by one, batched, and as one, where operations are as cheap as they are
// between threads, and where each costs as much as on a cluster of accelerators. Arguments: bytes of a piece,
// microseconds that are added to every operation. A time is that of all ranks, from a barrier to a barrier.
#include <chrono>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/comm/broadcast_batches.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/world.h"

namespace spolia {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kPieces = 512;

/// What one rank sends and receives, touched before the clock starts.
Buffer make_memory(int64_t piece_bytes) {
  Buffer memory(kPieces * piece_bytes);
  memory.prefault();
  std::memset(memory.data(), 1, static_cast<size_t>(memory.size()));
  return memory;
}

/// Measures `send(group, memory)` of all ranks together.
template <class Send>
void measure(benchmark::State& state, Send send) {
  const int64_t piece_bytes = state.range(0);
  std::vector<Buffer> memory;
  for (int rank = 0; rank < kRanks; ++rank) memory.push_back(make_memory(piece_bytes));
  LaunchOptions options;
  if (state.range(1) > 0) options.decorate = costing(std::chrono::microseconds(state.range(1)));
  std::chrono::duration<double> seconds{};
  const auto run = [&](World& world) {
    Group& all = *world.all();
    for (int round = 0; round < 2; ++round) {  // the first makes the buffers
      all.barrier().wait();
      const auto begin = std::chrono::steady_clock::now();
      send(all, memory[static_cast<size_t>(world.rank())]);
      all.barrier().wait();
      if (world.rank() == 0) seconds = std::chrono::steady_clock::now() - begin;
    }
  };
  for (auto _ : state) {
    launch(kRanks, run, options);
    state.SetIterationTime(seconds.count());
  }
  state.SetBytesProcessed(state.iterations() * kPieces * piece_bytes);
}

void measure_pieces(benchmark::State& state, const BatchOptions& options) {
  std::vector<std::unique_ptr<BroadcastBatches>> batches(kRanks);
  measure(state, [&](Group& group, Buffer& memory) {
    std::unique_ptr<BroadcastBatches>& own = batches[static_cast<size_t>(group.place())];
    if (!own) own = std::make_unique<BroadcastBatches>(options);  // later rounds find its buffers
    const auto piece_bytes = static_cast<size_t>(memory.size() / kPieces);
    for (size_t p = 0; p < kPieces; ++p) {
      own->add(group, 0, byte_view(memory.bytes().subspan(p * piece_bytes, piece_bytes)));
    }
    own->wait_all();
  });
}

void bench_one_by_one(benchmark::State& state) { measure_pieces(state, {.batch_bytes = 0}); }
void bench_batched(benchmark::State& state) { measure_pieces(state, {}); }
void bench_as_one(benchmark::State& state) {
  measure(state, [](Group& group, Buffer& memory) { group.broadcast(byte_view(memory.bytes()), 0).wait(); });
}

void arguments(benchmark::internal::Benchmark* bench) {
  bench->UseManualTime()->Unit(benchmark::kMillisecond)->ArgNames({"bytes", "added_us"});
  bench->ArgsProduct({{4 << 10, 64 << 10}, {0, 145}});
}
BENCHMARK(bench_one_by_one)->Apply(arguments);
BENCHMARK(bench_batched)->Apply(arguments);
BENCHMARK(bench_as_one)->Apply(arguments);

}  // namespace
}  // namespace spolia
