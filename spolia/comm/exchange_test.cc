#include "spolia/comm/exchange.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

TEST(Exchange, ANumberFromEach) {
  for (int ranks : {1, 2, 5, 8}) {
    std::vector<int64_t> expected;
    for (int r = 0; r < ranks; ++r) expected.push_back(100 - r);
    launch(ranks,
           [&](World& world) { EXPECT_EQ(all_gather_number(*world.all(), 100 - world.rank()), expected); });
  }
}

RC_GTEST_PROP(Exchange, TextsOfAnySize, ()) {
  std::vector<std::string> texts;
  std::vector<std::vector<int64_t>> lists;
  for (int64_t r = 0, ranks = pick(1, 9); r < ranks; ++r) {
    texts.push_back(
        std::string(static_cast<size_t>(pick(0, 3) * pick(0, 2000)), static_cast<char>(pick(0, 256))));
    lists.push_back(std::vector(static_cast<size_t>(pick(0, 3) * pick(0, 50)), pick(-100, 100)));
  }
  launch(static_cast<int>(texts.size()), [&](World& world) {
    const auto r = static_cast<size_t>(world.rank());
    EXPECT_EQ(all_gather_texts(*world.all(), texts[r]), texts);
    EXPECT_EQ(all_gather_lists(*world.all(), lists[r]), lists);
  });
}

TEST(Exchange, EmptyTextsCostOneOperation) {
  OperationLog log;
  launch(3, [](World& world) { all_gather_texts(*world.all(), ""); }, {.decorate = logging(log)});
  EXPECT_EQ(log.lines(1).size(), 1u);
}

TEST(Exchange, TooMuchIsRefusedOnEveryRankAlike) {
  launch(4, [](World& world) {
    const std::string text(world.rank() == 2 ? 70 : 20, 'x');
    try {
      all_gather_texts(*world.all(), text, 100);
      ADD_FAILURE();
    } catch (const InvalidArgumentError& error) {
      EXPECT_STREQ(
          error.what(),
          "the ranks exchange 130 B together, and 100 B is the limit; most of them, 70 B, are rank 2's");
    }
    EXPECT_EQ(all_gather_texts(*world.all(), text, 130)[2].size(), 70u);  // the group goes on
  });
}

}  // namespace
}  // namespace spolia
