#include "spolia/assemble/unit_pool.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

TEST(UnitPool, BlocksAreUsedAgainByWhatFits) {
  UnitPool pool(3000, {});
  const int64_t first[] = {1000, 100};
  std::vector<Buffer> blocks = pool.take(first, 0);
  const std::byte *large = blocks[0].data(), *small = blocks[1].data();
  for (Buffer& block : blocks) pool.give_back(std::move(block));
  const int64_t second[] = {90, 1000};
  blocks = pool.take(second, 0);
  EXPECT_EQ(blocks[0].data(), small);
  EXPECT_EQ(blocks[1].data(), large);
  EXPECT_EQ(pool.peak(), 1100);
}

TEST(UnitPool, ABlockIsFarTooLargeOnlyWhereThereIsNoRoomForAnother) {
  const int64_t large[] = {1000}, small[] = {400};
  for (const int64_t limit : {1400, 1399}) {
    UnitPool pool(limit, {});
    pool.give_back(std::move(pool.take(large, 0)[0]));
    EXPECT_EQ(pool.take(small, 0)[0].size(), limit == 1400 ? 400 : 1000);
    EXPECT_LE(pool.peak(), limit);
  }
}

TEST(UnitPool, ABlockIsNotUsedWhereItsRestWillBeWanted) {
  UnitPool pool(1000, {});
  const int64_t large[] = {800}, small[] = {300};
  pool.give_back(std::move(pool.take(large, 0)[0]));
  // 300 in a block of 800 would leave 200 for the 700 to come.
  std::vector<Buffer> blocks = pool.take(small, 700);
  EXPECT_EQ(blocks[0].size(), 300);
  EXPECT_EQ(pool.held(), 300);
}

RC_GTEST_PROP(UnitPool, KeepsWithinItsLimitWhateverIsAskedFor, ()) {
  // Rounds of sizes, each in use together with the next one, as an assembler asks.
  std::vector<std::vector<int64_t>> rounds;
  for (int64_t r = pick(1, 20); r > 0; --r) {
    std::vector<int64_t>& sizes = rounds.emplace_back();
    for (int64_t u = pick(0, 5); u > 0; --u) sizes.push_back(pick(1, pick(0, 2) == 0 ? 5000 : 100));
  }
  const auto sum = [&](size_t r) {
    return r < rounds.size() ? std::accumulate(rounds[r].begin(), rounds[r].end(), int64_t{0}) : 0;
  };
  int64_t limit = 0;
  for (size_t r = 0; r < rounds.size(); ++r) limit = std::max(limit, sum(r) + sum(r + 1));
  UnitPool pool(limit, {});
  std::vector<Buffer> before;
  int64_t most = 0;
  for (size_t r = 0; r < rounds.size(); ++r) {
    std::vector<Buffer> blocks = pool.take(rounds[r], sum(r + 1));
    RC_ASSERT(blocks.size() == rounds[r].size());
    int64_t in_use = 0;
    for (size_t u = 0; u < blocks.size(); ++u) {
      RC_ASSERT(blocks[u].size() >= rounds[r][u]);
      in_use += blocks[u].size();
    }
    for (const Buffer& block : before) in_use += block.size();
    RC_ASSERT(in_use <= pool.held());
    most = std::max(most, pool.held());
    for (Buffer& block : before) {
      if (pick(0, 4) == 0) {
        pool.forget(block);
      } else {
        pool.give_back(std::move(block));
      }
    }
    before = std::move(blocks);
  }
  RC_ASSERT(most <= limit);
  RC_ASSERT(pool.peak() == most);
}

}  // namespace
}  // namespace spolia
