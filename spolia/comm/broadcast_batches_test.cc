#include "spolia/comm/broadcast_batches.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/test_random.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

/// What one rank has in flight, and what it has started. Used by the rank's thread.
struct Watch {
  int64_t now = 0, most = 0;              // operations
  int64_t bytes_now = 0, most_bytes = 0;  // theirs; the most that several had together
  std::vector<Collective> started;

  void start(const Collective& collective) {
    const auto bytes = static_cast<int64_t>(collective.send.size() + collective.receive.size());
    started.push_back(collective);
    most = std::max(most, ++now);
    bytes_now += bytes;
    if (now > 1) most_bytes = std::max(most_bytes, bytes_now);
  }
  void end(int64_t bytes) {
    --now;
    bytes_now -= bytes;
  }
};

class WatchedWork final : public Work {
 public:
  WatchedWork(std::unique_ptr<Work> inner, Watch& watch, int64_t bytes)
      : inner_(std::move(inner)), watch_(watch), bytes_(bytes) {}
  ~WatchedWork() override { watch_.end(bytes_); }
  bool test() override { return inner_->test(); }
  void wait(Deadline deadline) override { inner_->wait(deadline); }

 private:
  const std::unique_ptr<Work> inner_;
  Watch& watch_;
  const int64_t bytes_;
};

class WatchedBackend final : public ForwardingBackend {
 public:
  WatchedBackend(std::shared_ptr<GroupBackend> inner, Watch& watch)
      : ForwardingBackend(std::move(inner)), watch_(watch) {}

 private:
  std::unique_ptr<Work> pass(const Collective& collective, const Start& start) override {
    std::unique_ptr<Work> work = start();
    if (collective.kind != CollectiveKind::kBroadcast) return work;
    watch_.start(collective);
    return std::make_unique<WatchedWork>(
        std::move(work), watch_, static_cast<int64_t>(collective.send.size() + collective.receive.size()));
  }

  Watch& watch_;
};

/// By rank of the world.
Decorator watching(std::vector<Watch>& watches) {
  return [&watches](std::shared_ptr<GroupBackend> backend) {
    Watch& watch = watches[static_cast<size_t>(backend->ranks()[static_cast<size_t>(backend->place())])];
    return std::make_shared<WatchedBackend>(std::move(backend), watch);
  };
}

/// Takes no runs: what it sends in batches is packed.
class PackingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool takes_runs() const override { return false; }
};

std::shared_ptr<GroupBackend> packing(std::shared_ptr<GroupBackend> backend) {
  return std::make_shared<PackingBackend>(std::move(backend));
}

/// A piece as the test's model has it: rows that lie `pitch` bytes apart in memory, each `row` bytes.
struct Piece {
  size_t group = 0;
  int root = 0;
  DType dtype = DType::kUInt8;
  Dims shape;
  int64_t rows = 1, row = 0, pitch = 0;
  bool flush_after = false;

  int64_t bytes() const { return rows * row; }
};

struct Program {
  int ranks = 1;
  std::vector<std::vector<int64_t>> groups;
  std::vector<Piece> pieces;
  BatchOptions options;
};

Piece random_piece(const Program& program) {
  Piece piece;
  piece.group = static_cast<size_t>(pick(0, std::ssize(program.groups)));
  piece.root = static_cast<int>(pick(0, std::min<int64_t>(2, std::ssize(program.groups[piece.group]))));
  const DType dtypes[] = {DType::kUInt8, DType::kFloat32, DType::kFloat32, DType::kBFloat16,
                          DType::kFloat6E2M3FN};
  piece.dtype = dtypes[pick(0, 5)];
  const int64_t columns = pick(0, 6) == 0 ? pick(0, 3) * 500 : pick(1, 60);
  piece.rows = pick(1, 4);
  if (piece.dtype == DType::kFloat6E2M3FN) {  // four elements are three bytes
    piece.shape = {piece.rows, 4 * columns};
    piece.row = piece.pitch = 3 * columns;
  } else {
    piece.shape = {piece.rows, columns};
    piece.row = columns * element_bytes(piece.dtype);
    piece.pitch = piece.row + pick(0, 2) * element_bytes(piece.dtype);
  }
  piece.flush_after = pick(0, 20) == 0;
  return piece;
}

