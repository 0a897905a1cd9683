// Who owns what of 2,000 tensors on 16,384 ranks, as one of them finds out: milliseconds, and the memory that
// it takes at the peak beside the tensors' descriptions.
#include <malloc.h>

#include <fstream>
#include <string>

#include <benchmark/benchmark.h>

#include "spolia/plan/ownership.h"

namespace spolia {
namespace {

constexpr int64_t kTensors = 2000;
constexpr int64_t kRanks = 16'384;

using LayoutPtr = std::shared_ptr<const Layout>;

LayoutPtr layout_of(const DeviceMesh& mesh, std::vector<Placement> placements) {
  return std::make_shared<const Layout>(mesh, std::move(placements));
}

/// How a weight that is cut along its outputs, one cut along its inputs, a norm and a scalar are shared.
struct Layouts {
  LayoutPtr outputs, inputs, norm, scalar;
};

/// Weights and moments of a model of 70 billion parameters, and the steps of its optimizer.
std::vector<SharedTensor> model(const Layouts& layouts) {
  struct Parameter {
    Dims shape;
    LayoutPtr layout;
  };
  const std::vector<Parameter> block = {
      {{8192, 8192}, layouts.outputs}, {{1024, 8192}, layouts.outputs},  {{1024, 8192}, layouts.outputs},
      {{8192, 8192}, layouts.inputs},  {{28672, 8192}, layouts.outputs}, {{28672, 8192}, layouts.outputs},
      {{8192, 28672}, layouts.inputs}, {{8192}, layouts.norm},           {{8192}, layouts.norm},
  };
  std::vector<SharedTensor> tensors;
  auto add = [&](const Parameter& p) {
    tensors.push_back({DType::kBFloat16, p.shape, p.layout, {}});
    for (int moment = 0; moment < 2; ++moment) tensors.push_back({DType::kFloat32, p.shape, p.layout, {}});
    tensors.push_back({DType::kFloat32, {}, layouts.scalar, {}});
  };
  add({{128256, 8192}, layouts.outputs});
  add({{128256, 8192}, layouts.outputs});
  while (std::ssize(tensors) < kTensors) add(block[tensors.size() / 4 % block.size()]);
  return tensors;
}

std::vector<SharedTensor> hsdp() {
  const DeviceMesh mesh({8, kRanks / 8}, {"replica", "shard"});
  const LayoutPtr cut = layout_of(mesh, {Replicate{}, Shard{0}});
  return model({cut, cut, cut, layout_of(mesh, {Replicate{}, Replicate{}})});
}

std::vector<SharedTensor> tp_fsdp() {
  const DeviceMesh mesh({kRanks / 8, 8}, {"fsdp", "tp"});
  return model({layout_of(mesh, {StridedShard{0, 8, StridedSplit::kChunked}, Shard{0}}),
                layout_of(mesh, {Shard{0}, Shard{1}}), layout_of(mesh, {Shard{0}, Replicate{}}),
                layout_of(mesh, {Replicate{}, Replicate{}})});
}

/// Everything held by all.
std::vector<SharedTensor> replicated() {
  const LayoutPtr all = layout_of(DeviceMesh({kRanks}), {Replicate{}});
  return model({all, all, all, all});
}

/// The memory the process has at its peak since the last reset, in MiB.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

void bench_one_rank(benchmark::State& state, std::vector<SharedTensor> (*make)()) {
  const std::vector<SharedTensor> tensors = make();
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // sets the peak back to what is held now
  const double before = peak_mib();
  size_t parts = 0;
  for (auto _ : state) parts = assign_owners(tensors, kRanks, {}, kRanks / 3).size();
  state.counters["MiB"] = peak_mib() - before;
  state.counters["parts"] = static_cast<double>(parts);
}

void bench_all_ranks(benchmark::State& state, std::vector<SharedTensor> (*make)()) {
  const std::vector<SharedTensor> tensors = make();
  for (auto _ : state) {
    const std::vector<OwnedPart> parts = assign_owners(tensors, kRanks);
    const std::vector<int64_t> bytes = owned_bytes(tensors, parts, kRanks);
    int64_t most = 0, sum = 0;
    for (int64_t b : bytes) {
      most = std::max(most, b);
      sum += b;
    }
    state.counters["busiest/mean"] = static_cast<double>(most) * kRanks / static_cast<double>(sum);
    state.counters["parts"] = static_cast<double>(parts.size());
  }
}

BENCHMARK_CAPTURE(bench_one_rank, hsdp, hsdp)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bench_one_rank, tp_fsdp, tp_fsdp)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bench_one_rank, replicated, replicated)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bench_all_ranks, hsdp, hsdp)->Unit(benchmark::kMillisecond)->Iterations(1);

}  // namespace
}  // namespace spolia
