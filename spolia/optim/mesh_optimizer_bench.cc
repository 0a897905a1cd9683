// A Muon step over thread ranks: how long, how even, how much is sent, and how much of that is hidden.
#include <algorithm>
#include <chrono>
#include <cmath>
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

/// The matrices of transformer layers over R replicas of S shards; where there are experts, those in place of
/// the MLP. Reports beside the time of a step:
///   newton_schulz_share   of that time, on a rank in the mean
///   work_max_to_mean      over the ranks, of their matrices' newton_schulz_work()
///   flops_max_to_mean     the same of the operations counted
///   sent_MB               by a rank in the mean: within rows, and to replicas
///   exchanged_to_formula  what is sent within rows, to 2 W (S-1) / (R S^2) elements of those that are cut
///   broadcast_to_formula  what replicas receive, to (R-1)/R W/S elements
///   hidden_share          of the broadcasts' time
void step_over_mesh(benchmark::State& state) {
  const int64_t replicas = state.range(0), shards = state.range(1), width = state.range(2),
                experts = state.range(3), layers = 4, steps = 3;
  const int ranks = static_cast<int>(replicas * shards);
  const auto layout = std::make_shared<const Layout>(
      parse_layout("[replicate, shard(0)] over " + std::to_string(replicas) + "x" + std::to_string(shards)));
  std::vector<Dims> shapes{{width, width}, {width / 4, width}, {width / 4, width}, {width, width}};
  if (experts > 0) {
    shapes.insert(shapes.end(), {{experts, width / 2, width}, {experts, width / 2, width}});
  } else {
    shapes.insert(shapes.end(), {{2 * width, width}, {2 * width, width}, {width, 2 * width}});
  }
  double gathered = 0, all = 0;  // elements of a step
  for (const Dims& shape : shapes) {
    all += static_cast<double>(layers * numel(shape));
    if (shape.size() == 2) gathered += static_cast<double>(layers * numel(shape));
  }
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
          const MatrixRule rule{shape.size() == 3 ? MatrixKind::kBatch : MatrixKind::kMatrix, {}};
          group.parameters.push_back(
              {{name, values.back().second, gradients.back().second, {}, false, rule}, shape, layout});
        }
      MeshMuon muon(world, {std::move(group)}, {.local = {}, .batch_bytes = int64_t{4} << 20, .engine = {}});
      muon.step();
      const MeshCounters before = muon.counters();
      const int64_t operations_before = muon.newton_schulz().operations();
      world.all()->barrier().wait();
      const auto start = std::chrono::steady_clock::now();
      for (int64_t step = 0; step < steps; ++step) muon.step();
      world.all()->barrier().wait();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
      auto of_ranks = [&](double value, double unit) {  // a step's, on each rank
        std::vector<double> each;
        for (int64_t n : all_gather_number(*world.all(), std::llround(value / unit)))
          each.push_back(static_cast<double>(n) * unit / steps);
        return each;
      };
      auto mean = [&](double value, double unit) {
        const std::vector<double> each = of_ranks(value, unit);
        return std::accumulate(each.begin(), each.end(), 0.) / ranks;
      };
      const MeshCounters& after = muon.counters();
      const double computing = mean(after.compute_seconds - before.compute_seconds, 1e-9),
                   on_their_way = mean(after.broadcast_seconds - before.broadcast_seconds, 1e-9),
                   waited = mean(after.broadcast_wait_seconds - before.broadcast_wait_seconds, 1e-9),
                   exchanged = mean(static_cast<double>(after.exchanged_bytes - before.exchanged_bytes), 1),
                   received = mean(static_cast<double>(after.received_bytes - before.received_bytes), 1);
      const std::vector<double> operations =
          of_ranks(static_cast<double>(muon.newton_schulz().operations() - operations_before), 1);
      if (world.rank() != 0) return;
      const auto r = static_cast<double>(replicas), s = static_cast<double>(shards);
      const std::vector<int64_t>& loads = muon.plan().loads;
      state.SetIterationTime(seconds);
      state.counters["work_max_to_mean"] =
          static_cast<double>(*std::max_element(loads.begin(), loads.end()) * ranks) /
          static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
      state.counters["newton_schulz_share"] = computing / seconds;
      state.counters["flops_max_to_mean"] = *std::max_element(operations.begin(), operations.end()) * ranks /
                                            std::accumulate(operations.begin(), operations.end(), 0.);
      state.counters["sent_MB"] = (exchanged + received) / 1e6;
      if (shards > 1)
        state.counters["exchanged_to_formula"] = exchanged / (4 * 2 * gathered * (s - 1) / (r * s * s));
      if (replicas > 1) state.counters["broadcast_to_formula"] = received / (2 * (r - 1) / r * all / s);
      state.counters["hidden_share"] = on_their_way > 0 ? 1 - waited / on_their_way : 1;
    });
  }
}
BENCHMARK(step_over_mesh)
    ->ArgNames({"replicas", "shards", "width", "experts"})
    ->Args({1, 1, 512, 0})
    ->Args({2, 1, 512, 0})
    ->Args({1, 2, 512, 0})
    ->Args({2, 2, 512, 0})
    ->Args({4, 2, 256, 0})
    ->Args({2, 1, 512, 8})
    ->Args({2, 2, 512, 8})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(3);

}  // namespace
}  // namespace spolia
