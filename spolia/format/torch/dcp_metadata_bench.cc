// Parsing a DCP metadata file of many chunks: seconds, and bytes of memory a chunk (kept by the catalog; at
// the peak, the file's own bytes included).
#include <malloc.h>

#include <fstream>
#include <string>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "spolia/base/hash.h"
#include "spolia/format/torch/dcp_metadata.h"
#include "spolia/format/torch/dcp_metadata_writer.h"

namespace spolia {
namespace {

/// Tensors of two dims, sharded by rows over `ranks` files.
Catalog sharded_catalog(int64_t tensors, int64_t ranks) {
  constexpr int64_t kRows = 4, kColumns = 4096, kItem = kRows * kColumns * 2 + 900;
  Catalog catalog;
  for (int64_t rank = 0; rank < ranks; ++rank) catalog.files.push_back(fmt::format("__{}_0.distcp", rank));
  for (int64_t t = 0; t < tensors; ++t) {
    TensorEntry tensor;
    tensor.name = fmt::format("model.layers.{}.mlp.experts.gate_proj.weight", t);
    tensor.dtype = DType::kBFloat16;
    tensor.shape = {kRows * ranks, kColumns};
    tensor.boxes = BoxList(2);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      tensor.boxes.add({{rank * kRows, 0}, {kRows, kColumns}});
      tensor.extents.push_back({static_cast<uint32_t>(rank), t * kItem, kItem});
    }
    catalog.tensors.push_back(std::move(tensor));
  }
  sort_entries(catalog);
  return catalog;
}

double heap_bytes() {
  struct mallinfo2 info = mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd);
}

/// A line of /proc/self/status in bytes.
double status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::stod(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

void dcp_metadata(benchmark::State& state) {
  int64_t ranks = state.range(0), tensors = state.range(1);
  double chunks = static_cast<double>(ranks * tensors);
  std::string bytes = write_dcp_metadata(sharded_catalog(tensors, ranks), pickle::Writer::Protocol::k4);
  malloc_trim(0);
  double kept = 0, peak = 0;
  for (auto _ : state) {
    state.PauseTiming();
    malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts afresh
    double heap_before = heap_bytes(), resident_before = status_bytes("VmRSS:");
    state.ResumeTiming();
    Catalog catalog = read_dcp_metadata(bytes_of(bytes), ".metadata");
    state.PauseTiming();
    peak = status_bytes("VmHWM:") - resident_before + static_cast<double>(bytes.size());
    kept = heap_bytes() - heap_before;
    benchmark::DoNotOptimize(catalog);
    { Catalog dropped = std::move(catalog); }
    state.ResumeTiming();
  }
  state.counters["file_MB"] = static_cast<double>(bytes.size()) / 1e6;
  state.counters["file_B/chunk"] = static_cast<double>(bytes.size()) / chunks;
  state.counters["kept_B/chunk"] = kept / chunks;
  state.counters["peak_B/chunk"] = peak / chunks;
}
BENCHMARK(dcp_metadata)
    ->Args({256, 1000})
    ->Args({8, 1000})
    ->Args({1, 100'000})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
