#include "spolia/comm/collective.h"

#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

const std::vector<int64_t> kRanks = {0, 1, 6, 7};
std::vector<std::byte> memory(256), other(256);

Collective collective(CollectiveKind kind, size_t send, size_t receive) {
  Collective made = {.kind = kind, .dtype = DType::kFloat32};
  made.send = std::span(memory).first(send);
  made.receive = std::span(other).first(receive);
  return made;
}

TEST(Collective, IsDescribed) {
  EXPECT_EQ(describe({}, kRanks), "barrier");
  Collective broadcast = collective(CollectiveKind::kBroadcast, 16, 0);
  broadcast.peer = 2;
  EXPECT_EQ(describe(broadcast, kRanks), "broadcast of 16 bytes (float32) from rank 6");
  Collective received = collective(CollectiveKind::kBroadcast, 0, 16);
  received.peer = 2;
  EXPECT_EQ(describe(received, kRanks), describe(broadcast, kRanks));
  EXPECT_EQ(describe(collective(CollectiveKind::kAllGather, 4, 16), kRanks),
            "all-gather of 16 bytes (float32)");
  Collective reduce = collective(CollectiveKind::kReduceScatter, 16, 4);
  reduce.op = ReduceOp::kMax;
  EXPECT_EQ(describe(reduce, kRanks), "reduce-scatter (max) of 16 bytes (float32)");
  EXPECT_EQ(describe(collective(CollectiveKind::kAllToAll, 16, 4), kRanks), "all-to-all (float32)");
  Collective send = collective(CollectiveKind::kSend, 8, 0);
  send.peer = 1;
  EXPECT_EQ(describe(send, kRanks), "send of 8 bytes (float32) to rank 1");
  send.kind = CollectiveKind::kReceive;
  EXPECT_EQ(describe(send, kRanks), "receive of 8 bytes (float32) from rank 1");
}

TEST(Collective, IsCheckedByItself) {
  const auto refused = [](const Collective& asked) {
    EXPECT_THROW(check(asked, 1, kRanks), InvalidArgumentError);
  };
  const auto fine = [](const Collective& asked) { EXPECT_NO_THROW(check(asked, 1, kRanks)); };
  fine({});
  refused(collective(CollectiveKind::kBarrier, 1, 0));
  refused(collective(CollectiveKind::kBroadcast, 4, 0));  // not the root
  fine(collective(CollectiveKind::kBroadcast, 0, 4));
  refused(collective(CollectiveKind::kAllReduce, 4, 8));
  refused(collective(CollectiveKind::kSend, 4, 4));

  Collective gather = collective(CollectiveKind::kAllGather, 4, 16);
  refused(gather);
  gather.receive_bytes = {8, 4, 0, 4};
  fine(gather);
  gather.receive_bytes = {8, 4, 0, 5};
  refused(gather);
  gather.receive_bytes = {4, 8, 0, 4};
  refused(gather);
  gather.receive_bytes = {INT64_MAX, 4, INT64_MAX, 14};  // 16, where sums wrap
  refused(gather);

  Collective exchange = collective(CollectiveKind::kAllToAll, 8, 8);
  exchange.send_bytes = {4, 4, 0, 0};
  exchange.receive_bytes = {8, 0, 0, 0};
  refused(exchange);  // what goes to itself
  exchange.receive_bytes = {0, 4, 4, 0};
  fine(exchange);
}

TEST(Collective, MayOverlapInPlaceOnly) {
  const auto overlapping = [](CollectiveKind kind, std::span<std::byte> send, std::span<std::byte> receive) {
    Collective made = {.kind = kind, .dtype = DType::kFloat32, .send = send, .receive = receive};
    made.send_bytes = made.receive_bytes = {16, 16, 16, 16};
    return made;
  };
  const std::span<std::byte> all = std::span(memory).first(64), own = all.subspan(16, 16),
                             off = all.subspan(20, 16);
  EXPECT_NO_THROW(check(overlapping(CollectiveKind::kAllReduce, all, all), 1, kRanks));
  EXPECT_THROW(check(overlapping(CollectiveKind::kAllReduce, own, off), 1, kRanks), InvalidArgumentError);
  EXPECT_NO_THROW(check(overlapping(CollectiveKind::kAllGather, own, all), 1, kRanks));
  EXPECT_THROW(check(overlapping(CollectiveKind::kAllGather, off, all), 1, kRanks), InvalidArgumentError);
  EXPECT_NO_THROW(check(overlapping(CollectiveKind::kReduceScatter, all, own), 1, kRanks));
  EXPECT_THROW(check(overlapping(CollectiveKind::kReduceScatter, all, off), 1, kRanks), InvalidArgumentError);
  EXPECT_THROW(check(overlapping(CollectiveKind::kAllToAll, all, all), 1, kRanks), InvalidArgumentError);
}

TEST(Collective, DisagreesByName) {
  Collective a = collective(CollectiveKind::kAllReduce, 8, 8), b = a;
  EXPECT_FALSE(disagreement(a, 0, b, 2, kRanks));
  b.dtype = DType::kInt32;
  EXPECT_EQ(disagreement(a, 0, b, 2, kRanks),
            "rank 0 asks for all-reduce (sum) of 8 bytes (float32), rank 6 for all-reduce (sum) of 8 bytes "
            "(int32): "
            "the dtypes differ");
  b = a;
  b.device = {DeviceKind::kCuda, 0};
  EXPECT_EQ(disagreement(a, 0, b, 3, kRanks),
            "rank 0 asks for all-reduce (sum) of 8 bytes (float32), rank 7 for all-reduce (sum) of 8 bytes "
            "(float32) "
            "on cuda:0: the devices differ");
  b = a;
  b.op = ReduceOp::kMin;
  EXPECT_TRUE(disagreement(a, 0, b, 3, kRanks));

  a = collective(CollectiveKind::kAllToAll, 16, 16);
  a.send_bytes = a.receive_bytes = {4, 4, 4, 4};
  b = a;
  b.receive_bytes = {8, 4, 4, 0};
  EXPECT_EQ(disagreement(a, 0, b, 1, kRanks),
            "rank 0 asks for all-to-all (float32), rank 1 for all-to-all (float32): rank 0 sends 4 bytes to "
            "rank 1, "
            "which expects 8");
  EXPECT_FALSE(disagreement(a, 2, b, 1, kRanks));

  // A send goes with a receive of the same size only.
  a = collective(CollectiveKind::kSend, 8, 0);
  b = collective(CollectiveKind::kReceive, 0, 8);
  EXPECT_FALSE(disagreement(a, 0, b, 1, kRanks));
  EXPECT_TRUE(disagreement(a, 0, a, 1, kRanks));
  EXPECT_TRUE(disagreement(a, 0, collective(CollectiveKind::kReceive, 0, 4), 1, kRanks));
}

}  // namespace
}  // namespace spolia
