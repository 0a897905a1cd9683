// Ranks that throw, die or fall silent at every step of a save or a load: nobody hangs, nothing half is
// published, the old checkpoint still loads.
#include <atomic>
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/background_save.h"
#include "spolia/checkpoint/checkpoints.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 4;

std::shared_ptr<const Layout> layout(std::string_view text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

std::vector<WantedTensor> tensors() {
  return {{"a", DType::kFloat32, {40, 30}, layout("[shard(0)] over 4"), {}, {}},
          {"b", DType::kFloat32, {64, 8}, layout("[replicate, shard(1)] over 2x2"), {}, {}},
          {"c", DType::kInt64, {5}, nullptr, {}, {}},
          {"d", DType::kUInt8, {30, 100}, layout("[replicate] over 4"), {}, {}}};
}

/// Other layouts of the same, whose shards several ranks want.
std::vector<WantedTensor> wanted() {
  return {{"a", DType::kFloat32, {40, 30}, layout("[shard(1), replicate] over 2x2"), {}, {}},
          {"b", DType::kFloat32, {64, 8}, layout("[replicate] over 4"), {}, {}},
          {"c", DType::kInt64, {5}, nullptr, {}, {}},
          {"d", DType::kUInt8, {30, 100}, layout("[replicate, shard(0)] over 2x2"), {}, {}}};
}

/// On one rank of a job that goes well.
void save_state(World& world, Store& store, const std::string& path, int64_t step, SaveOptions options = {}) {
  RankState state(tensors(), world.rank(), "of step " + std::to_string(step));
  state.fill();
  state.dict().add("step", Value(step));
  if (world.rank() == 3) state.dict().add("mine", Value(std::string("of the last rank")));
  save(*world.all(), state.dict(), store, path, options);
}

/// What is there is whole: the step that it is of.
int64_t loaded_step(std::shared_ptr<const Store> store, const std::string& path) {
  EXPECT_EQ(verify(*open_source(store, path), {}).faults, std::vector<std::string>());
  int64_t step = -1;
  const auto source = open_source(store, path);
  for (size_t v = 0; v < source->catalog().values.size(); ++v) {
    if (source->catalog().values[v].name == "step") step = *source->value(v).get_if<int64_t>();
  }
  launch(2, [&](World& world) {
    std::vector<WantedTensor> all = tensors();
    for (WantedTensor& tensor : all) tensor.layout = nullptr;
    RankState state(all, world.rank(), "of step " + std::to_string(step));
    load(world, *source, state.dict());
    state.expect_filled();
  });
  return step;
}

std::vector<std::string> names_in(const Store& store, const std::string& folder) {
  std::vector<std::string> names;
  for (const FolderEntry& entry : store.list(folder)) names.push_back(entry.name);
  return names;
}

/// Fails where the body takes long: somebody was waited for.
class Watch {
 public:
  explicit Watch(std::chrono::seconds limit) : limit_(limit) {}
  ~Watch() { EXPECT_LT(std::chrono::steady_clock::now() - start_, limit_); }

 private:
  const std::chrono::seconds limit_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

LaunchOptions ends_soon(Decorator decorate, milliseconds timeout = std::chrono::seconds(60)) {
  return {.timeout = timeout, .decorate = std::move(decorate)};
}

/// Whatever operation of the group a rank dies in.
TEST(FailingSave, ARankThatDiesLeavesTheOldCheckpoint) {
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    for (int64_t victim : {0, 2}) {
      bool died = true;
      for (int64_t nth = 0; died; ++nth) {
        SCOPED_TRACE(fmt::format("rank {} at operation {}", victim, nth));
        const Watch watch(std::chrono::seconds(30));
        const auto store = std::make_shared<MemoryStore>();
        launch(kRanks, [&](World& world) { save_state(world, *store, "/saved", 1, {.to = format}); });
        std::atomic<int> failed{0};
        died = false;
        try {
          launch(
              kRanks,
              [&](World& world) {
                try {
                  save_state(world, *store, "/saved", 2, {.to = format, .existing = Existing::kExchange});
                } catch (const Error&) {
                  ++failed;
                  throw;
                }
              },
              ends_soon(on_rank(victim, dying(nth))));
        } catch (const IoError& error) {
          EXPECT_NE(std::string(error.what()).find("dies"), std::string::npos) << error.what();
          died = true;
        }
        EXPECT_EQ(died, failed > 0);
        const int64_t step = loaded_step(store, "/saved");
        if (!died) {
          EXPECT_EQ(step, 2);
          EXPECT_GT(nth, 15);
        }
        // Only what the job's own rank 0 leaves where it dies itself may lie beside it.
        if (victim != 0) {
          EXPECT_EQ(names_in(*store, "/"), std::vector<std::string>{"saved"});
        }
        if (HasFailure()) return;
      }
    }
  }
}

/// Where a rank dies, place 0 takes the folder away, even from under a rank that still writes: what that
/// meets is not told in the place of the death.
TEST(FailingSave, ADeathIsToldEvenWhereAnotherRankIsLate) {
  bool died = true;
  for (int64_t nth = 0; died; ++nth) {
    SCOPED_TRACE(nth);
    const auto memory = std::make_shared<MemoryStore>();
    died = false;
    try {
      launch(
          kRanks,
          [&](World& world) {
            FaultStore own(memory);
            if (world.rank() == 1) {
              own.before(Operation::kCreate, 0, [&] {
                for (int waits = 0; waits < 50 && !memory->list("/").empty(); ++waits) {
                  std::this_thread::sleep_for(milliseconds(2));
                }
              });
            }
            save_state(world, own, "/saved", 1);
          },
          ends_soon(on_rank(2, dying(nth))));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 2 dies"), std::string::npos) << error.what();
      died = true;
    }
  }
}

/// The store of one rank alone fails, once: all ranks get its error, and go on.
TEST(FailingSave, AFaultOfOneRanksStoreIsEverybodysAndPassesBy) {
  for (TargetFormat format : {TargetFormat::kSpolia, TargetFormat::kDcp}) {
    for (int64_t victim : {0, 3}) {
      bool failed = true;
      for (int64_t nth = 0; failed; ++nth) {
        SCOPED_TRACE(fmt::format("rank {}, operation {}", victim, nth));
        const Watch watch(std::chrono::seconds(30));
        const auto memory = std::make_shared<MemoryStore>();
        launch(kRanks, [&](World& world) { save_state(world, *memory, "/old", 1, {.to = format}); });
        std::atomic<int> threw{0};
        std::atomic<bool> published{false};
        launch(
            kRanks,
            [&](World& world) {
              FaultStore own(memory);
              if (world.rank() == victim) own.fail(std::nullopt, nth, EIO);
              try {
                save_state(world, own, "/saved", 2, {.to = format});
              } catch (const IoError& error) {
                EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}: ", victim)), std::string::npos)
                    << error.what();
                ++threw;
              }
              world.all()->barrier().wait();
              if (world.rank() == 0) published = memory->exists("/saved");
              world.all()->barrier().wait();
              save_state(world, *memory, "/again", 3, {.to = format});
            },
            ends_soon(nullptr));
        failed = threw > 0;
        EXPECT_TRUE(threw == 0 || threw == kRanks) << threw;
        // What has its name is whole, even where syncing its name failed.
        if (published) {
          EXPECT_EQ(loaded_step(memory, "/saved"), 2);
        } else {
          EXPECT_TRUE(failed);
        }
        EXPECT_EQ(loaded_step(memory, "/old"), 1);
        EXPECT_EQ(loaded_step(memory, "/again"), 3);
        if (victim != 0) {
          EXPECT_EQ(names_in(*memory, "/").size(), published ? 3u : 2u);
        }
        if (HasFailure()) return;
      }
    }
  }
}

