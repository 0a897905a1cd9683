// Strided copies against memcpy of the same bytes in the same run. 512 MiB a side: past the caches.
// The argument of a benchmark is a run's or an element's bytes.
#include <array>
#include <cstring>

#include <benchmark/benchmark.h>

#include "spolia/device/buffer.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr int64_t kBytes = int64_t{512} << 20;

struct Buffers {
  Buffer src{kBytes}, dst{kBytes};
  Buffers() {
    src.prefault();
    dst.prefault();
    std::memset(src.data(), 1, kBytes);
    std::memset(dst.data(), 2, kBytes);
  }
};

Buffers& buffers() {
  static Buffers held;
  return held;
}

void bench_memcpy(benchmark::State& state) {
  buffers();
  for (auto _ : state) {
    std::memcpy(buffers().dst.data(), buffers().src.data(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}
BENCHMARK(bench_memcpy);

/// Half of each source row into a dense target, as a column shard is read.
void bench_gather_runs(benchmark::State& state) {
  int64_t run = state.range(0), rows = kBytes / (2 * run);
  for (auto _ : state) {
    copy_strided(std::array{rows, run}, 1, buffers().dst.data(), std::array<int64_t, 2>{run, 1},
                 buffers().src.data(), std::array<int64_t, 2>{2 * run, 1});
  }
  state.SetBytesProcessed(state.iterations() * rows * run);
}
BENCHMARK(bench_gather_runs)->RangeMultiplier(4)->Range(64, 65536);

/// A dense source into half of each target row.
void bench_scatter_runs(benchmark::State& state) {
  int64_t run = state.range(0), rows = kBytes / (2 * run);
  for (auto _ : state) {
    copy_strided(std::array{rows, run}, 1, buffers().dst.data(), std::array<int64_t, 2>{2 * run, 1},
                 buffers().src.data(), std::array<int64_t, 2>{run, 1});
  }
  state.SetBytesProcessed(state.iterations() * rows * run);
}
BENCHMARK(bench_scatter_runs)->RangeMultiplier(4)->Range(64, 65536);

/// A matrix transposed; its rows are a power of two apart, the hardest for caches.
void bench_transpose(benchmark::State& state) {
  int64_t element = state.range(0), cols = 8192, rows = kBytes / element / cols;
  for (auto _ : state) {
    copy_strided(std::array{cols, rows}, element, buffers().dst.data(), std::array{rows * element, element},
                 buffers().src.data(), std::array{element, cols * element});
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}
BENCHMARK(bench_transpose)->RangeMultiplier(2)->Range(1, 16);

/// Many small matrices, as a permute of attention heads: [b, h, s, d] to [b, s, h, d].
void bench_swap_middle_dims(benchmark::State& state) {
  int64_t run = state.range(0), h = 32, s = 128, b = kBytes / (h * s * run);
  for (auto _ : state) {
    copy_strided(std::array{b, s, h, run}, 1, buffers().dst.data(),
                 std::array{s * h * run, h * run, run, int64_t{1}}, buffers().src.data(),
                 std::array{s * h * run, run, s * run, int64_t{1}});
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}
BENCHMARK(bench_swap_middle_dims)->Arg(32)->Arg(128)->Arg(256);

}  // namespace
}  // namespace spolia
