// What a save promises besides the bytes: who writes, what is refused, what a crash leaves.
#include "spolia/checkpoint/save.h"

#include <atomic>
#include <set>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

std::shared_ptr<const Layout> layout(std::string_view text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

WantedTensor tensor(std::string name, Dims shape, std::string_view how = "") {
  return {std::move(name), DType::kFloat32, std::move(shape), how.empty() ? nullptr : layout(how), {}, {}};
}

/// Saves the tensors from their ranks; what each rank's save said.
std::vector<Report> save_on(int ranks, const std::vector<WantedTensor>& tensors, Store& store,
                            const std::string& path, const SaveOptions& options = {},
                            const std::function<void(int64_t rank, StateDict& state)>& more = {}) {
  std::vector<Report> reports(static_cast<size_t>(ranks));
  launch(ranks, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    if (more) more(world.rank(), state.dict());
    reports[static_cast<size_t>(world.rank())] = save(*world.all(), state.dict(), store, path, options);
  });
  return reports;
}

void expect_loads(int ranks, const std::vector<WantedTensor>& tensors, std::shared_ptr<const Store> store,
                  const std::string& path) {
  EXPECT_EQ(verify(*open_source(store, path), {}).faults, std::vector<std::string>());
  launch(ranks, [&](World& world) {
    const auto source = open_together(*world.all(), store, path);
    RankState state(tensors, world.rank());
    load(world, *source, state.dict());
    state.expect_filled();
  });
}

/// What the call throws, of this kind.
template <class Call>
std::string error_of(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

std::map<std::string, std::string> files_of(const Store& store, const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const FolderEntry& entry : store.list(folder)) {
    const auto file = store.open(folder + "/" + entry.name);
    std::string& bytes = files[entry.name];
    bytes.resize(static_cast<size_t>(file->size()));
    file->read(0, std::as_writable_bytes(std::span(bytes)));
  }
  return files;
}

TEST(Save, WritesReplicasOnceAndEvenly) {
  // 8 MiB on each of four ranks: each writes a part of every large tensor.
  const std::vector<WantedTensor> tensors = {tensor("a", {1024, 1024}, "[replicate] over 4"),
                                             tensor("b", {1024, 1024})};
  const auto store = std::make_shared<MemoryStore>();
  const std::vector<Report> reports = save_on(4, tensors, *store, "/saved");
  int64_t written = 0;
  for (const Report& report : reports) {
    written += report.bytes_written;
    EXPECT_LE(report.bytes_written, (int64_t{2} << 20) + (int64_t{1} << 20));
    EXPECT_EQ(report.mean_rank_bytes, int64_t{2} << 20);
  }
  EXPECT_EQ(written, int64_t{8} << 20);
  expect_loads(3, {tensor("a", {1024, 1024}, "[shard(1)] over 3"), tensor("b", {1024, 1024})}, store,
               "/saved");
}

TEST(Save, LeavesOwnersToTheOptions) {
  const std::vector<WantedTensor> tensors = {tensor("a", {1024, 1024}, "[replicate, shard(0)] over 2x2"),
                                             tensor("b", {300, 5})};
  const int64_t all = (1024 * 1024 + 1500) * 4;
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    for (const auto& [replicas, copies] :
         {std::pair{Replicas::kLowestRank, 1}, {Replicas::kEachHost, 2}, {Replicas::kEvery, 0}}) {
      const auto store = std::make_shared<MemoryStore>();
      SaveOptions options{.to = format, .replicas = replicas, .hosts = {0, 0, 1, 1}};
      if (format == TargetFormat::kDcp && replicas != Replicas::kLowestRank) {
        EXPECT_NE(
            error_of(ErrorKind::kInvalidArgument, [&] { save_on(4, tensors, *store, "/saved", options); })
                .find("one place for each box"),
            std::string::npos);
        continue;
      }
      const auto reports = save_on(4, tensors, *store, "/saved", options);
      int64_t written = 0;
      for (const Report& report : reports) written += report.bytes_written;
      EXPECT_EQ(written, copies > 0 ? copies * all : 2 * 1024 * 1024 * 4 + 4 * 1500 * 4);
      if (replicas == Replicas::kLowestRank) {
        EXPECT_EQ(reports[2].bytes_written, 0);
        EXPECT_EQ(reports[3].bytes_written, 0);
      }
      expect_loads(2, {tensor("a", {1024, 1024}, "[shard(1)] over 2"), tensor("b", {300, 5})}, store,
                   "/saved");
    }
  }
}

