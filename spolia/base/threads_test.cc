#include "spolia/base/threads.h"

#include <atomic>
#include <barrier>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace spolia {
namespace {

TEST(ParallelFor, DoesEveryItemOnce) {
  for (size_t threads : {1, 2, 7}) {
    for (size_t items : {0, 1, 5, 1000}) {
      std::vector<std::atomic<int>> done(items);
      parallel_for(threads, items, [&](size_t worker, size_t item) {
        EXPECT_LT(worker, threads);
        ++done[item];
      });
      for (auto& count : done) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ParallelFor, AWorkersScratchIsItsOwn) {
  std::vector<std::atomic<int>> inside(4);
  parallel_for(4, 2000, [&](size_t worker, size_t) {
    EXPECT_EQ(++inside[worker], 1);
    --inside[worker];
  });
}

TEST(ParallelFor, RunsThreadsAtOnce) {
  std::barrier all_here(3);  // passed only where three items run at the same time
  parallel_for(3, 3, [&](size_t, size_t) { all_here.arrive_and_wait(); });
}

TEST(ParallelFor, ThrowsTheLowestFailure) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<size_t> started{0};
    try {
      parallel_for(4, 100000, [&](size_t, size_t item) {
        ++started;
        if (item >= 20) throw std::runtime_error(std::to_string(item));
      });
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "20");
    }
    EXPECT_LT(started, 100000u);
  }
}

TEST(ParallelFor, StopsWhenCancelled) {
  CancelToken cancel;
  std::atomic<size_t> started{0};
  EXPECT_THROW(parallel_for(
                   2, 100000,
                   [&](size_t, size_t item) {
                     ++started;
                     if (item == 10) cancel.cancel();
                   },
                   &cancel),
               CancelledError);
  EXPECT_LT(started, 100000u);
}

TEST(HardwareThreads, IsAtLeastOne) { EXPECT_GE(hardware_threads(), 1u); }

}  // namespace
}  // namespace spolia
