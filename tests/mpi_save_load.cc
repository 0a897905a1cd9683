// Saving and loading where each rank is a process: run under mpirun. Rank 0 reports.
//
// usage: mpi_save_load: all cases.
//        mpi_save_load killed FOLDER N: saves step 1, and step 2, during which rank 1 is killed when it
//        starts
//            its Nth operation.
//        mpi_save_load check FOLDER STEP: on threads, that STEP is the latest in FOLDER, and whole.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "spolia/checkpoint/background_save.h"
#include "spolia/checkpoint/checkpoints.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/checkpoint/testing_jobs.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/exchange.h"
#include "spolia/comm/mpi/mpi_job.h"
#include "spolia/comm/testing_tensors.h"

namespace {

using namespace spolia;
namespace fs = std::filesystem;

void save_state(World& world, const Job& job, const fs::path& path, const SaveOptions& options = {}) {
  RankState state(job.tensors, world.rank());
  state.fill();
  state.dict().add("step", Value(int64_t{7}));
  save(*world.all(), state.dict(), *posix_store(), path, options);
}

void load_state(World& world, const Job& job, const fs::path& path, const LoadOptions& options = {}) {
  const auto source = open_together(*world.all(), posix_store(), path);
  RankState state(job.tensors, world.rank());
  state.poison();
  state.dict().add("step", Value());
  const Report report = load(world, *source, state.dict(), options);
  const std::vector<std::string> differing = state.differing();
  require(differing.empty(), "tensor {} differs", differing.empty() ? "" : differing[0]);
  require(*state.dict().find("step")->value() == Value(int64_t{7}), "the step differs");
  require(report.used.size() == state.dict().size(), "only {} keys are used", report.used.size());
}

/// What rank 0 does alone while the others wait; it fails on all.
void alone(World& world, const std::function<void()>& body) {
  agree(*world.all(), "alone", [&] {
    if (world.rank() == 0) body();
  });
}

constexpr TargetFormat kFormats[] = {TargetFormat::kSpolia, TargetFormat::kDcp};
constexpr ReadMode kModes[] = {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts,
                               ReadMode::kCheapest};

/// From every kind of layout to another, between processes, and between processes and threads.
void save_and_load(World& world, const fs::path& folder) {
  const auto ranks = static_cast<int>(world.size());
  for (size_t k = 0; k < kinds().size(); ++k) {
    const Kind &from = kinds()[k], &to = kinds()[(k * 5 + 3) % kinds().size()];
    const TargetFormat format = kFormats[k % 2];
    const fs::path path = folder / fmt::format("kind-{}", k),
                   by_threads = folder / fmt::format("threads-{}", k);
    save_state(world, job_of(from, ranks, false), path, {.to = format, .durable = k == 0});
    for (ReadMode mode : kModes) {
      LoadOptions options{.mode = mode};
      options.batches.batch_bytes = k % 3 == 0 ? 0 : 1000 * static_cast<int64_t>(k);
      load_state(world, job_of(to, ranks, false), path, options);
    }
    const int threads = static_cast<int>(k % 5) + 1;
    alone(world, [&] {
      require(verify(*open_source(posix_store(), path), {}).faults.empty(), "there are faults in {}",
              path.string());
      launch(threads, [&](World& local) {
        load_state(local, job_of(to, threads, false), path);
        save_state(local, job_of(from, threads, false), by_threads, {.to = format, .durable = false});
      });
    });
    load_state(world, job_of(to, ranks, false), by_threads, {.mode = kModes[k % 4]});
  }
}

void run_of_checkpoints(World& world, const fs::path& folder) {
  const auto ranks = static_cast<int>(world.size());
  const Job job = job_of(kinds()[2], ranks, false), other = job_of(kinds()[7], ranks, false);
  Checkpoints checkpoints(folder / "run", 2);
  const auto load_latest = [&](const Job& wanted) {
    RankState state(wanted.tensors, world.rank());
    state.dict().add("step", Value());
    checkpoints.load(world, state.dict());
    require(state.differing().empty(), "a tensor differs");
    return *state.dict().find("step")->value()->get_if<int64_t>();
  };
  RankState state(job.tensors, world.rank());
  state.fill();
  state.dict().add("step", Value());
  for (int64_t step : {10, 20, 30}) {
    *state.dict().find("step")->value() = Value(step);
    checkpoints.save(*world.all(), state.dict(), step);
    require(load_latest(other) == step, "another step is loaded");
  }
  alone(world, [&] { require(checkpoints.steps() == std::vector<int64_t>{20, 30}, "other steps are kept"); });

  BackgroundSaver saver(world);
  for (int64_t step : {40, 50}) {
    state.fill();
    *state.dict().find("step")->value() = Value(step);
    saver.start(state.dict(), [&, step](Group& group, const StateDict& copy) {
      return checkpoints.save(group, copy, step);
    });
    state.poison();
    world.all()->barrier().wait();  // the job goes on, in its own group
  }
  require(saver.wait().has_value(), "there is no report");
  world.all()->barrier().wait();
  require(load_latest(other) == 50, "another step is loaded");
}

/// An error of one rank is that of all, who go on.
void disagreement(World& world, const fs::path& folder) {
  if (world.size() == 1) return;
  Job job = job_of(kinds()[0], static_cast<int>(world.size()), false);
  const Job right = job;
  if (world.rank() == world.size() - 1) job.tensors[1].shape[0] += 1;
  try {
    save_state(world, job, folder / "never");
    require(false, "ranks that disagree have saved");
  } catch (const MismatchError& error) {
    require(std::string(error.what()).find(fmt::format("rank {}", world.size() - 1)) != std::string::npos,
            "{}", error.what());
  }
  save_state(world, right, folder / "right");
  alone(world, [&] { require(!fs::exists(folder / "never"), "something was published"); });
}

/// Dies without a word when its rank starts the operation.
class KilledBackend final : public ForwardingBackend {
 public:
  KilledBackend(std::shared_ptr<GroupBackend> inner, int64_t number)
      : ForwardingBackend(std::move(inner)), left_(number) {}