TEST(Save, TakesStagesWithOtherKeysAndTensorsTiedAcrossThem) {
  const std::vector<WantedTensor> tensors = {
      tensor("first", {6, 4}, "[shard(0)] over 4 on [0, 1, 2, 3]"),
      tensor("second", {6, 4}, "[shard(0)] over 4 on [4, 5, 6, 7]"),
      tensor("tied", {9, 4}, "[shard(0), replicate] over 2x2 on [0, 1, 6, 7]")};
  auto on = [&](int64_t rank) {
    std::vector<WantedTensor> mine;
    for (const WantedTensor& wanted : tensors) {
      if (wanted.layout->mesh().coordinates_of(rank)) mine.push_back(wanted);
    }
    return mine;
  };
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    const auto store = std::make_shared<MemoryStore>();
    launch(8, [&](World& world) {
      RankState state(on(world.rank()), world.rank());
      state.fill();
      // A value that the first rank does not have is written all the same.
      if (world.rank() >= 4) state.dict().add("stage", Value(std::string("second")));
      state.dict().add("step", Value(int64_t{3}));
      save(*world.all(), state.dict(), *store, "/saved", {.to = format});
    });
    EXPECT_EQ(open_source(store, "/saved")->catalog().find_value("stage") != nullptr, true);
    for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts}) {
      launch(8, [&](World& world) {
        const auto source = open_together(*world.all(), store, "/saved");
        RankState state(on(7 - world.rank()), 7 - world.rank());
        // Not the ranks that the layouts speak of: everything whole.
        std::vector<WantedTensor> whole;
        for (const WantedTensor& wanted : tensors) whole.push_back(tensor(wanted.name, wanted.shape));
        RankState all(whole, world.rank());
        load(world, *source, all.dict(), {.mode = mode});
        all.expect_filled();
        RankState again(on(world.rank()), world.rank());
        again.dict().add("stage", Value());
        load(world, *source, again.dict(), {.mode = mode});
        again.expect_filled();
        EXPECT_EQ(*again.dict().find("stage")->value(), Value(std::string("second")));
      });
    }
  }
}

TEST(Save, TakesBoxesOfLargerTensors) {
  WantedTensor boxes = tensor("a", {5, 6});
  boxes.boxes = {Box{{0, 0}, {2, 6}}, Box{{2, 0}, {3, 4}}, Box{{2, 4}, {3, 2}}, Box{{2, 4}, {3, 2}}};
  const auto store = std::make_shared<MemoryStore>();
  save_on(4, {boxes}, *store, "/saved");
  expect_loads(2, {tensor("a", {5, 6}, "[shard(1)] over 2")}, store, "/saved");
  // Loaded boxes may overlap, and leave gaps.
  boxes.boxes = {Box{{1, 1}, {3, 3}}, Box{{0, 0}, {0, 0}}, Box{{1, 1}, {3, 3}}, Box{{2, 0}, {1, 6}}};
  expect_loads(4, {boxes}, store, "/saved");
  boxes.boxes = {Box{{0, 0}, {2, 6}}, Box{{2, 0}, {3, 4}}, Box{{2, 4}, {2, 2}}, Box{{2, 4}, {2, 2}}};
  const std::string gap = error_of(ErrorKind::kMismatch, [&] { save_on(4, {boxes}, *store, "/again"); });
  EXPECT_NE(gap.find("no rank has the box [4, 4] + [1, 2]"), std::string::npos) << gap;
  boxes.boxes[2] = Box{{1, 4}, {4, 2}};
  EXPECT_NE(error_of(ErrorKind::kMismatch, [&] { save_on(4, {boxes}, *store, "/again"); }).find("overlap"),
            std::string::npos);
  EXPECT_FALSE(store->exists("/again"));
}

TEST(Save, NamesBothRanksThatDisagree) {
  const auto store = std::make_shared<MemoryStore>();
  auto disagree = [&](const std::function<WantedTensor(int64_t)>& of_rank) {
    return error_of(ErrorKind::kMismatch, [&] {
      launch(3, [&](World& world) {
        RankState state({of_rank(world.rank())}, world.rank());
        save(*world.all(), state.dict(), *store, "/saved");
      });
    });
  };
  std::string text = disagree([](int64_t rank) { return tensor("a", {rank == 2 ? 4 : 3, 2}); });
  EXPECT_NE(text.find("tensor \"a\": rank 0 has the shape [3, 2], rank 2 [4, 2]"), std::string::npos) << text;
  text = disagree([](int64_t rank) {
    WantedTensor wanted = tensor("a", {3});
    if (rank == 1) wanted.dtype = DType::kBFloat16;
    return wanted;
  });
  EXPECT_NE(text.find("rank 0 has the dtype float32, rank 1 bfloat16"), std::string::npos) << text;
  text = disagree([](int64_t rank) {
    return tensor("a", {6}, rank == 1 ? "[shard(0)] over 3" : "[shard(0, balanced)] over 3");
  });
  EXPECT_NE(text.find("rank 0 has the layout"), std::string::npos) << text;
  text = disagree(
      [](int64_t rank) { return rank == 1 ? tensor("b", {6}) : tensor("a", {6}, "[shard(0)] over 3"); });
  EXPECT_NE(text.find("gives a part of it to rank 1, which has none"), std::string::npos) << text;
  EXPECT_TRUE(store->list("/").empty());
}

