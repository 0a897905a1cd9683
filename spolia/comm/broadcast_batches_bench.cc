// 512 broadcasts to 4 thread ranks: one by one, batched, and as one of as many bytes, where operations are
// as cheap as they are between threads, and where each costs as much as on a cluster of accelerators.
// Arguments: bytes of a piece, microseconds that are added to every operation.
//
// An iteration does each of them once, so that a busy machine is as busy for all. Medians, in milliseconds of
// all ranks, from a barrier to a barrier.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
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

/// A backend that takes no runs: batches are gathered and dealt out.
class Packing final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool takes_runs() const override { return false; }
};

void add_pieces(BroadcastBatches& batches, Group& group, Buffer& memory) {
  const auto piece_bytes = static_cast<size_t>(memory.size() / kPieces);
  for (size_t p = 0; p < kPieces; ++p) {
    const size_t at = p * 197 % kPieces;  // no two in a row lie side by side
    batches.add(group, 0, byte_view(memory.bytes().subspan(at * piece_bytes, piece_bytes)));
  }
  batches.wait_all();
}

enum Way { kOneByOne, kBatched, kPacked, kAsOne, kWays };
constexpr const char* kNames[] = {"one by one", "batched", "packed", "as one"};

/// One rank's part.
class Sender {
 public:
  Sender(World& world, Buffer& memory) : all_(*world.all()), memory_(memory) {
    packing_ = std::make_unique<Group>(
        std::make_shared<Packing>(std::shared_ptr<GroupBackend>(world.all(), &all_.backend())));
  }
  void send(Way way) {
    if (way == kOneByOne) add_pieces(one_by_one_, all_, memory_);
    if (way == kBatched) add_pieces(batched_, all_, memory_);
    if (way == kPacked) add_pieces(packed_, *packing_, memory_);
    if (way == kAsOne) all_.broadcast(byte_view(memory_.bytes()), 0).wait();
  }

 private:
  Group& all_;
  Buffer& memory_;
  std::unique_ptr<Group> packing_;
  BroadcastBatches one_by_one_{{.batch_bytes = 0}}, batched_, packed_;
};

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

void bench_pieces(benchmark::State& state) {
  const int64_t piece_bytes = state.range(0);
  std::vector<Buffer> memory;
  for (int rank = 0; rank < kRanks; ++rank) memory.push_back(make_memory(piece_bytes));
  LaunchOptions options;
  if (state.range(1) > 0) options.decorate = costing(std::chrono::microseconds(state.range(1)));

  std::array<std::vector<double>, kWays> taken;
  const int64_t rounds = static_cast<int64_t>(state.max_iterations);
  launch(
      kRanks,
      [&](World& world) {
        Sender sender(world, memory[static_cast<size_t>(world.rank())]);
        for (int64_t round = -1; round < rounds; ++round) {  // the first makes the buffers
          for (int way = 0; way < kWays; ++way) {
            world.all()->barrier().wait();
            const auto begin = std::chrono::steady_clock::now();
            sender.send(static_cast<Way>(way));
            world.all()->barrier().wait();
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
            if (world.rank() == 0 && round >= 0) taken[static_cast<size_t>(way)].push_back(seconds.count());
          }
        }
      },
      options);
  for (auto _ : state) state.SetIterationTime(median(taken[kBatched]));
  for (size_t way = 0; way < kWays; ++way) state.counters[kNames[way]] = median(taken[way]) * 1e3;
}

BENCHMARK(bench_pieces)
    ->Name("512 pieces")
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(41)
    ->ArgNames({"bytes", "added_us"})
    ->ArgsProduct({{4 << 10, 64 << 10}, {0, 145}});

}  // namespace
}  // namespace spolia