/// An operation that is lost: the others wait until their time is over, and no longer.
TEST(FailingSave, ALostOperationEndsInATimeOut) {
  for (int64_t nth : {0, 3, 7, 11, 15, 18}) {
    SCOPED_TRACE(nth);
    const Watch watch(std::chrono::seconds(30));
    const auto store = std::make_shared<MemoryStore>();
    launch(kRanks, [&](World& world) { save_state(world, *store, "/saved", 1); });
    try {
      launch(
          kRanks,
          [&](World& world) { save_state(world, *store, "/saved", 2, {.existing = Existing::kExchange}); },
          ends_soon(on_rank(1, dropping(nth)), milliseconds(200)));
    } catch (const Error& error) {
      EXPECT_TRUE(error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kPeerFailed)
          << error.what();
    }
    loaded_step(store, "/saved");
  }
}

TEST(FailingLoad, ARankThatDiesEndsItForAll) {
  const auto store = std::make_shared<MemoryStore>();
  launch(kRanks, [&](World& world) { save_state(world, *store, "/saved", 1); });
  for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts, ReadMode::kCheapest}) {
    for (int64_t victim : {0, 3}) {
      bool died = true;
      for (int64_t nth = 0; died; ++nth) {
        SCOPED_TRACE(fmt::format("{}: rank {} at operation {}", name_of(mode), victim, nth));
        const Watch watch(std::chrono::seconds(30));
        died = false;
        try {
          launch(
              kRanks,
              [&](World& world) {
                const auto source = open_together(*world.all(), store, "/saved");
                RankState state(wanted(), world.rank(), "of step 1");
                state.dict().add("step", Value());
                LoadOptions options{.mode = mode};
                options.batches.batch_bytes = nth % 2 == 0 ? 0 : int64_t{1} << 20;
                load(world, *source, state.dict(), options);
                state.expect_filled();
              },
              ends_soon(on_rank(victim, dying(nth))));
        } catch (const IoError& error) {
          EXPECT_NE(std::string(error.what()).find("dies"), std::string::npos) << error.what();
          died = true;
        }
        if (!died) {
          EXPECT_GT(nth, 10);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(FailingLoad, ALostOperationEndsInATimeOut) {
  const auto store = std::make_shared<MemoryStore>();
  launch(kRanks, [&](World& world) { save_state(world, *store, "/saved", 1); });
  for (ReadMode mode : {ReadMode::kOneReader, ReadMode::kParts}) {
    for (int64_t nth : {0, 4, 8, 12, 14, 16, 18}) {
      SCOPED_TRACE(fmt::format("{}: operation {}", name_of(mode), nth));
      const Watch watch(std::chrono::seconds(30));
      try {
        launch(
            kRanks,
            [&](World& world) {
              const auto source = open_together(*world.all(), store, "/saved");
              RankState state(wanted(), world.rank(), "of step 1");
              load(world, *source, state.dict(), {.mode = mode});
            },
            ends_soon(on_rank(2, dropping(nth)), milliseconds(200)));
      } catch (const Error& error) {
        EXPECT_TRUE(error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kPeerFailed)
            << error.what();
      }
    }
  }
}

/// The hook of one rank throws: nothing has been written on any.
TEST(FailingLoad, AHookThatThrowsStopsAllBeforeTheyWrite) {
  const auto store = std::make_shared<MemoryStore>();
  launch(kRanks, [&](World& world) { save_state(world, *store, "/saved", 1); });
  for (int64_t victim : {0, 3}) {
    std::atomic<int> threw{0};
    launch(kRanks, [&](World& world) {
      const auto source = open_together(*world.all(), store, "/saved");
      RankState state(wanted(), world.rank(), "of step 1");
      state.poison();
      LoadOptions options;
      options.hook = [&](const StateDict::Entry& entry) -> std::optional<StateDict::Entry> {
        if (world.rank() == victim && entry.name == "c") throw NotFoundError("not that one");
        return entry;
      };
      try {
        load(world, *source, state.dict(), options);
      } catch (const NotFoundError& error) {
        EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}: not that one", victim)),
                  std::string::npos)
            << error.what();
        ++threw;
      }
      state.expect_poisoned();
      load(world, *source, state.dict());
      state.expect_filled();
    });
    EXPECT_EQ(threw, kRanks);
  }
}

/// The store of one rank fails while it opens files and reads.
TEST(FailingLoad, AFaultOfOneRanksStoreIsEverybodysAndPassesBy) {
  const auto memory = std::make_shared<MemoryStore>();
  launch(kRanks, [&](World& world) { save_state(world, *memory, "/saved", 1); });
  for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts}) {
    for (int64_t victim : {0, 1}) {
      bool failed = true;
      for (int64_t nth = 0; failed; ++nth) {
        SCOPED_TRACE(fmt::format("{}: rank {}, operation {}", name_of(mode), victim, nth));
        const Watch watch(std::chrono::seconds(30));
        std::atomic<int> threw{0};
        launch(
            kRanks,
            [&](World& world) {
              const auto own = std::make_shared<FaultStore>(memory);
              if (world.rank() == victim) own->fail(std::nullopt, nth, EIO);
              try {
                const auto source = open_together(*world.all(), own, "/saved");
                RankState state(wanted(), world.rank(), "of step 1");
                load(world, *source, state.dict(), {.mode = mode});
                state.expect_filled();
              } catch (const IoError& error) {
                EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}: ", victim)), std::string::npos)
                    << error.what();
                ++threw;
              }
              const auto source = open_together(*world.all(), memory, "/saved");
              RankState state(wanted(), world.rank(), "of step 1");
              load(world, *source, state.dict(), {.mode = mode});
              state.expect_filled();
            },
            ends_soon(nullptr));
        failed = threw > 0;
        EXPECT_TRUE(threw == 0 || threw == kRanks) << threw;
        if (HasFailure()) return;
      }
    }
  }
}

