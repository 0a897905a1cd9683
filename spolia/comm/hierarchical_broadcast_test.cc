#include "spolia/comm/hierarchical_broadcast.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/test_random.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using Coordinates = std::vector<int64_t>;

/// Ranks of the world at the points of a grid, row-major.
struct Grid {
  std::vector<int64_t> sizes;
  std::vector<int64_t> ranks;

  int64_t at(const Coordinates& point) const {
    int64_t index = 0;
    for (size_t d = 0; d < sizes.size(); ++d) index = index * sizes[d] + point[d];
    return ranks[static_cast<size_t>(index)];
  }
  Coordinates point_of(int64_t rank) const {
    int64_t index = std::ranges::find(ranks, rank) - ranks.begin();
    Coordinates point(sizes.size());
    for (size_t d = sizes.size(); d-- > 0; index /= sizes[d]) point[d] = index % sizes[d];
    return point;
  }
  std::vector<int64_t> line(int64_t rank, size_t d) const {
    std::vector<int64_t> line;
    Coordinates point = point_of(rank);
    for (point[d] = 0; point[d] < sizes[d]; ++point[d]) line.push_back(at(point));
    return line;
  }
};

Grid row_major(std::vector<int64_t> sizes) {
  Grid grid = {std::move(sizes), {}};
  grid.ranks.resize(static_cast<size_t>(
      std::accumulate(grid.sizes.begin(), grid.sizes.end(), int64_t{1}, std::multiplies<>())));
  std::iota(grid.ranks.begin(), grid.ranks.end(), 0);
  return grid;
}

/// One rank's groups of the grid, made by all.
struct Lines {
  std::vector<std::shared_ptr<Group>> held;
  std::vector<BroadcastDim> dims;
};

Lines make_lines(World& world, const Grid& grid) {
  Lines lines;
  for (size_t d = 0; d < grid.sizes.size(); ++d) {
    BroadcastDim& dim = lines.dims.emplace_back();
    dim.line = grid.line(world.rank(), d);
    for (int64_t rank : grid.ranks) {
      std::vector<int64_t> line = grid.line(rank, d);
      if (line.size() == 1 || line[0] != rank) continue;
      std::ranges::sort(line);
      if (auto group = world.create(line)) dim.group = lines.held.emplace_back(std::move(group)).get();
    }
  }
  return lines;
}

struct Sent {
  Coordinates source;
  size_t bytes = 0;
};

struct Program {
  Grid grid;
  std::vector<Sent> buffers;
  int64_t max_in_flight = 8;
};

std::vector<std::byte> contents(const Sent& sent, size_t number, int64_t rank) {
  return std::vector<std::byte>(sent.bytes, static_cast<std::byte>(number * 16 + static_cast<size_t>(rank)));
}

void run(const Program& program, World& world) {
  const Lines lines = make_lines(world, program.grid);
  HierarchicalBroadcast broadcasts(lines.dims, program.max_in_flight);
  std::vector<std::vector<std::byte>> memory;
  for (size_t b = 0; b < program.buffers.size(); ++b) {
    memory.push_back(contents(program.buffers[b], b, world.rank()));
  }
  for (size_t b = 0; b < memory.size(); ++b)
    broadcasts.add(byte_view(std::span(memory[b])), program.buffers[b].source);
  broadcasts.wait_all();
  for (size_t b = 0; b < memory.size(); ++b) {
    EXPECT_EQ(memory[b], contents(program.buffers[b], b, program.grid.at(program.buffers[b].source)));
  }
}

/// The broadcasts of a group in the order of a rank's log: those lines that begin with its ranks.
std::vector<std::string> of_group(const std::vector<std::string>& lines, const std::string& ranks) {
  std::vector<std::string> found;
  for (const std::string& line : lines) {
    if (line.starts_with(ranks + " broadcast")) found.push_back(line);
  }
  return found;
}

/// The same for the whole grid, from the words of the header.
std::vector<std::string> expected_of_line(const Program& program, std::vector<int64_t> line, size_t d) {
  const Grid& grid = program.grid;
  const Coordinates point = grid.point_of(line[0]);
  std::vector<std::string> expected;
  std::vector<int64_t> ranks = line;
  std::ranges::sort(ranks);
  for (const Sent& sent : program.buffers) {
    if (!std::equal(point.begin() + static_cast<std::ptrdiff_t>(d) + 1, point.end(),
                    sent.source.begin() + static_cast<std::ptrdiff_t>(d) + 1))
      continue;
    expected.push_back(fmt::format("{} broadcast of {} bytes (uint8) from rank {}", list_text(ranks),
                                   sent.bytes, line[static_cast<size_t>(sent.source[d])]));
  }
  return expected;
}

