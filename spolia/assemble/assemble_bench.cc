// A gibibyte streamed whole to ranks that are threads, beside what the machine copies.
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/assemble/assembler.h"
#include "spolia/comm/world.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

constexpr int64_t kBytes = int64_t{1} << 30;

/// All threads copy blocks of `bytes` from a large buffer into a large buffer, each its own.
void BM_Copy(benchmark::State& state) {
  const auto threads = static_cast<size_t>(state.range(0));
  const size_t each = size_t{256} << 20;
  std::vector<Buffer> from, to;
  for (size_t t = 0; t < threads; ++t) {
    from.emplace_back(static_cast<int64_t>(each));
    to.emplace_back(static_cast<int64_t>(each));
    std::memset(from[t].data(), 1, each);
    std::memset(to[t].data(), 2, each);
  }
  for (auto _ : state) {
    std::vector<std::thread> running;
    for (size_t t = 0; t < threads; ++t) {
      running.emplace_back([&, t] { std::memcpy(to[t].data(), from[t].data(), each); });
    }
    for (std::thread& thread : running) thread.join();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(threads * each));
}
BENCHMARK(BM_Copy)->ArgName("threads")->Arg(1)->Arg(2)->Arg(4)->UseRealTime()->Unit(benchmark::kMillisecond);

/// How 1 GiB is cut into tensors, and how these lie.
struct Shape {
  int64_t tensor_bytes = 16 << 20;
  int64_t columns = 1024;
  bool all_differ = false;  // in size, by up to an eighth
};

void BM_Stream(benchmark::State& state, const std::string& how, const Shape& tensor, int64_t memory,
               bool grid = false) {
  constexpr int kRanks = 4;
  const int64_t tensors = kBytes / tensor.tensor_bytes;
  const auto shape_of = [&](int64_t t) -> Dims {
    const int64_t rows = tensor.tensor_bytes / 4 / tensor.columns;
    return {rows - (tensor.all_differ ? rows / 8 * (t % 64) / 64 : 0), tensor.columns};
  };
  const auto layout = std::make_shared<const Layout>(parse_layout(how));
  std::mutex mutex;
  double slowest = 0;
  int64_t delivered = 0, sent = 0, least = 0, peak = 0;
  std::vector<Buffer> shards;
  for (int rank = 0; rank < kRanks; ++rank) {
    int64_t bytes = 0;
    for (int64_t t = 0; t < tensors; ++t)
      bytes += byte_size(DType::kFloat32, layout->shard(shape_of(t), rank).local_shape);
    shards.emplace_back(bytes);
    std::memset(shards.back().data(), rank, static_cast<size_t>(bytes));
  }
  const auto stream_once = [&] {
    delivered = peak = 0;
    slowest = 0;
    launch(kRanks, [&](World& world) {
      StateDict dict;
      std::byte* at = shards[static_cast<size_t>(world.rank())].data();
      for (int64_t t = 0; t < tensors; ++t) {
        const Dims shape = shape_of(t), local = layout->shard(shape, world.rank()).local_shape;
        const View view = dense_view(at, DType::kFloat32, local);
        dict.add("layers." + std::to_string(t) + ".weight", sharded_tensor(view, shape, layout));
        at += view.bytes();
      }
      AssemblerOptions options;
      options.memory = memory;
      std::shared_ptr<Group> row, column;
      if (grid) {
        for (const auto& ranks : {std::vector<int64_t>{0, 1}, {2, 3}}) {
          if (auto made = world.create(ranks)) row = made;
        }
        for (const auto& ranks : {std::vector<int64_t>{0, 2}, {1, 3}}) {
          if (auto made = world.create(ranks)) column = made;
        }
      }
      Assembler assembler =
          grid ? Assembler(row.get(), column.get(), dict, options) : Assembler(*world.all(), dict, options);
      world.all()->barrier().wait();
      const auto start = std::chrono::steady_clock::now();
      while (const auto item = assembler.next()) benchmark::DoNotOptimize(item->memory.data);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      std::lock_guard lock(mutex);
      slowest = std::max(slowest, seconds);
      delivered = assembler.plan().delivered;
      sent = assembler.plan().sent;
      least = assembler.plan().least;
      peak = std::max(peak, assembler.report().peak_bytes);
    });
  };
  stream_once();  // shards that are fresh are slow
  for (auto _ : state) {
    stream_once();
    state.SetIterationTime(slowest);
  }
  state.SetBytesProcessed(state.iterations() * delivered);
  state.counters["sent_of_least"] =
      static_cast<double>(sent) / static_cast<double>(std::max<int64_t>(least, 1));
  state.counters["peak_MiB"] = static_cast<double>(peak) / 0x1p20;
  state.counters["budget_MiB"] = static_cast<double>(memory) / 0x1p20;
}

constexpr int64_t kMiB = int64_t{1} << 20;
#define STREAM(name, ...) \
  BENCHMARK_CAPTURE(BM_Stream, name, __VA_ARGS__)->UseManualTime()->Unit(benchmark::kMillisecond)
STREAM(rows_16MiB_256MiB, "[shard(0)] over 4", {}, 256 * kMiB);
STREAM(rows_16MiB_1GiB, "[shard(0)] over 4", {}, 1024 * kMiB);
STREAM(rows_64MiB_66MiB, "[shard(0)] over 4", {.tensor_bytes = 64 * kMiB}, 66 * kMiB);
STREAM(rows_256KiB_64MiB, "[shard(0)] over 4", {.tensor_bytes = kMiB / 4}, 64 * kMiB);
STREAM(rows_of_all_sizes_14_to_16MiB_256MiB, "[shard(0)] over 4", {.all_differ = true}, 256 * kMiB);
STREAM(columns_16MiB_256MiB, "[shard(1)] over 4", {}, 256 * kMiB);
STREAM(columns_of_32B_16MiB_256MiB, "[shard(1)] over 4", {.columns = 32}, 256 * kMiB);
STREAM(replicated_twice_16MiB_256MiB, "[replicate, shard(0)] over 2x2", {}, 256 * kMiB);
STREAM(two_groups_16MiB_256MiB, "[shard(0)] over 4", {}, 256 * kMiB, true);

}  // namespace
}  // namespace spolia