/// What a hook puts in the place of an entry need not be of its sort.
TEST(Hooks, MayPutAValueInATensorsPlace) {
  const auto store = std::make_shared<MemoryStore>();
  const EntryHook hook = [](const StateDict::Entry& entry) -> std::optional<StateDict::Entry> {
    StateDict::Entry chosen = entry;
    if (entry.name == "c") chosen.content = Value(std::string("five numbers"));
    return chosen;
  };
  launch(kRanks, [&](World& world) {
    save_state(world, *store, "/saved", 1, {.hook = hook});
    const auto source = open_together(*world.all(), store, "/saved");
    RankState state(wanted(), world.rank(), "of step 1");
    LoadOptions options;
    options.hook = hook;
    load(world, *source, state.dict(), options);
    ASSERT_NE(state.dict().find("c")->value(), nullptr);
    EXPECT_EQ(*state.dict().find("c")->value(), Value(std::string("five numbers")));
  });
}

/// A rank dies while its background save is under way: all savers end, and the checkpoint before it loads.
TEST(FailingBackgroundSave, ARankThatDiesEndsItForAll) {
  for (int64_t nth = 0; nth < 20; nth += 2) {
    SCOPED_TRACE(nth);
    const Watch watch(std::chrono::seconds(30));
    const auto store = std::make_shared<MemoryStore>();
    const auto checkpoints = std::make_shared<Checkpoints>("/run", 2, store);
    launch(kRanks, [&](World& world) {
      RankState state(tensors(), world.rank(), "of step 1");
      state.fill();
      state.dict().add("step", Value(int64_t{1}));
      checkpoints->save(*world.all(), state.dict(), 1);
    });
    std::atomic<int> failed{0};
    const auto in_background = [](const GroupBackend& backend) {
      // Of the groups of all ranks the third: that of the world and the saver's other one come before it.
      thread_local int made = 0;
      return backend.ranks().size() == static_cast<size_t>(kRanks) &&
             backend.ranks()[static_cast<size_t>(backend.place())] == 1 && ++made == 3;
    };
    try {
      launch(
          kRanks,
          [&](World& world) {
            RankState state(tensors(), world.rank(), "of step 2");
            state.fill();
            state.dict().add("step", Value(int64_t{2}));
            BackgroundSaver saver(world);
            saver.start(state.dict(), [&](Group& group, const StateDict& copy) {
              return checkpoints->save(group, copy, 2);
            });
            state.poison();
            try {
              saver.wait();
            } catch (const Error&) {
              ++failed;
              throw;
            }
          },
          ends_soon(where(in_background, dying(nth))));
    } catch (const Error&) {
    }
    EXPECT_EQ(failed, kRanks);
    const std::optional<int64_t> latest = checkpoints->latest();
    ASSERT_TRUE(latest);
    EXPECT_EQ(loaded_step(store, checkpoints->folder_of(*latest)), *latest);
  }
}

}  // namespace
}  // namespace spolia
