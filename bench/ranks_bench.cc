// Saving and loading from thread ranks, beside what bounds them: writing and reading the same bytes by as
// many threads, and copying them.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "bench/make_dcp.h"
#include "bench/measure.h"
#include "spolia/base/threads.h"
#include "spolia/checkpoint/background_save.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/layout/layout_text.h"

namespace spolia::bench {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string work = SPOLIA_BENCH_FOLDER;
  double gib = 1;
  int ranks = 2;
  int rounds = 5;
};

std::shared_ptr<const Layout> layout(const std::string& placement, int ranks) {
  return std::make_shared<const Layout>(parse_layout(fmt::format("[{}] over {}", placement, ranks)));
}

/// The states of all ranks, with their memory, which is touched.
class Job {
 public:
  Job(std::span<const NamedShape> tensors, const std::string& placement, int ranks)
      : states_(static_cast<size_t>(ranks)) {
    const auto how = layout(placement, ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (const auto& [name, shape] : tensors) {
        const auto own = shape.size() > 1 ? how : layout("shard(0)", ranks);
        const Dims local = own->shard(shape, rank).local_shape;
        memory_.emplace_back(byte_size(DType::kFloat32, local));
        std::memset(memory_.back().data(), 1, static_cast<size_t>(memory_.back().size()));
        states_[static_cast<size_t>(rank)].add(
            name, sharded_tensor(dense_view(memory_.back().data(), DType::kFloat32, local), shape, own));
      }
    }
  }

  StateDict& of(int64_t rank) { return states_[static_cast<size_t>(rank)]; }
  std::vector<Buffer>& memory() { return memory_; }

 private:
  std::vector<StateDict> states_;
  std::vector<Buffer> memory_;
};

/// Writes all memory into a file a thread, as fast as that goes, and makes it durable.
void write_plainly(std::vector<Buffer>& memory, const fs::path& folder, int threads) {
  fs::create_directories(folder);
  parallel_for(static_cast<size_t>(threads), static_cast<size_t>(threads), [&](size_t, size_t t) {
    const auto file = posix_store()->create(folder / std::to_string(t));
    int64_t at = 0;
    for (size_t m = t; m < memory.size(); m += static_cast<size_t>(threads)) {
      constexpr int64_t kPiece = int64_t{4} << 20;
      for (int64_t done = 0; done < memory[m].size(); done += kPiece) {
        const int64_t length = std::min(kPiece, memory[m].size() - done);
        file->write(at, memory[m].bytes().subspan(static_cast<size_t>(done), static_cast<size_t>(length)));
        file->start_writeback(at, length);
        at += length;
      }
    }
    file->sync();
  });
}

/// Reads the files of a folder into the memory.
void read_plainly(std::vector<Buffer>& memory, const std::vector<fs::path>& files, int threads) {
  parallel_for(static_cast<size_t>(threads), files.size(), [&](size_t, size_t f) {
    const auto file = posix_store()->open(files[f]);
    int64_t at = 0;
    for (size_t m = f; m < memory.size() && at < file->size(); m += files.size()) {
      const int64_t length = std::min(memory[m].size(), file->size() - at);
      file->read(at, memory[m].bytes().first(static_cast<size_t>(length)));
      at += length;
    }
  });
}

