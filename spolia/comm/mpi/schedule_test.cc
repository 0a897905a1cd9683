// The steps of every operation, carried out for all ranks by one thread, against the moves that thread ranks
// make.
#include "spolia/comm/mpi/schedule.h"

#include <deque>
#include <map>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/threads/moves.h"

namespace spolia {
namespace {

/// A whole operation: the buffers of every rank, and what each asks for.
struct Operation {
  std::vector<std::vector<std::byte>> send, receive;
  std::vector<Collective> asked;
  bool in_place = false;

  void borrow_buffers() {
    for (size_t p = 0; p < asked.size(); ++p) {
      asked[p].send = send[p];
      asked[p].receive = in_place ? std::span(send[p]) : std::span(receive[p]);
    }
  }
};

Operation copy_of(const Operation& operation) {
  Operation copy = operation;
  copy.borrow_buffers();
  return copy;
}

int64_t total(std::span<const int64_t> parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0});
}

/// What each of the ranks gives has the sizes of `sends`, and what it gets those of `receives`.
Operation operation(Collective common, const std::vector<int64_t>& sends,
                    const std::vector<int64_t>& receives) {
  Operation made;
  for (size_t p = 0; p < sends.size(); ++p) {
    std::vector<std::byte> given;  // small integers: sums of int32 are exact
    for (int64_t i = 0; i < sends[p]; ++i)
      given.push_back(static_cast<std::byte>(mixed({static_cast<int64_t>(p), i}) % 200));
    made.send.push_back(std::move(given));
    made.receive.emplace_back(static_cast<size_t>(receives[p]), std::byte{0xEE});
    made.asked.push_back(common);
  }
  return made;
}

/// The most bytes that a rank sends, and how many steps the longest schedule has.
struct Cost {
  int64_t busiest = 0;
  int64_t steps = 0;
};

/// A message is lent by its sender until it is received.
struct Lent {
  const Transfer* transfer = nullptr;
  bool* done = nullptr;
};

/// Carries out the schedules of all ranks at once, step by step for each rank.
Cost carry_out(const Operation& made) {
  const int ranks = static_cast<int>(made.asked.size());
  struct Rank {
    Schedule schedule;
    std::optional<Step> step;
    std::deque<bool> done;
    int64_t steps = 0, sent = 0;
    bool over = false;
  };
  std::vector<Rank> all(static_cast<size_t>(ranks));
  for (int p = 0; p < ranks; ++p)
    all[static_cast<size_t>(p)].schedule = schedule(made.asked[static_cast<size_t>(p)], p, ranks);
  std::map<std::pair<int, int>, std::deque<Lent>> sends, receives;  // from, to
  for (bool moved = true; moved;) {
    moved = false;
    for (int p = 0; p < ranks; ++p) {
      Rank& rank = all[static_cast<size_t>(p)];
      if (rank.over || std::ranges::find(rank.done, false) != rank.done.end()) continue;
      if (rank.step && rank.step->then) rank.step->then();
      rank.step = rank.schedule();
      rank.done.clear();
      moved = true;
      if (!rank.step) {
        rank.over = true;
        continue;
      }
      ++rank.steps;
      for (const Transfer& t : rank.step->transfers) {
        EXPECT_GT(t.bytes, 0);
        EXPECT_NE(t.peer, p);
        if (t.sends) rank.sent += t.bytes;
        (t.sends ? sends[{p, t.peer}] : receives[{t.peer, p}])
            .push_back({&t, &rank.done.emplace_back(false)});
      }
    }
    for (auto& [pair, lent] : sends) {
      auto& slots = receives[pair];
      for (; !lent.empty() && !slots.empty(); lent.pop_front(), slots.pop_front()) {
        const Transfer& from = *lent.front().transfer;
        const Transfer& to = *slots.front().transfer;
        EXPECT_EQ(from.bytes, to.bytes) << "from " << pair.first << " to " << pair.second;
        std::copy_n(from.data, std::min(from.bytes, to.bytes), to.data);
        *lent.front().done = *slots.front().done = true;
        moved = true;
      }
    }
  }
  Cost cost;
  for (const Rank& rank : all) {
    EXPECT_TRUE(rank.over) << "a rank waits for ever";
    cost.busiest = std::max(cost.busiest, rank.sent);
    cost.steps = std::max(cost.steps, rank.steps);
  }
  return cost;
}

Cost expect_as_threads(const Operation& made) {
  Operation ours = copy_of(made), theirs = copy_of(made);
  Pieces pieces(moves_of(theirs.asked), theirs.asked[0].dtype, theirs.asked[0].op);
  while (pieces.carry_out_one() != Pieces::Step::kNothingLeft) {
  }
  const Cost cost = carry_out(ours);
  for (size_t p = 0; p < made.asked.size(); ++p) {
    EXPECT_TRUE(ours.receive[p] == theirs.receive[p]) << "what rank " << p << " gets";
    EXPECT_TRUE(ours.send[p] == theirs.send[p]) << "what rank " << p << " gave";
  }
  return cost;
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8, 13};
constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;
/// Around the sizes where another way is taken.
constexpr int64_t kSizes[] = {0, 4, 100, 16 * kKiB, 16 * kKiB + 4, 128 * kKiB, 128 * kKiB + 4, kMiB + 12};

