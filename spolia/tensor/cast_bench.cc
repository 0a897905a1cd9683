// Casts against memcpy in the same run. The rate counts the bytes read and written, memcpy's too. The
// arguments: the dtypes as they stand in DType, and the elements: in the caches, and past them.
#include <array>
#include <cstring>
#include <string>

#include <benchmark/benchmark.h>

#include "spolia/device/buffer.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

constexpr int64_t kElements = int64_t{1} << 26;
constexpr int64_t kElementsInCache = int64_t{1} << 14;

struct Buffers {
  Buffer src{kElements * 8}, dst{kElements * 8};
  Buffers() {
    src.prefault();
    dst.prefault();
    std::memset(src.data(), 0x3C, static_cast<size_t>(src.size()));  // about 0.01 in each dtype
    std::memset(dst.data(), 0, static_cast<size_t>(dst.size()));
  }
};

Buffers& buffers() {
  static Buffers held;
  return held;
}

void bench_cast(benchmark::State& state) {
  auto from = static_cast<DType>(state.range(0)), to = static_cast<DType>(state.range(1));
  int64_t count = state.range(2);
  buffers();
  for (auto _ : state) {
    cast(to, buffers().dst.data(), from, buffers().src.data(), count);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * count * (element_bytes(from) + element_bytes(to)));
  state.SetLabel(std::string(name_of(from)) + " to " + std::string(name_of(to)));
}
BENCHMARK(bench_cast)->ArgsProduct({{0, 1, 2, 3}, {0, 1, 2, 3}, {kElementsInCache, kElements}});

void bench_transposing_cast(benchmark::State& state) {
  constexpr int64_t kSide = 8192;
  buffers();
  for (auto _ : state) {
    cast_strided(std::array{kSide, kSide}, DType::kBFloat16, buffers().dst.data(),
                 std::array<int64_t, 2>{kSide * 2, 2}, DType::kFloat32, buffers().src.data(),
                 std::array<int64_t, 2>{4, kSide * 4});
  }
  state.SetBytesProcessed(state.iterations() * kSide * kSide * 6);
}
BENCHMARK(bench_transposing_cast);

}  // namespace
}  // namespace spolia