TEST(Save, ComparesWhatRanksShouldHaveAlike) {
  const auto store = std::make_shared<MemoryStore>();
  const auto rng = [](int64_t rank, StateDict& state) { state.add("rng", Value(rank)); };
  std::string text =
      error_of(ErrorKind::kMismatch, [&] { save_on(3, {tensor("a", {3})}, *store, "/saved", {}, rng); });
  EXPECT_NE(text.find("value \"rng\" is not the same on ranks 0 and 1"), std::string::npos) << text;

  std::vector<std::vector<std::byte>> seeds(3);
  const auto seed = [&](int64_t rank, StateDict& state) {
    auto& bytes = seeds[static_cast<size_t>(rank)];
    bytes.assign(16, static_cast<std::byte>(rank));
    state.add("seed", plain_tensor(byte_view(std::span(bytes))));
  };
  text = error_of(ErrorKind::kMismatch, [&] { save_on(3, {tensor("a", {3})}, *store, "/saved", {}, seed); });
  EXPECT_NE(text.find("tensor \"seed\" is not the same"), std::string::npos) << text;
  save_on(3, {tensor("a", {3})}, *store, "/uncompared", {.compare_contents = false}, seed);

  const auto both = [&](int64_t rank, StateDict& state) {
    rng(rank, state);
    seed(rank, state);
  };
  save_on(3, {tensor("a", {3})}, *store, "/saved", {.rank_keyed = {"rng", "seed"}}, both);
  launch(3, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    std::vector<std::byte> bytes(16);
    StateDict state;
    state.add("rng", Value());
    state.add("seed", plain_tensor(byte_view(std::span(bytes))));
    const Report report = load(world, *source, state, {.rank_keyed = {"rng", "seed"}});
    EXPECT_EQ(*state.find("rng")->value(), Value(world.rank()));
    EXPECT_EQ(bytes, std::vector<std::byte>(16, static_cast<std::byte>(world.rank())));
    EXPECT_EQ(report.unexpected.front(), "a");
  });
}

TEST(Save, CallsTheHookForEveryEntry) {
  const auto store = std::make_shared<MemoryStore>();
  const EntryHook hook = [](const StateDict::Entry& entry) -> std::optional<StateDict::Entry> {
    if (entry.name == "b") return std::nullopt;
    StateDict::Entry renamed = entry;
    renamed.name = "model." + entry.name;
    renamed.path = {renamed.name};
    return renamed;
  };
  save_on(2, {tensor("a", {4}, "[shard(0)] over 2"), tensor("b", {3})}, *store, "/saved", {.hook = hook});
  const auto source = open_source(store, "/saved");
  ASSERT_EQ(source->catalog().tensors.size(), 1u);
  EXPECT_EQ(source->catalog().tensors[0].name, "model.a");
  launch(1, [&](World& world) {
    RankState state({tensor("a", {4}), tensor("b", {3})}, 0);
    load(world, *source, state.dict(), {.hook = hook});
    state.dict();
  });
}

TEST(Save, GivesTheSameBytesWithAnyThreadsAndFromTheCache) {
  const std::vector<WantedTensor> tensors = {tensor("a", {64, 33}, "[replicate, shard(1)] over 2x2"),
                                             tensor("b", {50, 7}, "[shard(0)] over 4"), tensor("c", {3})};
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    std::vector<SavePlanCache> caches(4);
    std::map<std::string, std::string> first;
    MemoryStore store;
    for (const auto& [round, threads] : {std::pair{0, 1}, {1, 1}, {2, 3}, {3, 3}}) {
      const std::string path = "/saved" + std::to_string(round);
      launch(4, [&, threads = threads](World& world) {
        RankState state(tensors, world.rank());
        state.fill();
        state.dict().add("step", Value(int64_t{5}));
        save(*world.all(), state.dict(), store, path,
             {.to = format,
              .plan = {.memory = int64_t{64} << 20, .threads = static_cast<size_t>(threads)},
              .cache = &caches[static_cast<size_t>(world.rank())]});
      });
      const auto files = files_of(store, path);
      if (round == 0) first = files;
      EXPECT_TRUE(files == first) << round;
    }
    for (const SavePlanCache& cache : caches) EXPECT_EQ(cache.hits(), 2);
  }
}

