#include "spolia/checkpoint/checkpoints.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

std::vector<WantedTensor> tensors_on(int ranks) {
  const auto layout =
      std::make_shared<const Layout>(parse_layout("[shard(0)] over " + std::to_string(ranks)));
  return {{"a", DType::kFloat32, {10, 3}, layout, {}, {}}, {"b", DType::kInt64, {4}, nullptr, {}, {}}};
}

void save_step(Checkpoints& checkpoints, int64_t step, int ranks = 2, const SaveOptions& options = {}) {
  launch(ranks, [&](World& world) {
    RankState state(tensors_on(ranks), world.rank());
    state.fill();
    state.dict().add("step", Value(step));
    checkpoints.save(*world.all(), state.dict(), step, options);
  });
}

void expect_loads(Checkpoints& checkpoints, std::optional<int64_t> step, int64_t due, int ranks = 3) {
  launch(ranks, [&](World& world) {
    RankState state(tensors_on(ranks), world.rank());
    state.dict().add("step", Value());
    checkpoints.load(world, state.dict(), step);
    state.expect_filled();
    EXPECT_EQ(*state.dict().find("step")->value(), Value(due));
  });
}

std::vector<std::string> names_in(const Store& store, const std::string& folder) {
  std::vector<std::string> names;
  for (const FolderEntry& entry : store.list(folder)) names.push_back(entry.name);
  return names;
}

void put(Store& store, const std::string& path, std::string_view text) {
  store.create(path)->write(0, bytes_of(text));
}

TEST(Checkpoints, NamesTheLatestAndKeepsTheNewest) {
  const auto store = std::make_shared<MemoryStore>();
  Checkpoints checkpoints("/run", 2, store);
  EXPECT_EQ(checkpoints.latest(), std::nullopt);
  for (int64_t step : {100, 200, 300}) {
    save_step(checkpoints, step);
    EXPECT_EQ(checkpoints.latest(), step);
  }
  EXPECT_EQ(checkpoints.steps(), (std::vector<int64_t>{200, 300}));
  EXPECT_EQ(names_in(*store, "/run"), (std::vector<std::string>{"latest", "step-00000200", "step-00000300"}));
  expect_loads(checkpoints, std::nullopt, 300);
  expect_loads(checkpoints, 200, 200);
  try {
    expect_loads(checkpoints, 100, 100);
    FAIL();
  } catch (const NotFoundError& error) {
    EXPECT_NE(std::string(error.what()).find("holds no checkpoint of step 100; there are: 200, 300"),
              std::string::npos)
        << error.what();
  }
}

TEST(Checkpoints, NeverDeletesTheLatestOrWhatIsBeingLoaded) {
  const auto store = std::make_shared<MemoryStore>();
  Checkpoints all("/run", 0, store), one("/run", 1, store);
  for (int64_t step : {10, 20, 30}) save_step(all, step);
  // The run has gone back: its latest is not the highest.
  save_step(one, 5);
  EXPECT_EQ(one.latest(), 5);
  EXPECT_EQ(one.steps(), (std::vector<int64_t>{5, 30}));

  // Someone on another host loads 30, someone of this one has died while loading 5.
  put(*store, "/run/step-00000030.loading-0.1@elsewhere", "");
  save_step(one, 40);
  EXPECT_EQ(one.steps(), (std::vector<int64_t>{30, 40}));
  store->remove_all("/run/step-00000030.loading-0.1@elsewhere");
  save_step(one, 50);
  EXPECT_EQ(one.steps(), (std::vector<int64_t>{50}));
}

TEST(Checkpoints, ClearsWhatCrashedSavesLeft) {
  const auto store = std::make_shared<MemoryStore>();
  Checkpoints checkpoints("/run", 0, store);
  save_step(checkpoints, 1);
  for (const char* name : {"step-00000002.partial-77", "step-00000001.old-78", "mine.partial-1"}) {
    store->create_folder(std::string("/run/") + name);
  }
  put(*store, "/run/latest.partial-9", "step-00000002");
  put(*store, "/run/notes.txt", "mine");
  save_step(checkpoints, 2);
  EXPECT_EQ(names_in(*store, "/run"), (std::vector<std::string>{"latest", "mine.partial-1", "notes.txt",
                                                                "step-00000001", "step-00000002"}));
}

TEST(Checkpoints, RefusesAStepThatIsThere) {
  const auto store = std::make_shared<MemoryStore>();
  Checkpoints checkpoints("/run", 0, store);
  save_step(checkpoints, 1);
  EXPECT_THROW(save_step(checkpoints, 1), InvalidArgumentError);
  EXPECT_THROW(save_step(checkpoints, -1), InvalidArgumentError);
  save_step(checkpoints, 1, 2, {.existing = Existing::kExchange});
  expect_loads(checkpoints, std::nullopt, 1);
}