 protected:
  std::unique_ptr<Work> pass(const Collective&, const Start& start) override {
    if (rank() == 1 && left_-- == 0) kill(getpid(), SIGKILL);
    return start();
  }

 private:
  int64_t left_;
};

void save_step(World& world, Checkpoints& checkpoints, int64_t step, const SaveOptions& options = {}) {
  RankState state(job_of(kinds()[2], static_cast<int>(world.size()), false).tensors, world.rank());
  state.fill();
  state.dict().add("step", Value(int64_t{7}));
  checkpoints.save(*world.all(), state.dict(), step, options);
}

int be_killed(const fs::path& folder, int64_t number) {
  MpiJob job;
  Checkpoints checkpoints(folder, 1);
  job.run([&](World& world) { save_step(world, checkpoints, 1); });
  try {
    job.run([&](World& world) { save_step(world, checkpoints, 2); },
            {.timeout = std::chrono::seconds(5), .decorate = [&](std::shared_ptr<GroupBackend> backend) {
               return std::make_shared<KilledBackend>(std::move(backend), number);
             }});
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    job.abort(3);
  }
  return 0;
}

int check(const fs::path& folder, int64_t step) {
  Checkpoints checkpoints(folder, 1);
  if (checkpoints.latest() != step || checkpoints.steps() != std::vector<int64_t>{step}) {
    std::fprintf(stderr, "the latest step is %lld\n",
                 static_cast<long long>(checkpoints.latest().value_or(-1)));
    return 1;
  }
  launch(3,
         [&](World& world) { load_state(world, job_of(kinds()[3], 3, false), checkpoints.folder_of(step)); });
  launch(2, [&](World& world) { save_step(world, checkpoints, 9); });
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name == "latest" || name == "step-00000009") continue;
    std::fprintf(stderr, "%s is left\n", name.c_str());
    return 1;
  }
  return 0;
}

int run_cases() {
  MpiJob job;
  fs::path folder;
  int failed = 0;
  job.run([&](World& world) {
    std::string made = fs::temp_directory_path() / "spolia_mpi_XXXXXX";
    if (world.rank() == 0) require(mkdtemp(made.data()) != nullptr, "cannot make {}", made);
    folder = all_gather_texts(*world.all(), made)[0];
  });
  const std::pair<const char*, void (*)(World&, const fs::path&)> cases[] = {
      {"SaveAndLoad", save_and_load}, {"Checkpoints", run_of_checkpoints}, {"Disagreement", disagreement}};
  for (const auto& [name, run] : cases) {
    std::string complaint;
    try {
      job.run([&, run = run](World& world) { run(world, folder); });
    } catch (const std::exception& error) {
      complaint = error.what();
      ++failed;
    }
    if (job.rank() == 0)
      std::printf("%s %s\n%s", complaint.empty() ? "ok    " : "FAILED", name, complaint.c_str());
  }
  if (job.rank() == 0) fs::remove_all(folder);
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) try {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "killed" && count == 4) return be_killed(arguments[2], std::stoll(arguments[3]));
  if (what == "check" && count == 4) return check(arguments[2], std::stoll(arguments[3]));
  return run_cases();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