std::vector<int64_t> random_parts(int ranks, int64_t most, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<int64_t> parts;
  for (int p = 0; p < ranks; ++p)
    parts.push_back(random() % 3 == 0 ? 0 : static_cast<int64_t>(random()) % (most / 4 + 1) * 4);
  return parts;
}

TEST(Schedule, BroadcastsFromEveryRoot) {
  for (int ranks : kRanks) {
    for (int64_t bytes : kSizes) {
      for (int root = 0; root<ranks; root += ranks> 5 ? 3 : 1) {
        std::vector<int64_t> sends(static_cast<size_t>(ranks), 0),
            receives(static_cast<size_t>(ranks), bytes);
        std::swap(sends[static_cast<size_t>(root)], receives[static_cast<size_t>(root)]);
        Collective common;
        common.kind = CollectiveKind::kBroadcast;
        common.peer = root;
        const Cost cost = expect_as_threads(operation(common, sends, receives));
        EXPECT_LE(cost.busiest, bytes > 128 * kKiB ? bytes : bytes * ranks);  // large: passed on once
      }
    }
  }
}

TEST(Schedule, GathersUnevenParts) {
  for (int ranks : kRanks) {
    for (int64_t most : kSizes) {
      Collective common;
      common.kind = CollectiveKind::kAllGather;
      common.receive_bytes = random_parts(ranks, most, static_cast<uint32_t>(most) + 1);
      const std::vector<int64_t> all(static_cast<size_t>(ranks), total(common.receive_bytes));
      const Cost cost = expect_as_threads(operation(common, common.receive_bytes, all));
      EXPECT_EQ(cost.steps, 1);
    }
  }
}

TEST(Schedule, SendsEverybodyHisPart) {
  for (int ranks : kRanks) {
    Collective common;
    common.kind = CollectiveKind::kAllToAll;
    std::vector<std::vector<int64_t>> matrix;
    for (int p = 0; p < ranks; ++p) matrix.push_back(random_parts(ranks, 5000, static_cast<uint32_t>(p) + 1));
    std::vector<int64_t> sends, receives(static_cast<size_t>(ranks), 0);
    for (const auto& row : matrix) {
      sends.push_back(total(row));
      for (size_t r = 0; r < row.size(); ++r) receives[r] += row[r];
    }
    Operation made = operation(common, sends, receives);
    for (size_t p = 0; p < matrix.size(); ++p) {
      made.asked[p].send_bytes = matrix[p];
      for (const auto& row : matrix) made.asked[p].receive_bytes.push_back(row[p]);
    }
    expect_as_threads(made);
  }
}

TEST(Schedule, ReducesInTheOrderOfTheRanks) {
  for (DType dtype : {DType::kInt32, DType::kFloat32, DType::kUInt8}) {
    for (int ranks : kRanks) {
      for (int64_t bytes : kSizes) {
        for (const bool in_place : {false, true}) {
          Collective common;
          common.kind = CollectiveKind::kAllReduce;
          common.dtype = dtype;
          const std::vector<int64_t> sizes(static_cast<size_t>(ranks), bytes);
          Operation made = operation(common, sizes, in_place ? std::vector<int64_t>(sizes.size(), 0) : sizes);
          made.in_place = in_place;
          const Cost cost = expect_as_threads(made);
          // Large: twice the buffer, but for rounding.
          EXPECT_LE(cost.busiest, bytes > 16 * kKiB ? 2 * bytes + 64 * ranks : bytes * ranks);
        }
      }
    }
  }
}

TEST(Schedule, ReducesInRounds) {
  Collective common;
  common.kind = CollectiveKind::kAllReduce;
  common.dtype = DType::kInt32;
  const std::vector<int64_t> sizes(3, 7 * kMiB + 36);
  const Cost cost = expect_as_threads(operation(common, sizes, sizes));
  EXPECT_EQ(cost.steps, 6);  // three rounds of 3 MiB, two steps each
}

TEST(Schedule, ScattersReductionsOfUnevenParts) {
  for (int ranks : kRanks) {
    for (int64_t most : kSizes) {
      Collective common;
      common.kind = CollectiveKind::kReduceScatter;
      common.dtype = DType::kInt32;
      common.op = ReduceOp::kMax;
      common.send_bytes = random_parts(ranks, most * 2, static_cast<uint32_t>(most) + 7);
      const std::vector<int64_t> all(static_cast<size_t>(ranks), total(common.send_bytes));
      expect_as_threads(operation(common, all, common.send_bytes));
    }
  }
}

}  // namespace
}  // namespace spolia
