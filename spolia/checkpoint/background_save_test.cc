#include "spolia/checkpoint/background_save.h"

#include <atomic>
#include <future>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using std::chrono::milliseconds;

std::vector<WantedTensor> tensors(int ranks) {
  const auto layout = [&](const std::string& how) {
    return std::make_shared<const Layout>(parse_layout(how + " over " + std::to_string(ranks)));
  };
  return {{"a", DType::kFloat32, {700, 300}, layout("[shard(0)]"), {}, {}},
          {"b", DType::kBFloat16, {30, 20}, layout("[shard(1)]"), {}, {}},
          {"c", DType::kInt64, {}, nullptr, {}, {}},
          {"d", DType::kFloat32, {0, 3}, nullptr, {}, {}}};
}

void expect_loads(int ranks, std::shared_ptr<const Store> store, const std::string& path) {
  launch(ranks, [&](World& world) {
    const auto source = open_together(*world.all(), store, path);
    RankState state(tensors(ranks), world.rank());
    load(world, *source, state.dict());
    state.expect_filled();
  });
}

TEST(BackgroundSave, SavesWhatWasThereWhenItWasStarted) {
  const auto store = std::make_shared<MemoryStore>();
  launch(3, [&](World& world) {
    RankState state(tensors(3), world.rank());
    state.dict().add("step", Value(int64_t{1}));
    BackgroundSaver saver(world, {.when_busy = BackgroundSaver::WhenBusy::kWait, .copy_threads = 2});
    EXPECT_EQ(saver.wait(), std::nullopt);
    for (int round = 0; round < 3; ++round) {
      state.fill();
      saver.start(state.dict(), [&, round](Group& group, const StateDict& copy) {
        return save(group, copy, *store, "/saved" + std::to_string(round));
      });
      state.poison();  // a later step's values
      *state.dict().find("step")->value() = Value(int64_t{99});
      if (round == 1) {
        EXPECT_TRUE(saver.wait().has_value());
      }
    }
    EXPECT_TRUE(saver.wait().has_value());
    EXPECT_TRUE(saver.done());
  });
  for (int round = 0; round < 3; ++round) expect_loads(2, store, "/saved" + std::to_string(round));
}

TEST(BackgroundSave, ItsFailureIsTheCallersAtTheNextTouch) {
  launch(2, [&](World& world) {
    RankState state(tensors(2), world.rank());
    BackgroundSaver saver(world);
    const auto fails = [&](Group&, const StateDict&) -> Report {
      if (world.rank() == 1) throw IoError("disk full");
      return {};
    };
    saver.start(state.dict(), fails);
    if (world.rank() == 1) {
      EXPECT_THROW(saver.wait(), IoError);
      EXPECT_EQ(saver.wait(), std::nullopt);  // once
    } else {
      EXPECT_TRUE(saver.wait().has_value());
    }
    saver.start(state.dict(), fails);
    // All ranks learn of it when they start the next.
    bool started = false;
    try {
      saver.start(state.dict(), [&](Group&, const StateDict&) -> Report {
        started = true;
        return {};
      });
      ADD_FAILURE() << "it was started";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1: disk full"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(started);

    std::atomic<int> called{0};
    saver.start(
        state.dict(), [](Group&, const StateDict&) { return Report(); },
        [&](const Report&, std::exception_ptr failure) {
          EXPECT_EQ(failure, nullptr);
          ++called;
          throw std::runtime_error("callback");
        });
    EXPECT_THROW(saver.wait(), std::runtime_error);
    EXPECT_EQ(called, 1);
  });
}

TEST(BackgroundSave, ASecondSaveWaitsOrIsRefused) {
  launch(2, [&](World& world) {
    RankState state(tensors(2), world.rank());
    BackgroundSaver saver(world, {.when_busy = BackgroundSaver::WhenBusy::kRefuse, .copy_threads = 1});
    std::promise<void> go;
    std::shared_future<void> gate = go.get_future().share();
    // One rank's save is still under way, which is enough.
    saver.start(state.dict(), [&, gate](Group&, const StateDict&) {
      if (world.rank() == 1) gate.wait();
      return Report();
    });
    if (world.rank() == 1) {
      EXPECT_THROW(saver.wait(milliseconds(20)), TimeoutError);
    }
    const auto nothing = [](Group&, const StateDict&) { return Report(); };
    EXPECT_THROW(saver.start(state.dict(), nothing), InvalidArgumentError);
    go.set_value();
    EXPECT_TRUE(saver.wait().has_value());
    world.all()->barrier().wait();
    saver.start(state.dict(), nothing);
    EXPECT_TRUE(saver.wait(milliseconds(10'000)).has_value());
  });
}

TEST(BackgroundSave, ThePoolIsReused) {
  SnapshotPool pool;
  RankState state(tensors(1), 0);
  state.fill();
  const StateDict first = pool.copy(state.dict(), 2);
  const int64_t bytes = pool.bytes();
  const std::byte* memory = first.find("a")->tensor()->memory.data;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
  EXPECT_EQ(pool.copy(state.dict(), 1).find("a")->tensor()->memory.data, memory);
  EXPECT_EQ(pool.bytes(), bytes);
}

}  // namespace
}  // namespace spolia
