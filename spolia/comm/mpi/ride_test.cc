#include "spolia/comm/mpi/ride.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/mpi/tree.h"
#include "spolia/comm/threads/moves.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

/// What all ranks ask for, and their memory.
struct Operation {
  std::vector<std::vector<std::byte>> send, receive;
  std::vector<Collective> asked;
};

Operation random_operation(int ranks) {
  const CollectiveKind kinds[] = {CollectiveKind::kBroadcast, CollectiveKind::kAllGather,
                                  CollectiveKind::kAllReduce};
  Operation made;
  Collective common{.kind = kinds[pick(0, 3)], .dtype = DType::kFloat32, .op = ReduceOp::kSum};
  common.peer = static_cast<int>(pick(0, ranks));
  const int64_t bytes = 4 * pick(0, 30);
  std::vector<int64_t> parts;
  int64_t total = 0;
  for (int r = 0; r < ranks; ++r) total += parts.emplace_back(4 * pick(0, 10));
  for (int r = 0; r < ranks; ++r) {
    int64_t send = bytes, receive = bytes;
    if (common.kind == CollectiveKind::kBroadcast) (r == common.peer ? receive : send) = 0;
    if (common.kind == CollectiveKind::kAllGather) {
      send = parts[static_cast<size_t>(r)];
      receive = total;
    }
    std::vector<std::byte>& memory = made.send.emplace_back(static_cast<size_t>(send));
    for (size_t i = 0; i + 4 <= memory.size(); i += 4) {  // sums whose order shows
      const float value = (i % 3 == 0 ? 1e8f : 0.7f) * static_cast<float>(pick(-9, 9));
      std::memcpy(memory.data() + i, &value, 4);
    }
    made.receive.emplace_back(static_cast<size_t>(receive));
    made.asked.push_back(common);
    if (common.kind == CollectiveKind::kAllGather) made.asked.back().receive_bytes = parts;
  }
  return made;
}

void point_at_memory(Operation& operation) {
  for (size_t r = 0; r < operation.asked.size(); ++r) {
    operation.asked[r].send = operation.send[r];
    operation.asked[r].receive = operation.receive[r];
  }
}

/// Up the tree and down again.
void carry_out(const Operation& operation) {
  const int ranks = static_cast<int>(operation.asked.size());
  std::vector<Ride> rides_of;
  for (int p = 0; p < ranks; ++p) rides_of.emplace_back(operation.asked[static_cast<size_t>(p)], p, ranks);
  for (int p = ranks - 1; p > 0; --p) {
    RC_ASSERT(std::ssize(rides_of[static_cast<size_t>(p)].gathered()) <= kMostRiding);
    rides_of[static_cast<size_t>(parent_of(p))].add(p, rides_of[static_cast<size_t>(p)].gathered());
  }
  const std::vector<std::byte> result = rides_of[0].result();
  RC_ASSERT(std::ssize(result) <= kMostRiding);
  for (const Ride& ride : rides_of) ride.land(result);
}

RC_GTEST_PROP(Ride, EndsAsAmongThreads, ()) {
  const int ranks = static_cast<int>(pick(1, 18));
  Operation ours = random_operation(ranks), theirs = ours;
  point_at_memory(ours);
  point_at_memory(theirs);
  for (const Collective& asked : ours.asked) RC_PRE(rides(asked, ranks));
  carry_out(ours);
  Pieces pieces(moves_of(theirs.asked), theirs.asked[0].dtype, theirs.asked[0].op);
  while (pieces.carry_out_one() != Pieces::Step::kNothingLeft) {
  }
  RC_ASSERT(ours.receive == theirs.receive);
  RC_ASSERT(ours.send == theirs.send);
}

TEST(Ride, IsForFewBytes) {
  std::vector<std::byte> memory(static_cast<size_t>(kMostRiding) + 1);
  const std::span<std::byte> most = std::span(memory).first(static_cast<size_t>(kMostRiding));
  Collective broadcast{.kind = CollectiveKind::kBroadcast, .send = most};
  EXPECT_TRUE(rides(broadcast, 8));
  broadcast.send = memory;
  EXPECT_FALSE(rides(broadcast, 8));
  Collective reduce{.kind = CollectiveKind::kAllReduce, .send = most.first(most.size() / 4), .receive = most};
  EXPECT_TRUE(rides(reduce, 8));
  EXPECT_TRUE(rides(reduce, 9));
  EXPECT_FALSE(rides(reduce, 10));
  EXPECT_FALSE(rides(Collective{.kind = CollectiveKind::kAllToAll}, 2));
}

TEST(Ride, RefusesWhatIsNotAsLongAsItHasToBe) {
  std::vector<std::byte> memory(16);
  const Collective asked{.kind = CollectiveKind::kAllReduce, .send = memory, .receive = memory};
  Ride ride(asked, 0, 4);
  EXPECT_THROW(ride.add(1, std::vector<std::byte>(15)), CorruptError);
  EXPECT_THROW(ride.add(2, std::vector<std::byte>(16)), CorruptError);
  ride.add(2, std::vector<std::byte>(32));
  EXPECT_THROW(ride.land(std::vector<std::byte>(17)), CorruptError);
}

}  // namespace
}  // namespace spolia