TEST(Checkpoints, LatestHasToNameACheckpoint) {
  const auto store = std::make_shared<MemoryStore>();
  Checkpoints checkpoints("/run", 0, store);
  save_step(checkpoints, 1);
  store->remove_all("/run/latest");
  EXPECT_EQ(checkpoints.latest(), 1);
  put(*store, "/run/latest", "../etc\x1b");
  EXPECT_THROW(checkpoints.latest(), CorruptError);
  store->remove_all("/run/latest");
  put(*store, "/run/latest", "step-00000007\n");
  EXPECT_THROW(expect_loads(checkpoints, std::nullopt, 7), NotFoundError);
}

/// Whatever operation of the second save is the last before a crash, and whichever names survive: an old or a
/// new checkpoint loads, and it is the one that `latest` names.
TEST(Checkpoints, ACrashAtAnyPointLeavesOneThatLoads) {
  for (const auto unsynced : {MemoryStore::UnsyncedNames::kLost, MemoryStore::UnsyncedNames::kKept}) {
    int64_t operations = 1000;
    for (int64_t nth = 0; nth < operations; ++nth) {
      const auto memory = std::make_shared<MemoryStore>();
      const auto faults = std::make_shared<FaultStore>(memory);
      Checkpoints checkpoints("/run", 1, faults);
      memory->create_folder("/run");
      memory->sync_folder("/");
      save_step(checkpoints, 1);
      const int64_t before = faults->count();
      faults->fail(std::nullopt, nth, EIO, FaultStore::Times::kFromThenOn);
      bool completed = false;
      try {
        save_step(checkpoints, 2);
        completed = true;
      } catch (const Error&) {
      }
      if (completed) operations = std::min(operations, faults->count() - before);
      memory->crash(unsynced);
      Checkpoints after("/run", 1, memory);
      const std::optional<int64_t> latest = after.latest();
      ASSERT_TRUE(latest) << nth;
      if (completed) {
        EXPECT_EQ(latest, 2) << nth;
      }
      expect_loads(after, std::nullopt, *latest);
      save_step(after, 3);  // and the next save clears what is left
      EXPECT_EQ(after.steps(), (std::vector<int64_t>{3})) << nth;
    }
    EXPECT_LT(operations, 1000);
  }
}

/// A replacement in two steps has a moment in which nothing has the step's name. Wherever it crashes, the
/// next save leaves a checkpoint that loads, even if it crashes itself as soon as it has cleared what was
/// left.
TEST(Checkpoints, ACrashBetweenTwoStepsOfAReplacementLosesNothing) {
  for (int64_t nth = 0; nth < 200; ++nth) {
    const auto memory = std::make_shared<MemoryStore>();
    const auto faults = std::make_shared<FaultStore>(memory);
    Checkpoints checkpoints("/run", 1, faults);
    save_step(checkpoints, 1);
    faults->fail(std::nullopt, nth, EIO, FaultStore::Times::kFromThenOn);
    bool completed = false;
    try {
      save_step(checkpoints, 1, 2, {.existing = Existing::kReplaceInTwoSteps});
      completed = true;
    } catch (const Error&) {
    }
    memory->crash(MemoryStore::UnsyncedNames::kKept);

    const auto failing = std::make_shared<FaultStore>(memory);
    failing->fail(Operation::kCreate, 0, EIO, FaultStore::Times::kFromThenOn);
    Checkpoints next("/run", 1, failing), after("/run", 1, memory);
    EXPECT_THROW(save_step(next, 2), IoError) << nth;
    EXPECT_EQ(after.latest(), 1) << nth;
    EXPECT_EQ(after.steps(), std::vector<int64_t>{1}) << nth;
    expect_loads(after, std::nullopt, 1);
    save_step(after, 2);
    EXPECT_EQ(names_in(*memory, "/run"), (std::vector<std::string>{"latest", "step-00000002"})) << nth;
    if (completed) return;
  }
  FAIL() << "it never completes";
}

/// A checkpoint that is being deleted when the job crashes does not come back as half a one.
TEST(Checkpoints, ACrashWhileOldOnesAreDeletedLeavesNoHalves) {
  for (int64_t nth = 0; nth < 3; ++nth) {
    const auto memory = std::make_shared<MemoryStore>();
    const auto faults = std::make_shared<FaultStore>(memory);
    Checkpoints checkpoints("/run", 1, faults);
    save_step(checkpoints, 1);
    faults->before(Operation::kRemoveAll, nth, [&] {
      // It has removed one file.
      for (const FolderEntry& entry : memory->list("/run")) {
        if (!entry.name.starts_with("step-00000001.")) continue;
        memory->remove_all("/run/" + entry.name + "/spolia.json");
        throw IoError("crash");
      }
    });
    try {
      save_step(checkpoints, 2);
    } catch (const IoError&) {
    }
    Checkpoints after("/run", 0, memory);
    EXPECT_EQ(after.steps(), std::vector<int64_t>{2});
    save_step(after, 3);
    EXPECT_EQ(names_in(*memory, "/run"),
              (std::vector<std::string>{"latest", "step-00000002", "step-00000003"}));
  }
}

}  // namespace
}  // namespace spolia
