// Thread ranks: broadcasts to three receivers against memcpy, and barriers of four ranks against one that
// spins and one that sleeps, all on the same threads.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/comm/world.h"

namespace spolia {
namespace {

constexpr int kRanks = 4;

/// Seconds that `rounds` calls of a rank's function take, as rank 0 sees it, once all have called it a few
/// times. `make` makes each rank's.
double seconds(int64_t rounds, const std::function<std::function<void()>(World&)>& make) {
  double taken = 0;
  launch(kRanks, [&](World& world) {
    const std::function<void()> body = make(world);
    for (int i = 0; i < 3; ++i) body();
    world.all()->barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < rounds; ++i) body();
    world.all()->barrier().wait();
    if (world.rank() == 0) {
      taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
  });
  return taken;
}

void bench_broadcast(benchmark::State& state) {
  const int64_t bytes = state.range(0), rounds = std::max<int64_t>(4, (int64_t{64} << 20) / bytes / 4);
  for (auto _ : state) {
    state.SetIterationTime(seconds(rounds, [bytes](World& world) {
      auto memory = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(bytes), std::byte{1});
      return [memory, &world] { world.all()->broadcast(byte_view(std::span(*memory)), 0).wait(); };
    }));
  }
  state.SetBytesProcessed(state.iterations() * rounds * bytes * (kRanks - 1));  // delivered
}

/// The same bytes, from one buffer into three others, by one thread or by two.
void bench_memcpy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const auto threads = static_cast<size_t>(state.range(1));
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::vector<std::byte>> to(kRanks - 1, std::vector<std::byte>(bytes));
  const int64_t rounds = std::max<int64_t>(4, (int64_t{64} << 20) / state.range(0) / 4);
  const auto copy = [&](size_t thread) {
    const size_t begin = bytes * thread / threads, end = bytes * (thread + 1) / threads;
    for (int64_t i = 0; i < rounds; ++i) {
      for (std::vector<std::byte>& target : to)
        std::memcpy(target.data() + begin, from.data() + begin, end - begin);
      benchmark::ClobberMemory();
    }
  };
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    std::thread other([&] {
      if (threads > 1) copy(1);
    });
    copy(0);
    other.join();
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  state.SetBytesProcessed(state.iterations() * rounds * state.range(0) * (kRanks - 1));
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

void time_barriers(benchmark::State& state, const std::function<std::function<void()>(World&)>& make) {
  constexpr int64_t kRounds = 5000;
  for (auto _ : state) state.SetIterationTime(seconds(kRounds, make));
  state.counters["us"] = benchmark::Counter(static_cast<double>(state.iterations() * kRounds) / 1e6,
                                            benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void bench_barrier(benchmark::State& state) {
  time_barriers(state, [](World& world) { return [&world] { world.all()->barrier().wait(); }; });
}
void bench_spinning_barrier(benchmark::State& state) {
  SpinningBarrier barrier;
  time_barriers(state, [&](World&) { return [&] { barrier.wait(); }; });
}
void bench_sleeping_barrier(benchmark::State& state) {
  SleepingBarrier barrier;
  time_barriers(state, [&](World&) { return [&] { barrier.wait(); }; });
}

constexpr int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20};

void broadcast_sizes(benchmark::internal::Benchmark* bench) {
  for (int64_t bytes : kSizes) bench->Arg(bytes);
}
void memcpy_sizes(benchmark::internal::Benchmark* bench) {
  for (int64_t bytes : kSizes) bench->Args({bytes, 1})->Args({bytes, 2});
}

BENCHMARK(bench_broadcast)->Name("broadcast to 3")->Apply(broadcast_sizes)->UseManualTime();
BENCHMARK(bench_memcpy)->Name("memcpy to 3")->Apply(memcpy_sizes)->UseManualTime();
BENCHMARK(bench_barrier)->Name("barrier of 4")->UseManualTime();
BENCHMARK(bench_spinning_barrier)->Name("barrier of 4, spinning")->UseManualTime();
BENCHMARK(bench_sleeping_barrier)->Name("barrier of 4, sleeping")->UseManualTime();

}  // namespace
}  // namespace spolia
