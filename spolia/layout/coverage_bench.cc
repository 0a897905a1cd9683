// How long the exact coverage check and the box index take on shuffled grids, the tilings that layouts make.
#include <numeric>
#include <random>

#include <benchmark/benchmark.h>

#include "spolia/layout/box_index.h"
#include "spolia/layout/coverage.h"

namespace spolia {
namespace {

constexpr int64_t kTile = 16;

/// A box of kTile in each dim for every tile, in random order.
BoxList shuffled_grid(const Dims& tiles) {
  std::vector<uint32_t> order(numel(tiles));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(1);
  std::ranges::shuffle(order, random);
  BoxList boxes(tiles.size());
  boxes.reserve(order.size());
  Dims offsets(tiles.size()), sizes(tiles.size(), kTile);
  for (int64_t tile : order) {
    for (size_t d = tiles.size(); d-- > 0; tile /= tiles[d]) offsets[d] = tile % tiles[d] * kTile;
    boxes.add(offsets, sizes);
  }
  return boxes;
}

Dims shape_of(const Dims& tiles) {
  Dims shape;
  for (int64_t count : tiles) shape.push_back(count * kTile);
  return shape;
}

void bench_coverage(benchmark::State& state, Dims tiles) {
  BoxList boxes = shuffled_grid(tiles);
  Dims shape = shape_of(tiles);
  for (auto _ : state) {
    if (check_coverage(boxes, shape).fault) state.SkipWithError("a fault in a sound grid");
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(boxes.size()));
}

void bench_index_build(benchmark::State& state, Dims tiles) {
  BoxList boxes = shuffled_grid(tiles);
  for (auto _ : state) {
    BoxIndex index(boxes);
    benchmark::DoNotOptimize(index);
    state.counters["bytes/box"] =
        static_cast<double>(index.memory_bytes()) / static_cast<double>(boxes.size());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(boxes.size()));
}

/// Queries of two tiles' size at random places.
void bench_index_query(benchmark::State& state, Dims tiles) {
  BoxList boxes = shuffled_grid(tiles);
  BoxIndex index(boxes);
  std::mt19937 random(2);
  Box query{Dims(tiles.size()), Dims(tiles.size(), 2 * kTile)};
  size_t answers = 0;
  for (auto _ : state) {
    for (size_t d = 0; d < tiles.size(); ++d) query.offsets[d] = random() % (tiles[d] * kTile);
    answers += index.overlapping(query).size();
  }
  state.counters["answers"] =
      benchmark::Counter(static_cast<double>(answers), benchmark::Counter::kAvgIterations);
}

#define GRID_BENCH(function, ...) BENCHMARK_CAPTURE(function, __VA_ARGS__)->Unit(benchmark::kMillisecond)

GRID_BENCH(bench_coverage, 4M_1d, Dims{4'000'000});
GRID_BENCH(bench_coverage, 4M_2d, Dims{2000, 2000});
GRID_BENCH(bench_coverage, 4M_2d_rows, Dims{4'000'000, 1});
GRID_BENCH(bench_coverage, 4M_3d, Dims{160, 160, 160});
GRID_BENCH(bench_index_build, 256k_2d, Dims{512, 512});
GRID_BENCH(bench_index_build, 1_2d, Dims{1, 1});
BENCHMARK_CAPTURE(bench_index_query, 1_2d, Dims{1, 1});
BENCHMARK_CAPTURE(bench_index_query, 4k_2d, Dims{64, 64});
BENCHMARK_CAPTURE(bench_index_query, 256k_1d, Dims{262144});
BENCHMARK_CAPTURE(bench_index_query, 256k_2d, Dims{512, 512});
BENCHMARK_CAPTURE(bench_index_query, 256k_3d, Dims{64, 64, 64});

}  // namespace
}  // namespace spolia