Program random_program() {
  Program program;
  std::vector<int64_t> sizes;
  int64_t left = pick(1, 9);
  for (int64_t dims = pick(0, 4); dims > 0; --dims) {
    sizes.push_back(pick(1, left + 1));
    left /= sizes.back();
  }
  program.grid = row_major(sizes);
  for (size_t r = program.grid.ranks.size(); r > 1; --r) {
    std::swap(program.grid.ranks[r - 1],
              program.grid.ranks[static_cast<size_t>(pick(0, static_cast<int64_t>(r)))]);
  }
  for (int64_t b = pick(0, 12); b > 0; --b) {
    Sent& sent = program.buffers.emplace_back();
    for (int64_t size : sizes) sent.source.push_back(pick(0, size));
    sent.bytes = static_cast<size_t>(pick(0, 4) == 0 ? pick(0, 200000) : pick(1, 500));
  }
  program.max_in_flight = pick(1, 10);
  return program;
}

void check_random_program(bool delayed) {
  const Program program = random_program();
  OperationLog log;
  Decorator decorate = logging(log);
  if (delayed) {
    const auto delay = delaying(std::chrono::microseconds(0), std::chrono::microseconds(400), pick(0, 1000));
    decorate = chain({logging(log), delay});
  }
  launch(static_cast<int>(program.grid.ranks.size()), [&](World& world) { run(program, world); },
         {.decorate = decorate});
  for (int64_t rank : program.grid.ranks) {
    std::vector<std::string> expected, met;
    for (size_t d = 0; d < program.grid.sizes.size(); ++d) {
      std::vector<int64_t> line = program.grid.line(rank, d), ranks = line;
      std::ranges::sort(ranks);
      if (line.size() == 1) continue;
      for (auto& text : expected_of_line(program, line, d)) expected.push_back(text);
      for (auto& text : of_group(log.lines(rank), list_text(ranks))) met.push_back(text);
    }
    RC_ASSERT(met == expected);
  }
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(HierarchicalBroadcast, ReachesAllInOneOrderAGroup, ()) { check_random_program(false); }
RC_GTEST_PROP(HierarchicalBroadcast, ReachesAllWhoeverIsLate, ()) { check_random_program(true); }

TEST(HierarchicalBroadcast, OfTheWholeGrid) {
  const Program program = {row_major({2, 2, 2}), {{{0, 0, 0}, 5000}, {{1, 0, 1}, 70000}, {{1, 1, 1}, 1}}};
  launch(8, [&](World& world) { run(program, world); });
}

// (0, 0) adds nothing before (0, 1) has received the second buffer along dim 0 and passes it on along dim 1.
TEST(HierarchicalBroadcast, ABufferThatIsLateHoldsNoOtherGroupBack) {
  const Grid grid = row_major({2, 2});
  const std::string passed_on = "[0, 1] broadcast of 200 bytes (uint8) from rank 1";
  OperationLog log;
  launch(4,
         [&](World& world) {
           const Lines lines = make_lines(world, grid);
           HierarchicalBroadcast broadcasts(lines.dims);
           std::vector<std::byte> first(100, std::byte(world.rank())), second(200, std::byte(world.rank()));
           if (world.rank() == 0) {
             const auto is_passed_on = [&] {
               return !of_group(log.lines(1), "[0, 1]").empty() &&
                      of_group(log.lines(1), "[0, 1]").back() == passed_on;
             };
             for (int tries = 0; tries < 30000 && !is_passed_on(); ++tries)
               std::this_thread::sleep_for(milliseconds(1));
             if (!is_passed_on()) throw TimeoutError("the second buffer waits for the first");
           }
           broadcasts.add(byte_view(std::span(first)), Coordinates{0, 0});
           broadcasts.add(byte_view(std::span(second)), Coordinates{1, 1});
           broadcasts.wait_all();
           EXPECT_EQ(first, std::vector<std::byte>(100, std::byte(0)));
           EXPECT_EQ(second, std::vector<std::byte>(200, std::byte(3)));
         },
         {.decorate = logging(log)});
}

TEST(HierarchicalBroadcast, WaitsLongForARankThatIsLate) {
  launch(4, [](World& world) {
    const Lines lines = make_lines(world, row_major({2, 2}));
    HierarchicalBroadcast broadcasts(lines.dims);
    std::vector<std::byte> memory(100, std::byte(world.rank()));
    if (world.rank() == 0) std::this_thread::sleep_for(milliseconds(300));  // longer than it polls
    broadcasts.add(byte_view(std::span(memory)), Coordinates{0, 0});
    broadcasts.wait_all();
    EXPECT_EQ(memory, std::vector<std::byte>(100, std::byte(0)));
  });
}

/// Which ranks throw where `decorate` makes the group [0, 4] of a 2x2x2 grid fail.
std::vector<bool> failed_ranks(const Decorator& decorate, milliseconds timeout) {
  const Grid grid = row_major({2, 2, 2});
  std::vector<char> failed(8);
  launch(
      8,
      [&](World& world) {
        const Lines lines = make_lines(world, grid);
        HierarchicalBroadcast broadcasts(lines.dims);
        std::vector<std::vector<std::byte>> memory(6, std::vector<std::byte>(100, std::byte(world.rank())));
        for (auto& buffer : memory) broadcasts.add(byte_view(std::span(buffer)), Coordinates{0, 0, 0});
        try {
          broadcasts.wait_all();
          for (auto& buffer : memory) EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte(0)));
        } catch (const Error&) {
          failed[static_cast<size_t>(world.rank())] = 1;
          EXPECT_THROW(broadcasts.wait_all(), Error);
          broadcasts.add(byte_view(std::span(memory[0])), Coordinates{0, 0, 0});  // to no avail
        }
        world.all()->set_timeout(std::chrono::minutes(5));
        world.all()->barrier().wait();  // nobody leaves while others look
      },
      {.timeout = timeout,
       .decorate = where([](const GroupBackend& b) { return list_text(b.ranks()) == "[0, 4]"; }, decorate)});
  return {failed.begin(), failed.end()};
}