TEST(Save, CachedPlansAreForTheSameStateOnly) {
  SavePlanCache caches[2];
  const auto store = std::make_shared<MemoryStore>();
  int round = 0;
  for (const std::string_view how : {"[shard(0)] over 2", "[shard(1)] over 2", "[shard(0)] over 2"}) {
    const std::vector<WantedTensor> tensors = {tensor("a", {6, 4}, how)};
    const std::string path = "/saved" + std::to_string(round++);
    launch(2, [&](World& world) {
      RankState state(tensors, world.rank());
      state.fill();
      state.dict().add("step", Value(int64_t{round}));
      save(*world.all(), state.dict(), *store, path, {.cache = &caches[world.rank()]});
    });
    expect_loads(1, {tensor("a", {6, 4})}, store, path);
    EXPECT_EQ(open_source(store, path)->value(0), Value(int64_t{round}));
  }
  EXPECT_EQ(caches[0].hits(), 1);
}

TEST(Save, IsPublishedWholeOrNotAtAllWhateverFails) {
  const std::vector<WantedTensor> tensors = {tensor("a", {40, 5}, "[shard(0)] over 3"), tensor("b", {3})};
  const auto reference = std::make_shared<FaultStore>(std::make_shared<MemoryStore>());
  save_on(3, tensors, *reference, "/saved");
  const int64_t operations = reference->count();
  ASSERT_GT(operations, 20);
  for (int64_t nth = 0; nth < operations; ++nth) {
    const auto memory = std::make_shared<MemoryStore>();
    FaultStore store(memory);
    store.fail(std::nullopt, nth, EIO, FaultStore::Times::kFromThenOn);
    bool threw = false;
    try {
      save_on(3, tensors, store, "/saved");
    } catch (const Error&) {
      threw = true;
    }
    if (memory->exists("/saved")) {
      expect_loads(2, {tensor("a", {40, 5}, "[shard(0)] over 2"), tensor("b", {3})}, memory, "/saved");
    } else {
      EXPECT_TRUE(threw) << nth;
    }
  }
}

TEST(Save, AloneEachRankWritesAllThatItHasAndItsOwnMetadata) {
  const std::vector<WantedTensor> tensors = {tensor("a", {64, 10}, "[replicate, shard(0)] over 2x2"),
                                             tensor("b", {7}), tensor("none", {0, 3})};
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    const auto store = std::make_shared<MemoryStore>();
    for (int64_t rank : {3, 0, 2, 1}) {
      RankState state(tensors, rank);
      state.fill();
      state.dict().add("step", Value(int64_t{5}));
      state.dict().add("object", Value(Global{"torch", "float32"}));
      const Report report = save_alone(rank, state.dict(), *store, "/saved", {.to = format});
      EXPECT_EQ(report.bytes_written, 32 * 10 * 4 + 28);
      EXPECT_THROW(save_alone(rank, state.dict(), *store, "/saved", {.to = format}), IoError);
    }
    expect_loads(2, {tensor("a", {64, 10}, "[shard(1)] over 2"), tensor("b", {7}), tensor("none", {0, 3})},
                 store, "/saved");
    const auto source = open_source(store, "/saved");
    EXPECT_EQ(source->catalog().tensors.size(), 3u);
    EXPECT_EQ(source->value(1), Value(int64_t{5}));
    store->remove_all(format == TargetFormat::kDcp ? "/saved/__2.metadata" : "/saved/spolia-00002.json");
    EXPECT_THROW(open_source(store, "/saved"), CorruptError);
  }
}

TEST(Save, ARankThatThrowsStopsAllOfThem) {
  const auto store = std::make_shared<MemoryStore>();
  for (int64_t bad : {0, 2}) {
    std::atomic<int> threw{0};
    EXPECT_THROW(
        launch(3,
               [&](World& world) {
                 RankState state({tensor("a", {9}, "[shard(0)] over 3")}, world.rank());
                 SaveOptions options;
                 options.hook = [&](const StateDict::Entry& entry) -> std::optional<StateDict::Entry> {
                   if (world.rank() == bad) throw IoError("no");
                   return entry;
                 };
                 try {
                   save(*world.all(), state.dict(), *store, "/saved", options);
                 } catch (const IoError& error) {
                   EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}: no", bad)),
                             std::string::npos);
                   ++threw;
                   throw;
                 }
               }),
        IoError);
    EXPECT_EQ(threw, 3);
  }
}

}  // namespace
}  // namespace spolia
