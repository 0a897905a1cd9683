// What every backend has to do (spolia/comm/testing_*.h), on a real GPU and with the real NCCL: as many ranks
// as there are GPUs, up to 8, unless told; threads of this process.
//
// usage: nccl_conformance [--ranks N] [WORD]: the cases whose name contains WORD, all unless told.
// Exits with 77, and says why, where CUDA, a GPU or NCCL is missing.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "spolia/comm/nccl/nccl_world.h"
#include "spolia/comm/testing_conformance.h"
#include "spolia/comm/testing_failures.h"
#include "spolia/comm/testing_programs.h"
#include "spolia/device/cuda.h"
#include "spolia/device/strided_copy.h"

namespace {

using namespace spolia;

struct Case {
  std::string name;
  std::function<void()> run;
};

void launch_nccl(int ranks, const std::function<void(World&)>& body, const Decorator& decorate = nullptr) {
  launch(ranks, [&](World& host) {
    NcclWorld world(host, {DeviceKind::kCuda, static_cast<int>(host.rank())}, {.decorate = decorate});
    body(world);
  });
}

void run_failure(int ranks, const FailureCase& failure) {
  try {
    launch_nccl(ranks, failure.run, failure.decorate);
  } catch (const Error& error) {
    if (!failure.thrown) throw;
    const std::string message = error.what();
    require(
        error.kind() == failure.thrown->first && message.find(failure.thrown->second) != std::string::npos,
        "it threw: {}", message);
    return;
  }
  require(!failure.thrown, "it threw nothing");
}

/// Rows with gaps, and a transposed copy, there and back.
void device_copies() {
  const Device device{DeviceKind::kCuda, 0};
  const int64_t rows = 300, columns = 500;
  const std::vector<std::byte> bytes = noise(1, rows * columns);
  TestMemory source(device, bytes), target(device, rows * columns);
  const int64_t sizes[] = {rows, columns}, across[] = {1, rows}, along[] = {columns, 1};
  copy_strided_on(backend_of(device), sizes, 1, target.data(), across, source.data(), along);
  const std::vector<std::byte> transposed = target.read();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      require(transposed[static_cast<size_t>(c * rows + r)] == bytes[static_cast<size_t>(r * columns + c)],
              "element {}, {}", r, c);
    }
  }
}

/// The event of a stream that is still at work.
void operations_after_events(World& world) {
  const CudaBackend& device = cuda_backend(world.all()->device().index);
  const int64_t bytes = int64_t{256} << 20;
  TestMemory buffer(world.all()->device(), bytes), source(world.all()->device(), bytes, std::byte{7});
  const int64_t shape[] = {bytes};
  const View view = dense_view(buffer.data(), DType::kUInt8, shape, world.all()->device());
  CudaStream stream(device);
  CudaEvent event(device);
  for (int i = 0; i < 20; ++i) stream.copy(buffer.data(), source.data(), bytes);
  event.record(stream);
  world.all()->all_reduce(view, view, ReduceOp::kMax, event.get()).wait();
  require(event.has_happened(), "an operation landed before the event that it starts after");
  require(buffer.read() == source.read(), "an all-reduce after an event");
}

std::vector<Case> all_cases(int ranks) {
  std::vector<Case> cases = {{"Device/Copies", device_copies}, {"Nccl/OperationsAfterEvents", [ranks] {
                                                                  launch_nccl(ranks, operations_after_events);
                                                                }}};
  for (const ConformanceCase& one : conformance_cases())
    cases.push_back({"Conformance/" + one.name, [one, ranks] { launch_nccl(ranks, one.run); }});
  if (ranks > 1) {
    for (const FailureCase& one : failure_cases())
      cases.push_back({"Failure/" + one.name, [one, ranks] { run_failure(ranks, one); }});
  }
  for (uint32_t seed = 1; seed < 10; ++seed) {
    cases.push_back({fmt::format("Program/{}", seed), [ranks, seed] {
                       const RandomProgram program(ranks, seed);
                       launch_nccl(ranks, [&](World& world) { program.run(world); });
                     }});
  }
  return cases;
}

int run_cases(int ranks, const std::string& word) {
  int failed = 0, ran = 0;
  for (const Case& one : all_cases(ranks)) {
    if (one.name.find(word) == std::string::npos) continue;
    ++ran;
    std::string complaint;
    const auto begin = std::chrono::steady_clock::now();
    try {
      one.run();
    } catch (const std::exception& error) {
      complaint = error.what();
      ++failed;
    }
    const auto taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%s %s (%.2f s)%s%s\n", complaint.empty() ? "ok    " : "FAILED", one.name.c_str(), taken,
                complaint.empty() ? "" : "\n  ", complaint.c_str());
    std::fflush(stdout);
  }
  std::printf("%d of %d cases failed on %d ranks\n", failed, ran, ranks);
  return failed != 0 || ran == 0;
}

/// How many GPUs there are; UnsupportedError where something is missing.
int gpus() {
  cuda_backend(0);
  nccl_library();
  int count = 0;
  cuda_driver().device_count(&count);
  return count;
}

}  // namespace

int main(int count, char** arguments) {
  int ranks = 0;
  std::string word;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--ranks" && i + 1 < count) {
      ranks = std::atoi(arguments[++i]);
    } else {
      word = argument;
    }
  }
  try {
    const int there = gpus();
    return run_cases(ranks > 0 ? ranks : std::min(there, 8), word);
  } catch (const spolia::UnsupportedError& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
}
