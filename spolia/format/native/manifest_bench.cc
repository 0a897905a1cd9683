// The manifest of 2,000 tensors on 16,384 ranks: seconds to write and to read it, its size, and the memory it
// takes at the peak. And a part of such a checkpoint, of which there are 16,384.
#include <malloc.h>

#include <fstream>
#include <string>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "spolia/format/native/manifest.h"
#include "spolia/layout/layout.h"

namespace spolia {
namespace {

constexpr int64_t kTensors = 2000;
constexpr int64_t kRanks = 16'384;

Manifest large_manifest() {
  Manifest manifest;
  manifest.block_bytes = int64_t{1} << 20;
  const DeviceMesh mesh({kRanks / 8, 8}, {"dp", "tp"});
  for (const auto& placements :
       {std::vector<Placement>{Shard{0}, Shard{0}}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}}) {
    manifest.layouts.push_back(Layout(mesh, placements).text());
  }
  for (uint32_t writer = 0; writer < kRanks; ++writer) {
    manifest.parts.push_back(
        {writer, {fmt::format("part-{:05}.json", writer), 100'000, fmt::format("{:064x}", writer)}});
  }
  for (int64_t t = 0; t < kTensors; ++t) {
    Manifest::Tensor tensor;
    tensor.name = fmt::format("model.layers.{:04}.mlp.experts.gate_proj.weight", t);
    tensor.dtype = DType::kBFloat16;
    tensor.shape = {kRanks * 4, 4096};
    tensor.chunks = kRanks;
    tensor.layout = static_cast<uint32_t>(t % 3);
    tensor.path = {"model", fmt::format("layers.{:04}.mlp.experts.gate_proj.weight", t)};
    manifest.tensors.push_back(std::move(tensor));
  }
  return manifest;
}

PartFile large_part() {
  PartFile part{"data-00000.safetensors", kTensors * 100 + 300'000, 300'000, 0x12345678, {}};
  for (int64_t t = 0; t < kTensors; ++t) {
    part.chunks.push_back(
        {static_cast<uint32_t>(t), 300'000 + t * 100, std::nullopt, {static_cast<uint32_t>(t)}});
  }
  return part;
}

/// A line of /proc/self/status in bytes.
double status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::stod(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

/// Measures how far the resident memory rises.
class PeakMemory {
 public:
  PeakMemory() {
    malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts afresh
    before_ = status_bytes("VmRSS:");
  }
  double bytes() const { return status_bytes("VmHWM:") - before_; }

 private:
  double before_;
};

void write_large_manifest(benchmark::State& state) {
  const PeakMemory peak;
  const Manifest manifest = large_manifest();
  size_t bytes = 0;
  for (auto _ : state) bytes = write_manifest(manifest).size();
  state.counters["file_MB"] = static_cast<double>(bytes) / 1e6;
  state.counters["peak_MB"] = peak.bytes() / 1e6;
}
BENCHMARK(write_large_manifest)->Unit(benchmark::kMillisecond);

void read_large_manifest(benchmark::State& state) {
  const std::string text = write_manifest(large_manifest());
  const PeakMemory peak;
  for (auto _ : state) benchmark::DoNotOptimize(read_manifest(text, "spolia.json"));
  state.counters["peak_MB"] = peak.bytes() / 1e6;
}
BENCHMARK(read_large_manifest)->Unit(benchmark::kMillisecond);

void write_large_part(benchmark::State& state) {
  const PartFile part = large_part();
  size_t bytes = 0;
  for (auto _ : state) bytes = write_part(part).size();
  state.counters["file_kB"] = static_cast<double>(bytes) / 1e3;
}
BENCHMARK(write_large_part)->Unit(benchmark::kMillisecond);

void read_large_part(benchmark::State& state) {
  const std::string text = write_part(large_part());
  for (auto _ : state) benchmark::DoNotOptimize(read_part(text, "part-00000.json"));
}
BENCHMARK(read_large_part)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
