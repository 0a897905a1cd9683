// What every backend has to do (spolia/comm/testing_*.h), and what is built upon groups (mpi_programs.h),
// each rank a process: run under mpirun. Rank 0 reports.
//
// usage: mpi_conformance [--slow] [--hosts N] [WORD]: the cases whose name contains WORD, all unless told.
// With
// --hosts, that the ranks are on so many.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "spolia/comm/mpi/mpi_job.h"
#include "spolia/comm/testing_conformance.h"
#include "spolia/comm/testing_failures.h"
#include "spolia/comm/testing_programs.h"
#include "tests/mpi_programs.h"

namespace {

using namespace spolia;

struct Case {
  std::string name;
  std::function<void(MpiJob& job)> run;
};

/// The failure that the launch has to throw, or none.
void run_failure(MpiJob& job, const FailureCase& failure) {
  try {
    job.run(failure.run, {.decorate = failure.decorate});
  } catch (const Error& error) {
    const std::string message = error.what();
    if (!failure.thrown) throw;
    require(
        error.kind() == failure.thrown->first && message.find(failure.thrown->second) != std::string::npos,
        "it threw: {}", message);
    return;
  }
  require(!failure.thrown, "it threw nothing");
}

/// More bytes than an int counts, in a broadcast and between two ranks.
void large_counts(World& world) {
  Group& group = *world.all();
  const int64_t bytes = (int64_t{1} << 31) + 4097;
  // Marks where a message ends and another begins, and at the end.
  const int64_t marks[] = {
      0, (int64_t{1} << 30) - 1, int64_t{1} << 30, (int64_t{1} << 31) - 1, int64_t{1} << 31, bytes - 1};
  std::vector<std::byte> buffer(static_cast<size_t>(bytes));
  const auto set_marks = [&](int salt) {
    for (int64_t at : marks)
      buffer[static_cast<size_t>(at)] = static_cast<std::byte>(mixed({at, salt}) % 255 + 1);
  };
  const auto require_marks = [&](int salt) {
    for (int64_t at : marks)
      require(buffer[static_cast<size_t>(at)] == static_cast<std::byte>(mixed({at, salt}) % 255 + 1),
              "byte {}", at);
  };
  const View view = byte_view(std::span(buffer));
  if (world.rank() == 0) set_marks(1);
  group.broadcast(view, 0).wait();
  require_marks(1);
  if (world.rank() == 1) set_marks(2);
  if (world.rank() == 1) group.send(view, 0).wait();
  if (world.rank() == 0) group.receive(view, 1).wait();
  if (world.rank() < 2) require_marks(2);
}

struct Options {
  bool slow = false;
  int64_t hosts = 0;  // that there have to be; 0: as many as there are
  std::string word;   // in the names of the cases
};

std::vector<Case> all_cases(int ranks, const Options& options) {
  std::vector<Case> cases;
  if (options.hosts > 0) {
    cases.push_back({"Hosts", [hosts = options.hosts](MpiJob& job) {
                       job.run([&](World& world) {
                         const int64_t last = std::ranges::max(world.hosts());
                         require(last + 1 == hosts, "there are {} hosts", last + 1);
                       });
                     }});
  }
  for (const ConformanceCase& one : conformance_cases())
    cases.push_back({"Conformance/" + one.name, [one](MpiJob& job) { job.run(one.run); }});
  if (ranks > 1) {
    for (const FailureCase& one : failure_cases())
      cases.push_back({"Failure/" + one.name, [one](MpiJob& job) { run_failure(job, one); }});
  }
  for (uint32_t seed = 1; seed < (options.slow ? 100u : 8u); ++seed) {
    cases.push_back({fmt::format("Program/{}", seed), [ranks, seed](MpiJob& job) {
                       const RandomProgram program(ranks, seed);
                       job.run([&](World& world) { program.run(world); });
                     }});
    const std::pair<const char*, void (*)(World&, uint32_t)> built[] = {
        {"Registry", run_registry_program},
        {"Batches", run_batches_program},
        {"Hierarchical", run_hierarchical_program}};
    for (const auto& [name, run] : built) {
      cases.push_back({fmt::format("{}/{}", name, seed),
                       [run, seed](MpiJob& job) { job.run([&](World& world) { run(world, seed); }); }});
    }
  }
  // 2 GiB a rank.
  if (options.slow && ranks == 2)
    cases.push_back({"LargeCounts", [](MpiJob& job) { job.run(large_counts); }});
  return cases;
}

/// What went wrong on any rank, for rank 0 to tell.
std::string gather_complaints(MpiJob& job, const std::string& own) {
  std::string all;
  job.run([&](World& world) {
    Group& group = *world.all();
    int64_t bytes = std::ssize(own);
    std::vector<int64_t> counts(static_cast<size_t>(world.size()));
    group
        .all_gather(dense_view(reinterpret_cast<std::byte*>(&bytes), DType::kInt64, {}),
                    dense_view(reinterpret_cast<std::byte*>(counts.data()), DType::kInt64,
                               std::vector<int64_t>{world.size()}))
        .wait();
    all.resize(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
    group
        .all_gather(byte_view(std::as_bytes(std::span(own))), counts,
                    byte_view(std::as_writable_bytes(std::span(all))))
        .wait();
  });
  return all;
}

int run_cases(MpiJob& job, const Options& options) {
  int failed = 0, ran = 0;
  for (const Case& one : all_cases(static_cast<int>(job.size()), options)) {
    if (one.name.find(options.word) == std::string::npos) continue;
    ++ran;
    std::string complaint;
    const auto begin = std::chrono::steady_clock::now();
    try {
      one.run(job);
    } catch (const std::exception& error) {
      complaint = fmt::format("  on rank {}: {}\n", job.rank(), error.what());
    }
    const std::string complaints = gather_complaints(job, complaint);
    failed += !complaints.empty();
    if (job.rank() != 0) continue;
    const auto taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%s %s (%.2f s)\n%s", complaints.empty() ? "ok    " : "FAILED", one.name.c_str(), taken,
                complaints.c_str());
    std::fflush(stdout);
  }
  if (job.rank() == 0) std::printf("%d of %d cases failed\n", failed, ran);
  return failed != 0 || ran == 0;
}

}  // namespace

int main(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--slow") {
      options.slow = true;
    } else if (argument == "--hosts" && i + 1 < count) {
      options.hosts = std::stoll(arguments[++i]);
    } else {
      options.word = argument;
    }
  }
  try {
    MpiJob job;
    return run_cases(job, options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_conformance: %s\n", error.what());
    return 2;
  }
}
