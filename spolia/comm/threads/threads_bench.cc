// Thread ranks: broadcasts to three receivers against memcpy, and barriers of four ranks against one that
// spins and one that sleeps, all on the same threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/comm/exchange.h"
#include "spolia/comm/world.h"

namespace spolia {
namespace {

constexpr int kRanks = 4;

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

using Call = std::function<void()>;

/// Microseconds of a call, for each of the ways that `make` makes on each rank: medians of 41 series of
/// `calls` calls, of the ways in turn, so that a busy machine is as busy for all. A series ends when all
/// ranks have ended it.
std::vector<double> microseconds(int64_t calls, const std::function<std::vector<Call>(World&)>& make) {
  constexpr int kSeries = 41;
  std::vector<double> medians;
  launch(kRanks, [&](World& world) {
    const std::vector<Call> ways = make(world);
    std::vector<std::vector<double>> taken(ways.size());
    for (int series = -1; series < kSeries; ++series) {
      for (size_t way = 0; way < ways.size(); ++way) {
        world.all()->barrier().wait();
        const auto begin = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < calls; ++i) ways[way]();
        world.all()->barrier().wait();
        const std::chrono::duration<double, std::micro> all = std::chrono::steady_clock::now() - begin;
        if (series >= 0) taken[way].push_back(all.count() / static_cast<double>(calls));
      }
    }
    if (world.rank() != 0) return;
    for (std::vector<double>& values : taken) medians.push_back(median(std::move(values)));
  });
  return medians;
}

/// Broadcasts of some bytes to three receivers, and each receiver's memcpy of as many: all ranks' threads
/// copy at once, which is as fast as memory is.
void bench_broadcast(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const int64_t calls = std::clamp<int64_t>((int64_t{4} << 20) / bytes, 1, 100);
  std::vector<std::vector<std::byte>> memory(
      kRanks, std::vector<std::byte>(static_cast<size_t>(bytes), std::byte{1}));
  const std::vector<double> medians = microseconds(calls, [&](World& world) -> std::vector<Call> {
    std::vector<std::byte>& own = memory[static_cast<size_t>(world.rank())];
    return {[&] { world.all()->broadcast(byte_view(std::span(own)), 0).wait(); },
            [&] {
              if (world.rank() != 0) std::memcpy(own.data(), memory[0].data(), own.size());
              benchmark::ClobberMemory();
            }};
  });
  for (auto _ : state) state.SetIterationTime(medians[0] / 1e6);
  const auto delivered = static_cast<double>((kRanks - 1) * bytes) / 1e3;  // GB/s of a microsecond
  state.counters["GB/s"] = delivered / medians[0];
  state.counters["memcpy GB/s"] = delivered / medians[1];
}

/// Arrivals are counted by an atomic number; who waits gives its core away.
class SpinningBarrier {
 public:
  void wait() {
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == kRanks) {
      arrived_.store(0);
      round_.store(round + 1);
    }
    while (round_.load() == round) std::this_thread::yield();
  }

 private:
  std::atomic<int> arrived_{0}, round_{0};
};

class SleepingBarrier {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++arrived_ == kRanks) {
      arrived_ = 0;
      ++round_;
      return woken_.notify_all();
    }
    woken_.wait(lock, [&] { return round_ != round; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  int arrived_ = 0, round_ = 0;
};

/// Of four ranks, in microseconds.
void bench_barrier(benchmark::State& state) {
  SpinningBarrier spinning;
  SleepingBarrier sleeping;
  std::array<int64_t, kRanks> shared{};
  const std::vector<double> medians = microseconds(300, [&](World& world) -> std::vector<Call> {
    const auto gather = [&world] { all_gather_number(*world.all(), world.rank()); };
    const auto gather_spinning = [&, rank = static_cast<size_t>(world.rank())] {
      shared[rank] = world.rank();
      spinning.wait();
      benchmark::DoNotOptimize(shared);
      spinning.wait();
    };
    return {[&world] { world.all()->barrier().wait(); }, [&] { spinning.wait(); }, [&] { sleeping.wait(); },
            gather, gather_spinning};
  });
  for (auto _ : state) state.SetIterationTime(medians[0] / 1e6);
  state.counters["barrier"] = medians[0];
  state.counters["spinning"] = medians[1];
  state.counters["sleeping"] = medians[2];
  state.counters["all-gather"] = medians[3];
  state.counters["spinning all-gather"] = medians[4];
}

/// Milliseconds of processors that three ranks take to wait a second for the fourth.
void bench_long_wait(benchmark::State& state) {
  for (auto _ : state) {
    const std::clock_t begin = std::clock();
    launch(kRanks, [](World& world) {
      if (world.rank() == 3) std::this_thread::sleep_for(std::chrono::seconds(1));
      world.all()->barrier().wait();
    });
    state.SetIterationTime(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
}

BENCHMARK(bench_broadcast)
    ->Name("broadcast to 3")
    ->RangeMultiplier(8)
    ->Range(4 << 10, 128 << 20)
    ->Iterations(1)
    ->UseManualTime();
BENCHMARK(bench_barrier)->Name("barrier of 4, us")->Iterations(1)->UseManualTime();
BENCHMARK(bench_long_wait)
    ->Name("processor time of a wait of 1 s")
    ->Iterations(1)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