void run(const Options& options) {
  const fs::path work = fs::path(options.work) / "ranks";
  fs::remove_all(work);
  fs::create_directories(work);
  const auto store = posix_store();
  const std::vector<NamedShape> shapes = llama_like_shapes(static_cast<int64_t>(options.gib * (1 << 30)));
  Job rows(shapes, "shard(0)", options.ranks);
  int64_t bytes = 0;
  for (const Buffer& memory : rows.memory()) bytes += memory.size();
  const std::string size = fmt::format("{:.2f} GB, {} ranks, {} rounds", static_cast<double>(bytes) / 1e9,
                                       options.ranks, options.rounds);
  auto show = [&](const std::string& title, const std::vector<Contender>& contenders) {
    print_table(title + ": " + size, contenders, take_turns(contenders, options.rounds), bytes);
  };

  int number = 0;
  fs::path last;
  const auto fresh = [&] {
    if (!last.empty()) fs::remove_all(last);
    last = work / fmt::format("saved-{}", number++);
    prime({}, bytes + bytes / 2);
  };
  const auto saving = [&](TargetFormat format) {
    return [&, format]() -> Sample {
      return {timed([&] {
        launch(options.ranks, [&](World& world) {
          save(*world.all(), rows.of(world.rank()), *store, last, {.to = format});
        });
      })};
    };
  };
  show("save, synced",
       {{"save as spolia", saving(TargetFormat::kSpolia), fresh},
        {"save as dcp", saving(TargetFormat::kDcp), fresh},
        {"the same bytes written and synced",
         [&]() -> Sample { return {timed([&] { write_plainly(rows.memory(), last, options.ranks); })}; },
         fresh}});
  fs::remove_all(last);

  const fs::path saved = work / "saved";
  launch(options.ranks, [&](World& world) {
    save(*world.all(), rows.of(world.rank()), *store, saved, {.to = TargetFormat::kDcp});
  });
  const std::vector<fs::path> files = files_in(saved);
  std::vector<fs::path> data;
  for (const fs::path& file : files) {
    if (file.extension() == ".distcp") data.push_back(file);
  }
  Job columns(shapes, "shard(1)", options.ranks);
  const auto ready = [&] { prime(files, int64_t{64} << 20); };
  const auto loading = [&](Job& job, bool check) {
    return [&, check]() -> Sample {
      return {timed([&] {
        launch(options.ranks, [&](World& world) {
          const auto source = open_together(*world.all(), store, saved);
          load(world, *source, job.of(world.rank()), {.mode = ReadMode::kEachRank, .check_source = check});
        });
      })};
    };
  };
  show("load from the page cache",
       {{"load, the same shards", loading(rows, true), ready},
        {"load, the same shards, unchecked", loading(rows, false), ready},
        {"load, shard(0) to shard(1)", loading(columns, true), ready},
        {"pread of the files",
         [&]() -> Sample { return {timed([&] { read_plainly(rows.memory(), data, options.ranks); })}; },
         ready}});

  std::vector<double> held;
  launch(options.ranks, [&](World& world) {
    BackgroundSaver saver(world);
    for (int round = -1; round < options.rounds; ++round) {
      world.all()->barrier().wait();
      const double seconds = timed([&] {
        saver.start(rows.of(world.rank()), [](Group&, const StateDict&) { return Report(); });
        world.all()->barrier().wait();
      });
      if (world.rank() == 0 && round >= 0) held.push_back(seconds);
    }
  });
  std::vector<Buffer> copies;
  for (Buffer& memory : rows.memory()) copies.emplace_back(memory.size());
  const auto copy = [&] {
    parallel_for(static_cast<size_t>(options.ranks), copies.size(), [&](size_t, size_t m) {
      std::memcpy(copies[m].data(), rows.memory()[m].data(), static_cast<size_t>(copies[m].size()));
    });
  };
  copy();
  std::vector<double> plain;
  for (int round = 0; round < options.rounds; ++round) plain.push_back(timed(copy));
  fmt::print(
      "a background save holds its caller for {:.4f} s; copying the bytes takes {:.4f} s: {:.2f} times\n",
      median(held), median(plain), median(held) / median(plain));
  fs::remove_all(work);
}

}  // namespace
}  // namespace spolia::bench

int main(int argc, char** argv) {
  spolia::bench::Options options;
  CLI::App app("Times saving and loading from thread ranks beside what bounds them.");
  app.add_option("--gib", options.gib, "the size of the state")->check(CLI::PositiveNumber);
  app.add_option("--ranks", options.ranks, "how many ranks")->check(CLI::Range(1, 64));
  app.add_option("--rounds", options.rounds, "how often each runs")->check(CLI::PositiveNumber);
  app.add_option("--work", options.work, "a folder for checkpoints");
  CLI11_PARSE(app, argc, argv);
  try {
    spolia::bench::print_load();
    spolia::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ranks_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
