// A Muon step over thread ranks: how long, how even, how much is sent, and how much of that is hidden.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"
#include "spolia/optim/mesh_optimizer.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

/// A bfloat16 tensor of random numbers.
std::pair<Buffer, View> random_tensor(const Dims& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel(shape)));
  for (float& value : values) value = normal(random);
  Buffer buffer(byte_size(DType::kBFloat16, shape));
  cast(DType::kBFloat16, buffer.data(), DType::kFloat32, values.data(), std::ssize(values));
  View view = dense_view(buffer.data(), DType::kBFloat16, shape);
  return {std::move(buffer), std::move(view)};
}

/// The matrices of transformer layers, over R replicas of S shards.
void step_over_mesh(benchmark::State& state) {
  const int64_t replicas = state.range(0), shards = state.range(1), width = state.range(2), layers = 4,
                steps = 3;
  const int ranks = static_cast<int>(replicas * shards);
  const auto layout = std::make_shared<const Layout>(
      parse_layout("[replicate, shard(0)] over " + std::to_string(replicas) + "x" + std::to_string(shards)));
  const std::vector<Dims> shapes{{width, width},     {width / 4, width}, {width / 4, width}, {width, width},
                                 {2 * width, width}, {2 * width, width}, {width, 2 * width}};
  for (auto _ : state) {
    launch(ranks, [&](World& world) {
      std::vector<std::pair<Buffer, View>> values, gradients;
      MeshMuonGroup group;
      for (int64_t layer = 0; layer < layers; ++layer)
        for (const Dims& shape : shapes) {
          const Dims local = layout->shard(shape, world.rank()).local_shape;
          values.push_back(random_tensor(local, values.size()));
          gradients.push_back(random_tensor(local, values.size() + 99));
          const std::string name = std::to_string(values.size());
          group.parameters.push_back(
              {{name, values.back().second, gradients.back().second, {}, false, {}}, shape, layout});
        }
      MeshMuon muon(world, {std::move(group)}, {.local = {}, .batch_bytes = int64_t{4} << 20, .engine = {}});
      muon.step();
      const MeshCounters before = muon.counters();
      world.all()->barrier().wait();
      const auto start = std::chrono::steady_clock::now();
      for (int64_t step = 0; step < steps; ++step) muon.step();
      world.all()->barrier().wait();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
      auto mean = [&](double value) {  // over the ranks, a step, in thousandths
        double sum = 0;
        for (int64_t n : all_gather_number(*world.all(), static_cast<int64_t>(value * 1e3 / steps)))
          sum += static_cast<double>(n);
        return sum / 1e3 / ranks;
      };
      const MeshCounters& after = muon.counters();
      const double arithmetic = mean(after.arithmetic_seconds - before.arithmetic_seconds),
                   on_their_way = mean(after.broadcast_seconds - before.broadcast_seconds),
                   waited = mean(after.broadcast_wait_seconds - before.broadcast_wait_seconds),
                   exchanged = mean(static_cast<double>(after.exchanged_bytes - before.exchanged_bytes)),
                   received = mean(static_cast<double>(after.received_bytes - before.received_bytes));
      if (world.rank() != 0) return;
      const std::vector<int64_t>& loads = muon.plan().loads;
      state.SetIterationTime(seconds);
      state.counters["arithmetic_share"] = arithmetic / seconds;
      state.counters["hidden_share"] = on_their_way > 0 ? 1 - waited / on_their_way : 1;
      state.counters["exchanged_MB"] = exchanged / 1e6;
      state.counters["received_MB"] = received / 1e6;
      state.counters["busiest_to_mean"] =
          static_cast<double>(*std::max_element(loads.begin(), loads.end())) * ranks /
          static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
    });
  }
}
BENCHMARK(step_over_mesh)
    ->ArgNames({"replicas", "shards", "width"})
    ->Args({1, 1, 512})
    ->Args({2, 1, 512})
    ->Args({1, 2, 512})
    ->Args({2, 2, 512})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(3);

}  // namespace
}  // namespace spolia