Program random_program() {
  Program program = {.ranks = static_cast<int>(pick(1, 9)), .groups = {}, .pieces = {}, .options = {}};
  for (int64_t g = pick(1, 4); g > 0; --g) {
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < program.ranks; ++r) {
      if (pick(0, 3) > 0) ranks.push_back(r);
    }
    if (ranks.empty()) ranks.push_back(pick(0, program.ranks));
    program.groups.push_back(ranks);
  }
  for (int64_t p = pick(0, 60); p > 0; --p) program.pieces.push_back(random_piece(program));
  program.options = {.batch_bytes = pick(0, 4) == 0 ? pick(0, 2) : pick(1, 3000),
                     .max_in_flight = pick(1, 9),
                     .max_bytes_in_flight = pick(0, 2) == 0 ? pick(0, 10000) : int64_t{1} << 20};
  return program;
}

/// A piece's memory on one rank: what this rank has, or what everybody gets.
std::vector<std::byte> contents(const Piece& piece, size_t number, int64_t rank) {
  std::vector<std::byte> bytes(static_cast<size_t>(piece.rows * piece.pitch));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((i * 7 + number * 31 + static_cast<size_t>(rank) * 101) >> (i % 3));
  }
  return bytes;
}

View view_of(const Piece& piece, std::vector<std::byte>& memory) {
  View view = dense_view(memory.data(), piece.dtype, piece.shape);
  if (piece.pitch != piece.row) view.strides[0] = piece.pitch;
  return view;
}

std::vector<std::byte> expected(const Piece& piece, size_t number, const std::vector<int64_t>& ranks,
                                int64_t rank) {
  const std::vector<std::byte> sent = contents(piece, number, ranks[static_cast<size_t>(piece.root)]);
  std::vector<std::byte> bytes = contents(piece, number, rank);
  for (int64_t r = 0; r < piece.rows; ++r) {
    std::copy_n(sent.begin() + r * piece.pitch, piece.row, bytes.begin() + r * piece.pitch);
  }
  return bytes;
}

/// The broadcasts of a program, of all ranks, in their one order: by the words, done slowly.
struct Broadcast {
  size_t group = 0;
  int root = 0;
  DType dtype = DType::kUInt8;
  int64_t bytes = 0;
  int64_t pieces = 0;
};

std::vector<Broadcast> model(const Program& program) {
  std::vector<Broadcast> sent, open;
  const auto flush = [&] {
    for (const Broadcast& batch : std::exchange(open, {})) {
      if (batch.pieces > 0) sent.push_back(batch);
    }
  };
  for (const Piece& piece : program.pieces) {
    const Broadcast alone = {piece.group, piece.root, piece.dtype, piece.bytes(), 1};
    if (piece.bytes() >= program.options.batch_bytes && piece.bytes() > 0) {
      sent.push_back(alone);
    } else if (piece.bytes() > 0) {
      auto at = std::ranges::find_if(open, [&](const Broadcast& batch) {
        return batch.group == piece.group && batch.root == piece.root && batch.dtype == piece.dtype;
      });
      if (at == open.end()) {
        open.push_back(alone);
      } else if (at->bytes + piece.bytes() > program.options.batch_bytes) {
        sent.push_back(std::exchange(*at, alone));
      } else {
        at->bytes += piece.bytes();
        ++at->pieces;
      }
    }
    if (piece.flush_after) flush();
  }
  flush();
  return sent;
}

/// What a rank of the world starts.
std::vector<std::string> expected_lines(const Program& program, int64_t rank) {
  std::vector<std::string> lines;
  for (const Broadcast& b : model(program)) {
    const std::vector<int64_t>& ranks = program.groups[b.group];
    if (!std::ranges::count(ranks, rank)) continue;
    lines.push_back(fmt::format("{} broadcast of {} bytes ({}) from rank {}", list_text(ranks), b.bytes,
                                name_of(b.dtype), ranks[static_cast<size_t>(b.root)]));
  }
  return lines;
}

