#include "spolia/comm/decorators.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/testing_tensors.h"

namespace spolia {
namespace {

using std::chrono::microseconds;

void sum_and_broadcast(World& world) {
  TestTensor tensor(DType::kInt32, {4});
  world.all()->all_reduce(tensor.view(), tensor.view()).wait();
  world.all()->broadcast(tensor.view(), 1).wait();
}

TEST(Decorators, LogWhatEachRankStarts) {
  OperationLog log;
  launch(3, sum_and_broadcast, {.decorate = logging(log)});
  const std::vector<std::string> expected = {"[0, 1, 2] all-reduce (sum) of 16 bytes (int32)",
                                             "[0, 1, 2] broadcast of 16 bytes (int32) from rank 1"};
  for (int64_t rank = 0; rank < 3; ++rank) EXPECT_EQ(log.lines(rank), expected);
  EXPECT_TRUE(log.lines(3).empty());
}

TEST(Decorators, GoAroundNewGroupsToo) {
  OperationLog log;
  const auto body = [](World& world) {
    const int64_t ranks[] = {0, 2};
    const std::shared_ptr<Group> group = world.create(ranks);
    if (group) group->barrier().wait();
  };
  launch(3, body, {.decorate = logging(log)});
  EXPECT_EQ(log.lines(2).back(), "[0, 2] barrier");
  EXPECT_EQ(log.lines(1).size(), 2u);  // of create()
}

TEST(Decorators, MakeOperationsSlow) {
  const auto begin = std::chrono::steady_clock::now();
  launch(2, sum_and_broadcast, {.decorate = costing(microseconds(3000))});
  EXPECT_GE(std::chrono::steady_clock::now() - begin, microseconds(6000));
  // Late, but in time.
  launch(4, sum_and_broadcast,
         {.decorate = chain(
              {on_rank(1, delaying(microseconds(1), microseconds(2000), 7)), costing(microseconds(5))})});
}

TEST(Decorators, AreChainedFromTheOutside) {
  OperationLog log;
  const Decorator dies = on_rank(1, dying(1));
  EXPECT_THROW(launch(2, sum_and_broadcast, {.decorate = chain({logging(log), dies})}), IoError);
  EXPECT_EQ(log.lines(1).size(), 2u);
  OperationLog inner;
  EXPECT_THROW(launch(2, sum_and_broadcast, {.decorate = chain({dies, logging(inner)})}), IoError);
  EXPECT_EQ(inner.lines(1).size(), 1u);
}

TEST(Decorators, LoseOneOperationOfTheEndsThatArePicked) {
  const auto in_pair =
      where([](const GroupBackend& end) { return end.ranks().size() == 2 && end.place() == 1; }, dropping(0));
  const auto body = [](World& world) {
    sum_and_broadcast(world);
    const int64_t ranks[] = {0, 2};
    const std::shared_ptr<Group> group = world.create(ranks);
    if (!group) return;
    group->set_timeout(milliseconds(50));
    group->barrier().wait();
  };
  try {
    launch(3, body, {.decorate = in_pair});
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace spolia
