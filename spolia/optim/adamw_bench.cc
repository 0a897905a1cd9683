// AdamW beside a triad that reads four streams and writes three, in the same run. The rate counts the bytes
// that have to move.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/device/buffer.h"
#include "spolia/optim/adamw.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

constexpr int64_t kElements = int64_t{1} << 25;

struct Streams {
  std::vector<Buffer> buffers;
  Streams() {
    for (int i = 0; i < 5; ++i) {
      buffers.emplace_back(kElements * 4);
      buffers.back().prefault();
      std::memset(buffers.back().data(), 0x3C,
                  static_cast<size_t>(buffers.back().size()));  // .0115 in float32 and bfloat16
    }
  }
  View view(size_t i, DType dtype, int64_t count) {
    return dense_view(buffers[i].data(), dtype, std::array{count});
  }
};

Streams& streams() {
  static Streams held;
  return held;
}

void bench_triad(benchmark::State& state) {
  auto* g = reinterpret_cast<const float*>(streams().buffers[1].data());
  auto* __restrict p = reinterpret_cast<float*>(streams().buffers[0].data());
  auto* __restrict m = reinterpret_cast<float*>(streams().buffers[2].data());
  auto* __restrict v = reinterpret_cast<float*>(streams().buffers[3].data());
  for (auto _ : state) {
    for (int64_t i = 0; i < kElements; ++i) {
      const float x = g[i];
      m[i] = .5f * m[i] + x;
      v[i] = .5f * v[i] + x;
      p[i] = .5f * p[i] + x;
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kElements * 28);
}

/// The arguments: dtypes of the parameter and its gradient, of the state; amsgrad; a float32 master; the
/// elements.
void bench_adamw(benchmark::State& state) {
  const auto own = static_cast<DType>(state.range(0)), kept = static_cast<DType>(state.range(1));
  const bool amsgrad = state.range(2) != 0, mastered = state.range(3) != 0;
  const int64_t count = state.range(4);
  AdamWOptions options;
  options.amsgrad = amsgrad;
  Streams& s = streams();
  const AdamWTensors tensors{s.view(0, own, count),  mastered ? s.view(4, DType::kFloat32, count) : View{},
                             s.view(1, own, count),  s.view(2, kept, count),
                             s.view(3, kept, count), amsgrad ? s.view(4, kept, count) : View{}};
  int64_t step = 0;
  for (auto _ : state) {
    adamw_step(options, ++step, tensors);
    benchmark::ClobberMemory();
  }
  const int64_t bytes =
      2 * element_bytes(own) + (mastered ? 8 : element_bytes(own)) + (amsgrad ? 6 : 4) * element_bytes(kept);
  state.SetBytesProcessed(state.iterations() * count * bytes);
  state.SetLabel(std::string(name_of(own)) + ", state " + std::string(name_of(kept)));
}

constexpr int64_t kF32 = static_cast<int64_t>(DType::kFloat32), kF16 = static_cast<int64_t>(DType::kFloat16),
                  kBF16 = static_cast<int64_t>(DType::kBFloat16);
BENCHMARK(bench_triad);
BENCHMARK(bench_adamw)
    ->Args({kF32, kF32, 0, 0, kElements})
    ->Args({kF32, kF32, 0, 0, 1 << 14})
    ->Args({kF32, kF32, 1, 0, kElements})
    ->Args({kBF16, kF32, 0, 0, kElements})
    ->Args({kBF16, kF32, 0, 0, 1 << 14})
    ->Args({kBF16, kBF16, 0, 0, 1 << 14})
    ->Args({kBF16, kF32, 0, 1, kElements})
    ->Args({kBF16, kBF16, 0, 0, kElements})
    ->Args({kF16, kF32, 0, 1, kElements})
    ->Args({kF16, kF16, 0, 0, kElements});
BENCHMARK(bench_triad)->Name("bench_triad_again");

}  // namespace
}  // namespace spolia