BatchCounts expected_counts(const Program& program, int64_t rank) {
  BatchCounts counts;
  for (const Piece& piece : program.pieces) {
    if (!std::ranges::count(program.groups[piece.group], rank)) continue;
    ++counts.pieces;
    counts.bytes += piece.bytes();
  }
  for (const Broadcast& b : model(program)) {
    if (!std::ranges::count(program.groups[b.group], rank)) continue;
    ++counts.broadcasts;
    if (b.pieces > 1) counts.batched += b.pieces;
  }
  return counts;
}

void run(const Program& program, World& world, const OperationLog& log) {
  std::vector<std::shared_ptr<Group>> groups;
  for (const std::vector<int64_t>& ranks : program.groups) groups.push_back(world.create(ranks));
  const size_t before = log.lines(world.rank()).size();

  std::vector<std::vector<std::byte>> memory;
  for (size_t p = 0; p < program.pieces.size(); ++p)
    memory.push_back(contents(program.pieces[p], p, world.rank()));
  BroadcastBatches batches(program.options);
  for (size_t p = 0; p < program.pieces.size(); ++p) {
    const Piece& piece = program.pieces[p];
    if (groups[piece.group]) batches.add(*groups[piece.group], piece.root, view_of(piece, memory[p]));
    if (piece.flush_after) batches.flush();
  }
  batches.wait_all();

  for (size_t p = 0; p < program.pieces.size(); ++p) {
    const Piece& piece = program.pieces[p];
    if (!groups[piece.group]) continue;
    EXPECT_EQ(memory[p], expected(piece, p, program.groups[piece.group], world.rank())) << "piece " << p;
  }
  std::vector<std::string> lines = log.lines(world.rank());
  lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(before));
  EXPECT_EQ(lines, expected_lines(program, world.rank()));
  const BatchCounts counts = expected_counts(program, world.rank());
  EXPECT_EQ(batches.counts().pieces, counts.pieces);
  EXPECT_EQ(batches.counts().bytes, counts.bytes);
  EXPECT_EQ(batches.counts().broadcasts, counts.broadcasts);
  EXPECT_EQ(batches.counts().batched, counts.batched);
}

