// Saving from some ranks and loading on others, against brute force over every element.
#include <array>
#include <mutex>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/checkpoint/testing_jobs.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/format/native/random_layout.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

void save_all(const Job& job, Store& store, const std::string& path, const SaveOptions& options) {
  launch(job.ranks, [&](World& world) {
    RankState state(job.tensors, world.rank());
    state.fill();
    state.dict().add("step", Value(int64_t{7}));
    state.dict().add({std::string("optimizer"), std::string("lr")}, Value(0.5));
    save(*world.all(), state.dict(), store, path, options);
  });
}

/// What is wrong after a load, on any rank.
std::vector<std::string> load_all(const Job& job, std::shared_ptr<const Store> store, const std::string& path,
                                  const LoadOptions& options) {
  std::vector<std::string> wrong;
  std::mutex mutex;
  launch(job.ranks, [&](World& world) {
    const auto source = open_together(*world.all(), store, path);
    RankState state(job.tensors, world.rank());
    state.dict().add("step", Value());
    state.dict().add({std::string("optimizer"), std::string("lr")}, Value());
    const Report report = load(world, *source, state.dict(), options);
    std::vector<std::string> own = state.differing();
    if (*state.dict().find("step")->value() != Value(int64_t{7})) own.push_back("step");
    if (*state.dict().find("optimizer.lr")->value() != Value(0.5)) own.push_back("optimizer.lr");
    if (report.used.size() != state.dict().size()) own.push_back("the keys used");
    if (!report.missing.empty() || !report.kept.empty()) own.push_back("the keys missing");
    const std::lock_guard lock(mutex);
    for (const std::string& name : own) wrong.push_back(fmt::format("rank {}: {}", world.rank(), name));
  });
  return wrong;
}

constexpr int64_t kBatchBytes[] = {0, 1000, int64_t{6} << 20};
constexpr ReadMode kModes[] = {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts,
                               ReadMode::kCheapest};
constexpr TargetFormat kFormats[] = {TargetFormat::kSpolia, TargetFormat::kDcp};
constexpr int kRanks[] = {1, 2, 3, 4, 6, 8, 16};

/// One choice of each factor a row, so that every two choices of different factors meet in some row.
std::vector<std::vector<size_t>> pairwise(std::span<const size_t> sizes) {
  std::set<std::array<size_t, 4>> left;  // factor, choice, factor, choice
  for (size_t f = 0; f < sizes.size(); ++f) {
    for (size_t g = f + 1; g < sizes.size(); ++g) {
      for (size_t a = 0; a < sizes[f]; ++a) {
        for (size_t b = 0; b < sizes[g]; ++b) left.insert({f, a, g, b});
      }
    }
  }
  std::mt19937 random(7);
  std::vector<std::vector<size_t>> rows;
  while (!left.empty()) {
    const auto [f, a, g, b] = *left.begin();
    std::vector<size_t> best;
    size_t most = 0;
    for (int tries = 0; tries < 30; ++tries) {
      std::vector<size_t> row;
      for (size_t size : sizes) row.push_back(random() % size);
      row[f] = a;
      row[g] = b;
      size_t covered = 0;
      for (size_t x = 0; x < row.size(); ++x) {
        for (size_t y = x + 1; y < row.size(); ++y) covered += left.count({x, row[x], y, row[y]});
      }
      if (covered > most) {
        most = covered;
        best = row;
      }
    }
    for (size_t x = 0; x < best.size(); ++x) {
      for (size_t y = x + 1; y < best.size(); ++y) left.erase({x, best[x], y, best[y]});
    }
    rows.push_back(std::move(best));
  }
  return rows;
}

TEST(SaveAndLoad, EveryKindSuitsSomeTensor) {
  for (const Kind& kind : kinds()) {
    if (kind.name == "plain" || kind.name == "replicate") continue;
    for (int ranks : {4, 6, 8, 16}) {
      int suited = 0;
      for (const WantedTensor& tensor : job_of(kind, ranks, false).tensors) {
        suited +=
            !tensor.boxes.empty() || !tensor.on_ranks.empty() ||
            (tensor.layout != nullptr && tensor.layout->text() != fmt::format("[replicate] over {}", ranks));
      }
      EXPECT_GE(suited, 2) << kind.name << " on " << ranks;
    }
  }
}

TEST(SaveAndLoad, EveryTwoChoicesTogether) {
  const size_t sizes[] = {kinds().size(),    kinds().size(),         std::size(kRanks),  std::size(kRanks),
                          std::size(kModes), std::size(kBatchBytes), std::size(kFormats)};
  for (const std::vector<size_t>& row : pairwise(sizes)) {
    const Kind &from = kinds()[row[0]], &to = kinds()[row[1]];
    const TargetFormat format = kFormats[row[6]];
    const bool with_fine = format == TargetFormat::kSpolia;
    SCOPED_TRACE(fmt::format("{} on {} ranks to {} on {}; {}; batches of {}; format {}", from.name,
                             kRanks[row[2]], to.name, kRanks[row[3]], name_of(kModes[row[4]]),
                             kBatchBytes[row[5]], row[6]));
    const auto store = std::make_shared<MemoryStore>();
    save_all(job_of(from, kRanks[row[2]], with_fine), *store, "/saved", {.to = format, .durable = false});
    EXPECT_EQ(verify(*open_source(store, "/saved"), {}).faults, std::vector<std::string>());
    LoadOptions options{.mode = kModes[row[4]]};
    options.batches.batch_bytes = kBatchBytes[row[5]];
    EXPECT_EQ(load_all(job_of(to, kRanks[row[3]], with_fine), store, "/saved", options),
              std::vector<std::string>());
    if (HasFailure()) return;
  }
}

