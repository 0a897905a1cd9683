#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/world.h"

namespace spolia {
namespace {

/// The message of the E that a launch throws.
template <class E>
std::string error_of_launch(int ranks, const std::function<void(World&)>& body) {
  try {
    launch(ranks, body);
  } catch (const E& error) {
    return error.what();
  }
  return "nothing of that type";
}

TEST(Launch, RunsEveryRankOnce) {
  std::array<std::atomic<int>, 5> runs = {};
  launch(5, [&](World& world) { ++runs[static_cast<size_t>(world.rank())]; });
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
  EXPECT_THROW(launch(0, [](World&) {}), InvalidArgumentError);
}

TEST(Launch, SaysWhatHostRanksAreOn) {
  launch(5,
         [](World& world) {
           const std::vector<int64_t> hosts(world.hosts().begin(), world.hosts().end());
           require(hosts == std::vector<int64_t>{0, 0, 1, 1, 2}, "hosts");
         },
         {.ranks_per_host = 2});
}

TEST(Launch, ThrowsTheErrorOfTheLowestCulprit) {
  const auto body = [](World& world) {
    if (world.rank() == 2) throw NotFoundError("no such file");
    if (world.rank() == 3) throw UnsupportedError("later");
    world.all()->barrier().wait();
  };
  EXPECT_EQ(error_of_launch<NotFoundError>(5, body), "rank 2: no such file");
}

TEST(Launch, BlamesATimeOutOnlyIfThereIsNothingElse) {
  const auto late = [](World& world) {
    if (world.rank() == 0) world.all()->set_timeout(milliseconds(20));
    if (world.rank() != 2) return world.all()->barrier().wait();
    while (world.all()->backend().broken().empty()) std::this_thread::yield();
  };
  const std::string message = error_of_launch<TimeoutError>(3, late);
  EXPECT_EQ(message,
            "rank 0: barrier, operation 0 of the group [0, 1, 2]: timed out; not arrived: rank 2 (which has "
            "started 0 of them)");
  const auto late_and_wrong = [&](World& world) {
    late(world);
    throw CorruptError("of rank {}", world.rank());
  };
  EXPECT_EQ(error_of_launch<CorruptError>(3, late_and_wrong), "rank 2: of rank 2");
}

TEST(Launch, RethrowsForeignExceptionsAsTheyAre) {
  const auto body = [](World& world) {
    if (world.rank() == 1) throw std::out_of_range("far out");
    world.all()->barrier().wait();
  };
  EXPECT_THROW(launch(3, body), std::out_of_range);
  EXPECT_THROW(launch(3,
                      [](World& world) {
                        if (world.rank() == 1) throw 7;
                        world.all()->barrier().wait();
                      }),
               int);
}

TEST(Launch, TellsTheOthersWhatWentWrong) {
  std::string heard;
  const auto body = [&](World& world) {
    const int64_t ranks[] = {0, 1};
    const std::shared_ptr<Group> group = world.create(ranks);
    if (world.rank() == 1) throw IoError("the disk is full");
    if (world.rank() != 0) return;
    try {
      group->barrier().wait();
    } catch (const PeerFailedError& error) {
      heard = error.what();
    }
  };
  EXPECT_THROW(launch(3, body), IoError);
  EXPECT_EQ(heard, "operation 0 of the group [0, 1]: rank 1: the disk is full");
}

TEST(Launch, MissesARankThatHasLetGoOfAGroup) {
  launch(3, [](World& world) {
    const int64_t ranks[] = {0, 1, 2};
    std::shared_ptr<Group> group = world.create(ranks);
    group->barrier().wait();
    if (world.rank() == 1) {
      group.reset();
    } else {
      try {
        group->barrier().wait();
        require(false, "a barrier without rank 1");
      } catch (const PeerFailedError& error) {
        require(std::string_view(error.what()).find("rank 1") != std::string_view::npos, "{}", error.what());
      }
    }
    world.all()->barrier().wait();
  });
}

TEST(Launch, GroupsThatOutliveItAreOver) {
  std::shared_ptr<Group> kept;
  launch(2, [&](World& world) {
    if (world.rank() == 0) kept = world.all();
  });
  EXPECT_EQ(kept->size(), 2);
  EXPECT_THROW(kept->barrier().wait(), PeerFailedError);
}

// Two groups of a rank, each used by a thread of its own.
TEST(Launch, GroupsMayGoToOtherThreads) {
  launch(3, [](World& world) {
    const int64_t ranks[] = {0, 1, 2};
    const std::shared_ptr<Group> background = world.create(ranks);
    std::exception_ptr error;
    const auto sums = [](Group& group, int rounds) {
      for (int i = 0; i < rounds; ++i) {
        TestTensor tensor(DType::kInt64, {40000});
        group.all_reduce(tensor.view(), tensor.view()).wait();
      }
    };
    std::thread thread([&] {
      try {
        sums(*background, 30);
      } catch (...) {
        error = std::current_exception();
      }
    });
    sums(*world.all(), 30);
    thread.join();
    if (error) std::rethrow_exception(error);
  });
}

// A rank fails at any moment, while others wait, copy, or start; they free their memory at once. Sanitizers
// see who touches it later.
TEST(Launch, NobodyTouchesMemoryOfWhatHasFailed) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const auto body = [&](World& world) {
      std::mt19937 random(seed);  // the same on every rank
      const auto culprit = static_cast<int64_t>(random() % 4);
      const auto fatal = random() % 12;
      const bool past_pending = random() % 2 == 0;
      for (uint32_t i = 0; i < 12; ++i) {
        const auto bytes = static_cast<int64_t>(random() % 2 == 0 ? 1000 : 700000);
        const int root = static_cast<int>(random() % 4);
        std::vector<std::byte> first(static_cast<size_t>(bytes)), second(first);
        if (i == fatal && world.rank() == culprit && !past_pending) throw NotFoundError("here");
        Pending a = world.all()->broadcast(byte_view(std::span(first)), root);
        if (i == fatal && world.rank() == culprit) throw NotFoundError("here");
        Pending b = world.all()->all_reduce(byte_view(std::span(second)), byte_view(std::span(second)));
        if (world.rank() % 2 == 0) b.wait();
        a.wait();
        b.wait();
      }
    };
    const std::string message = error_of_launch<NotFoundError>(4, body);
    ASSERT_NE(message.find("here"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace spolia