void check_random_program() {
  const Program program = random_program();
  OperationLog log;
  std::vector<Watch> watches(static_cast<size_t>(program.ranks));
  const int64_t some = pick(0, 4);  // ranks may pack each as it likes
  const auto packs =
      where([some](const GroupBackend& b) { return (b.ranks()[0] + b.place()) % 4 < some; }, packing);
  launch(program.ranks, [&](World& world) { run(program, world, log); },
         {.decorate = chain({logging(log), watching(watches), packs})});
  for (const Watch& watch : watches) {
    RC_ASSERT(watch.now == 0);
    RC_ASSERT(watch.most <= program.options.max_in_flight);
    RC_ASSERT(watch.most_bytes <= program.options.max_bytes_in_flight);
  }
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(BroadcastBatches, SendWhatTheModelSaysAndNoMoreAtOnce, ()) { check_random_program(); }

View bytes_view(std::vector<std::byte>& memory) { return byte_view(std::span(memory)); }

TEST(BroadcastBatches, FillTheirLimits) {
  std::vector<Watch> watches(2);
  const auto body = [](World& world) {
    std::vector<std::vector<std::byte>> memory(40, std::vector<std::byte>(100));
    BroadcastBatches batches({.batch_bytes = 0, .max_in_flight = 8, .max_bytes_in_flight = 550});
    for (auto& piece : memory) batches.add(*world.all(), 0, bytes_view(piece));
    batches.wait_all();
    BroadcastBatches more({.batch_bytes = 0, .max_in_flight = 8, .max_bytes_in_flight = 1 << 20});
    for (auto& piece : memory) more.add(*world.all(), 0, bytes_view(piece));
    more.wait_all();
  };
  launch(2, body, {.decorate = watching(watches)});
  EXPECT_EQ(watches[1].most, 8);
  EXPECT_EQ(watches[1].most_bytes, 800);
}

TEST(BroadcastBatches, OneThatIsLargerThanWhatMayBeInFlightGoesByItself) {
  std::vector<Watch> watches(3);
  launch(3,
         [](World& world) {
           std::vector<std::vector<std::byte>> memory(6,
                                                      std::vector<std::byte>(100, std::byte(world.rank())));
           BroadcastBatches batches({.batch_bytes = 10, .max_in_flight = 8, .max_bytes_in_flight = 50});
           for (auto& piece : memory) batches.add(*world.all(), 2, bytes_view(piece));
           batches.wait_all();
           for (auto& piece : memory) EXPECT_EQ(piece, std::vector<std::byte>(100, std::byte(2)));
         },
         {.decorate = watching(watches)});
  for (const Watch& watch : watches) EXPECT_EQ(watch.most, 1);
}

TEST(BroadcastBatches, ABatchOfOneIsSentFromAndToItsPlace) {
  std::vector<Watch> watches(2);
  launch(2,
         [&](World& world) {
           std::vector<std::byte> small(100), large(1000);
           BroadcastBatches batches({.batch_bytes = 1000});
           batches.add(*world.all(), 0, bytes_view(large));
           batches.add(*world.all(), 0, bytes_view(small));
           batches.wait_all();
           const std::vector<Collective>& started = watches[static_cast<size_t>(world.rank())].started;
           const auto data = [&](const Collective& c) {
             return world.rank() == 0 ? c.send.data() : c.receive.data();
           };
           ASSERT_EQ(started.size(), 2u);
           EXPECT_EQ(data(started[0]), large.data());
           EXPECT_EQ(data(started[1]), small.data());
           EXPECT_EQ(batches.counts().batched, 0);
         },
         {.decorate = watching(watches)});
}

/// What the receivers get is in place when the broadcast has landed: nothing is dealt out then.
TEST(BroadcastBatches, DensePiecesGoFromPlaceToPlace) {
  launch(3, [](World& world) {
    std::vector<std::byte> memory(3000, std::byte(world.rank()));
    BroadcastBatches batches;
    for (size_t p = 0; p < 3; ++p)
      batches.add(*world.all(), 1, byte_view(std::span(memory).subspan(1000 * p, 900)));
    batches.flush();
    world.all()->barrier().wait();  // lands after the batch
    std::vector<std::byte> expected(3000, std::byte(world.rank()));
    for (size_t p = 0; p < 3; ++p)
      std::fill_n(expected.begin() + 1000 * static_cast<int64_t>(p), 900, std::byte(1));
    EXPECT_EQ(memory, expected);
    batches.wait_all();
    EXPECT_EQ(batches.counts().batched, 3);
    EXPECT_EQ(batches.counts().broadcasts, 1);
  });
}

TEST(BroadcastBatches, CanBeUsedAgainAfterAWait) {
  launch(4, [](World& world) {
    BroadcastBatches batches({.batch_bytes = 64});
    batches.wait_all();
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<std::byte>> memory(10, std::vector<std::byte>(13, std::byte(world.rank())));
      for (auto& piece : memory) batches.add(*world.all(), round % 4, bytes_view(piece));
      batches.wait_all();
      for (auto& piece : memory) EXPECT_EQ(piece, std::vector<std::byte>(13, std::byte(round % 4)));
    }
    EXPECT_EQ(batches.counts().broadcasts, 5 * 3);
  });
}

TEST(BroadcastBatches, RefuseWhatCannotBeSentBeforeTheyStartAnything) {
  OperationLog log;
  launch(2,
         [](World& world) {
           Group& all = *world.all();
           std::vector<std::byte> memory(64);
           View view = bytes_view(memory);
           BroadcastBatches batches;
           EXPECT_THROW(batches.add(all, 2, view), InvalidArgumentError);
           EXPECT_THROW(batches.add(all, -1, view), InvalidArgumentError);
           View lacking = view;
           lacking.strides = {};
           EXPECT_THROW(batches.add(all, 0, lacking), InvalidArgumentError);
           View repeated = view;
           repeated.strides[0] = 0;
           EXPECT_THROW(batches.add(all, 1 - all.place(), repeated), InvalidArgumentError);
           View packed = dense_view(memory.data(), DType::kFloat4E2M1FN, Dims{8});
           packed.strides[0] = 2;
           EXPECT_THROW(batches.add(all, 0, packed), UnsupportedError);
           batches.wait_all();
           EXPECT_EQ(batches.counts().pieces, 0);
         },
         {.decorate = logging(log)});
  EXPECT_TRUE(log.lines(0).empty());
  EXPECT_THROW(BroadcastBatches({.batch_bytes = -1}), InvalidArgumentError);
  EXPECT_THROW(BroadcastBatches({.max_in_flight = 0}), InvalidArgumentError);
  EXPECT_THROW(BroadcastBatches({.max_bytes_in_flight = -1}), InvalidArgumentError);
}