TEST(SaveAndLoad, SlowEveryKindToEveryKind) {
  size_t turn = 0;
  for (const Kind& from : kinds()) {
    for (int from_ranks : {1, 2, 5, 8, 16}) {
      for (TargetFormat format : kFormats) {
        const bool with_fine = format == TargetFormat::kSpolia;
        const auto store = std::make_shared<MemoryStore>();
        save_all(job_of(from, from_ranks, with_fine), *store, "/saved", {.to = format, .durable = false});
        for (const Kind& to : kinds()) {
          for (int to_ranks : {1, 3, 8}) {
            for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts}) {
              SCOPED_TRACE(fmt::format("{} on {} ranks to {} on {}; {}; format {}", from.name, from_ranks,
                                       to.name, to_ranks, name_of(mode), static_cast<int>(format)));
              LoadOptions options{.mode = mode};
              options.batches.batch_bytes = kBatchBytes[turn++ % std::size(kBatchBytes)];
              EXPECT_EQ(load_all(job_of(to, to_ranks, with_fine), store, "/saved", options),
                        std::vector<std::string>());
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

/// Layouts that nobody thought of, on ranks that need not start at 0.
void random_jobs(int64_t most_ranks) {
  constexpr DType kDTypes[] = {DType::kUInt8,   DType::kBFloat16,   DType::kFloat32,
                               DType::kFloat64, DType::kComplex128, DType::kFloat8E4M3FN};
  std::vector<WantedTensor> tensors;
  for (int64_t t = pick(1, 6); t > 0; --t) {
    tensors.push_back(
        {fmt::format("t{}", t), kDTypes[pick(0, std::ssize(kDTypes))], random_shape(), nullptr, {}, {}});
  }
  auto random_job = [&] {
    Job job{static_cast<int>(pick(1, 4)), tensors};
    for (WantedTensor& tensor : job.tensors) {
      if (pick(0, 6) == 0) continue;
      const Layout layout = random_layout(tensor.shape);
      const int64_t last = std::ranges::max(layout.mesh().ranks());
      if (last >= most_ranks) continue;
      job.ranks = std::max(job.ranks, static_cast<int>(last) + 1);
      tensor.layout = std::make_shared<const Layout>(layout);
    }
    return job;
  };
  const Job saves = random_job(), loads = random_job();
  const TargetFormat format = kFormats[pick(0, 2)];
  constexpr Replicas kReplicas[] = {Replicas::kBalanced, Replicas::kLowestRank, Replicas::kEachHost,
                                    Replicas::kEvery};
  SaveOptions save_options{.to = format, .durable = false};
  save_options.replicas = kReplicas[pick(0, format == TargetFormat::kDcp ? 2 : 4)];
  for (int r = 0; r < saves.ranks; ++r) save_options.hosts.push_back(r / 3);
  save_options.plan.threads = static_cast<size_t>(pick(1, 3));
  LoadOptions load_options{.mode = kModes[pick(0, 4)]};
  load_options.batches.batch_bytes = kBatchBytes[pick(0, 3)];
  load_options.plan.threads = static_cast<size_t>(pick(1, 3));

  const auto store = std::make_shared<MemoryStore>();
  save_all(saves, *store, "/saved", save_options);
  RC_ASSERT(verify(*open_source(store, "/saved"), {}).faults == std::vector<std::string>());
  RC_ASSERT(load_all(loads, store, "/saved", load_options) == std::vector<std::string>());
}

TEST(SaveAndLoad, RandomLayouts) {
  EXPECT_TRUE(rc::check([] { random_jobs(16); }));
}

TEST(SaveAndLoad, SlowRandomLayouts) {
  for (int round = 0; round < 40; ++round) {
    if (!rc::check([] { random_jobs(29); })) FAIL();
  }
}

/// Large enough that replicas are cut, tiles are many and batches fill.
TEST(SaveAndLoad, LargeTensorsInManyTiles) {
  const auto layout = [](std::string_view text) {
    return std::make_shared<const Layout>(parse_layout(text));
  };
  auto tensors = [&](std::string_view first, std::string_view second, std::string_view third) {
    return std::vector<WantedTensor>{{"a", DType::kFloat32, {512, 515}, layout(first), {}, {}},
                                     {"b", DType::kBFloat16, {300, 500}, layout(second), {}, {}},
                                     {"c", DType::kFloat64, {20, 30, 60}, layout(third), {}, {}}};
  };
  const Job saves{4, tensors("[replicate] over 4", "[replicate, shard(0)] over 2x2",
                             "[strided(0, 2), shard(0)] over 2x2")};
  const Job loads{
      6, tensors("[replicate, shard(1)] over 2x3", "[replicate] over 6", "[shard(2), replicate] over 3x2")};
  for (TargetFormat format : kFormats) {
    const auto store = std::make_shared<MemoryStore>();
    SaveOptions save_options{.to = format};
    save_options.plan = {.memory = int64_t{16} << 20, .threads = 2, .largest_tile = int64_t{256} << 10};
    save_all(saves, *store, "/saved", save_options);
    EXPECT_EQ(verify(*open_source(store, "/saved"), {}).faults, std::vector<std::string>());
    for (ReadMode mode : kModes) {
      for (int64_t batch_bytes : kBatchBytes) {
        LoadOptions options{.mode = mode};
        options.batches.batch_bytes = batch_bytes;
        options.plan = save_options.plan;
        EXPECT_EQ(load_all(loads, store, "/saved", options), std::vector<std::string>()) << name_of(mode);
      }
    }
  }
}

}  // namespace
}  // namespace spolia