TEST(HierarchicalBroadcast, AFailureReachesAllThatWouldWait) {
  const auto expect_failed = [](const std::vector<bool>& failed, std::initializer_list<size_t> ranks) {
    for (size_t rank : ranks) EXPECT_TRUE(failed[rank]) << "rank " << rank;
  };
  // What the source sends to the others of its first plane, [0, 1, 2, 3], may have landed.
  expect_failed(failed_ranks(on_rank(4, dying(0)), std::chrono::minutes(5)), {0, 4, 5, 6, 7});
  expect_failed(failed_ranks(on_rank(0, dying(3)), std::chrono::minutes(5)), {0, 4, 5, 6, 7});
  expect_failed(failed_ranks(on_rank(0, dropping(2)), milliseconds(300)), {0, 4, 5, 6, 7});
}

TEST(HierarchicalBroadcast, RefusesWhatIsNotAGrid) {
  launch(2, [](World& world) {
    Group* all = world.all().get();
    using Dims = std::vector<BroadcastDim>;
    EXPECT_THROW(HierarchicalBroadcast(Dims{{all, {0}}}, 0), InvalidArgumentError);
    EXPECT_THROW(HierarchicalBroadcast(Dims{{nullptr, {0, 1}}}), InvalidArgumentError);
    EXPECT_THROW(HierarchicalBroadcast(Dims{{all, {}}}), InvalidArgumentError);
    EXPECT_THROW(HierarchicalBroadcast(Dims{{all, {0, 2}}}), InvalidArgumentError);
    EXPECT_THROW(HierarchicalBroadcast(Dims{{all, {0, 1, 1}}}), InvalidArgumentError);

    HierarchicalBroadcast broadcasts(Dims{{all, {1, 0}}, {nullptr, {world.rank()}}});
    std::vector<std::byte> memory(3, std::byte(world.rank()));
    const View view = byte_view(std::span(memory));
    EXPECT_THROW(broadcasts.add(view, Coordinates{0}), InvalidArgumentError);
    EXPECT_THROW(broadcasts.add(view, Coordinates{0, 1}), InvalidArgumentError);
    EXPECT_THROW(broadcasts.add(view, Coordinates{-1, 0}), InvalidArgumentError);
    broadcasts.add(view, Coordinates{0, 0});
    broadcasts.wait_all();
    EXPECT_EQ(memory, std::vector<std::byte>(3, std::byte(1)));
  });
}

}  // namespace
}  // namespace spolia