template <class Step>
std::optional<ErrorKind> kind_thrown(Step step) {
  try {
    step();
  } catch (const Error& error) {
    return error.kind();
  }
  return std::nullopt;
}

/// Pieces to [0, 1], which fails, and to [1, 2], which does not, among each other.
template <class Check>
void run_two_groups(World& world, int64_t batch_bytes, Check check_wait) {
  const auto failing = world.create(std::vector<int64_t>{0, 1});
  const auto healthy = world.create(std::vector<int64_t>{1, 2});
  if (healthy)
    healthy->set_timeout(std::chrono::minutes(5));  // rank 1 is late in it while it waits for the other
  std::vector<std::vector<std::byte>> memory(40, std::vector<std::byte>(50, std::byte(world.rank())));
  BroadcastBatches batches({.batch_bytes = batch_bytes, .max_in_flight = 3});
  for (size_t p = 0; p < memory.size(); ++p) {
    const auto& group = p % 2 == 0 ? failing : healthy;
    if (group) batches.add(*group, 1, bytes_view(memory[p]));
  }
  check_wait(batches);
  for (size_t p = 1; p < memory.size(); p += 2) {
    if (!healthy) continue;
    EXPECT_EQ(memory[p], std::vector<std::byte>(50, std::byte(2)));
  }
  EXPECT_NO_THROW(batches.wait_all());  // told once
  world.all()->barrier().wait();        // nobody leaves while others look
}

Decorator on_first_group(Decorator decorate) {
  return where([](const GroupBackend& b) { return b.ranks().size() == 2 && b.ranks()[0] == 0; },
               std::move(decorate));
}

TEST(BroadcastBatches, OtherGroupsGoOnWhereOneDies) {
  for (int64_t batch_bytes : {0, 120, 1 << 20}) {
    launch(3,
           [&](World& world) {
             run_two_groups(world, batch_bytes, [&](BroadcastBatches& batches) {
               if (world.rank() == 2) return batches.wait_all();
               EXPECT_EQ(kind_thrown([&] { batches.wait_all(); }),
                         world.rank() == 0 ? ErrorKind::kIo : ErrorKind::kPeerFailed);
             });
           },
           {.decorate = on_first_group(on_rank(0, dying(batch_bytes == 0 ? 5 : 0)))});
  }
}

TEST(BroadcastBatches, OtherGroupsGoOnWhereOneTimesOut) {
  launch(3,
         [&](World& world) {
           run_two_groups(world, 120, [&](BroadcastBatches& batches) {
             if (world.rank() == 2) return batches.wait_all();
             const auto kind = kind_thrown([&] { batches.wait_all(); });
             EXPECT_TRUE(kind == ErrorKind::kTimeout || kind == ErrorKind::kPeerFailed);
           });
         },
         {.timeout = milliseconds(300), .decorate = on_first_group(on_rank(0, dropping(2)))});
}

TEST(BroadcastBatches, DisagreementIsAnErrorOnEveryRank) {
  launch(2, [](World& world) {
    std::vector<std::byte> memory(100);
    BroadcastBatches batches;
    const size_t bytes = world.rank() == 0 ? 30 : 31;
    batches.add(*world.all(), 0, byte_view(std::span(memory).first(bytes)));
    batches.add(*world.all(), 0, byte_view(std::span(memory).subspan(40, 40)));
    EXPECT_THROW(batches.wait_all(), MismatchError);
  });
}

TEST(BroadcastBatches, WaitForWhatIsInFlightWhenTheyGo) {
  launch(2, [](World& world) {
    std::vector<std::byte> large(1 << 20, std::byte(world.rank()));
    {
      BroadcastBatches batches({.batch_bytes = 0});
      batches.add(*world.all(), 1, bytes_view(large));
    }
    EXPECT_EQ(large, std::vector<std::byte>(1 << 20, std::byte(1)));
  });
}

}  // namespace
}  // namespace spolia
