#include "tests/mpi_programs.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "spolia/comm/broadcast_batches.h"
#include "spolia/comm/exchange.h"
#include "spolia/comm/group_registry.h"
#include "spolia/comm/hierarchical_broadcast.h"
#include "spolia/comm/testing_tensors.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

/// Numbers that are the same on all ranks, as long as all draw as many.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  /// From 0 to below `end`.
  int64_t pick(int64_t end) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(end)); }

  Ranks some_ranks(int64_t world) {
    Ranks ranks;
    for (int64_t r = 0; r < world; ++r) {
      if (pick(3) > 0) ranks.push_back(r);
    }
    if (ranks.empty()) ranks.push_back(pick(world));
    return ranks;
  }

 private:
  std::mt19937 engine_;
};

bool contains(const Ranks& ranks, int64_t rank) { return std::ranges::binary_search(ranks, rank); }

std::vector<std::byte> filled(int64_t bytes, int64_t piece, int64_t rank) {
  std::vector<std::byte> memory(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < bytes; ++i)
    memory[static_cast<size_t>(i)] = static_cast<std::byte>(i * 7 + piece * 31 + rank * 101);
  return memory;
}

}  // namespace

void run_registry_program(World& world, uint32_t seed) {
  Random random(seed);
  const int64_t size = world.size(), own = world.rank();
  GroupRegistry registry(world);
  std::vector<Ranks> sets;
  for (int64_t s = 0; s < 3; ++s) sets.push_back(random.some_ranks(size));
  Ranks everybody(static_cast<size_t>(size));
  std::iota(everybody.begin(), everybody.end(), 0);
  std::set<Ranks> kept = {everybody};
  for (int round = 0; round < 4; ++round) {
    std::set<Ranks> needed_by_any;
    std::vector<Ranks> needed;
    for (const Ranks& ranks : sets) {
      for (int64_t r = 0; r < size; ++r) {
        if (random.pick(size + 1) > 0) continue;
        needed_by_any.insert(ranks);
        if (r == own) needed.push_back(ranks);
      }
    }
    // One that a caller has: everywhere, or on some of its ranks alone.
    const Ranks& handed = sets[static_cast<size_t>(random.pick(3))];
    const auto group = world.create(handed);
    std::vector<std::shared_ptr<Group>> handed_in;
    const bool by_all = random.pick(2) == 0;
    const int64_t missing = handed[static_cast<size_t>(random.pick(std::ssize(handed)))];
    if (by_all || own != missing) handed_in.push_back(group);

    ResolvedGroups groups = registry.resolve(needed, handed_in);
    require(groups.all().size() == needed_by_any.size(), "round {}: {} groups, not {}", round,
            groups.all().size(), needed_by_any.size());
    auto expected = needed_by_any.begin();
    for (const ResolvedGroup& resolved : groups.all()) {
      const Ranks& ranks = *expected++;
      require(resolved.ranks == ranks, "round {}: {}, not {}", round, list_text(resolved.ranks),
              list_text(ranks));
      const bool made = !kept.contains(ranks) && !(by_all && ranks == handed);
      require(resolved.made == made, "round {}: {} is{} made: {}", round, list_text(ranks),
              resolved.made ? "" : " not", resolved.why);
      require((resolved.group != nullptr) == contains(ranks, own), "round {}: {} is here", round,
              list_text(ranks));
      if (!resolved.group) continue;
      for (int64_t told : all_gather_number(*resolved.group, round)) require(told == round, "told {}", told);
    }
    if (random.pick(2) == 0) {
      for (const ResolvedGroup& resolved : groups.all()) {
        if (resolved.made) kept.insert(resolved.ranks);
      }
      groups.keep();
    }
    const std::vector<std::string> warnings = groups.release();
    require(warnings.empty(), "round {}: {}", round, warnings.empty() ? "" : warnings[0]);
    if (group) group->barrier().wait();
  }
}

void run_batches_program(World& world, uint32_t seed) {
  Random random(seed);
  std::vector<Ranks> sets;
  std::vector<std::shared_ptr<Group>> groups;
  for (int64_t g = 1 + random.pick(3); g > 0; --g)
    groups.push_back(world.create(sets.emplace_back(random.some_ranks(world.size()))));
  struct Piece {
    size_t group = 0;
    int root = 0;
    int64_t rows = 0, row = 0, pitch = 0;
    std::vector<std::byte> memory;
  };
  BroadcastBatches batches({.batch_bytes = random.pick(2) * 20000 + random.pick(3000),
                            .max_in_flight = 1 + random.pick(8),
                            .max_bytes_in_flight = random.pick(2) == 0 ? 10000 : 1 << 20});
  std::vector<Piece> pieces(static_cast<size_t>(random.pick(60)));
  for (size_t p = 0; p < pieces.size(); ++p) {
    Piece& piece = pieces[p];
    piece.group = static_cast<size_t>(random.pick(std::ssize(groups)));
    piece.root = static_cast<int>(random.pick(std::ssize(sets[piece.group])));
    piece.rows = 1 + random.pick(4);
    piece.row = random.pick(8) == 0 ? random.pick(40000) : random.pick(500);
    piece.pitch = piece.row + random.pick(2) * 3;
    piece.memory = filled(piece.rows * piece.pitch, static_cast<int64_t>(p), world.rank());
    const bool flushes = random.pick(20) == 0;
    if (groups[piece.group]) {
      View view = dense_view(piece.memory.data(), DType::kUInt8, Dims{piece.rows, piece.row});
      view.strides[0] = piece.pitch;
      batches.add(*groups[piece.group], piece.root, view);
    }
    if (flushes) batches.flush();
  }
  batches.wait_all();
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Piece& piece = pieces[p];
    if (!groups[piece.group]) continue;
    const int64_t bytes = piece.rows * piece.pitch, number = static_cast<int64_t>(p);
    const auto sent = filled(bytes, number, sets[piece.group][static_cast<size_t>(piece.root)]);
    std::vector<std::byte> expected = filled(bytes, number, world.rank());
    for (int64_t r = 0; r < piece.rows; ++r)
      std::copy_n(sent.begin() + r * piece.pitch, piece.row, expected.begin() + r * piece.pitch);
    require(piece.memory == expected, "piece {} differs", p);
  }
}

void run_hierarchical_program(World& world, uint32_t seed) {
  Random random(seed);
  std::vector<int64_t> sizes;
  int64_t points = 1;
  for (int64_t d = 1 + random.pick(3); d > 0; --d) {
    sizes.push_back(1 + random.pick(world.size() / points));
    points *= sizes.back();
  }
  // Rank r is at the point whose row-major index it is; ranks past the last are in no group.
  const auto stride_of = [&](size_t d) {
    int64_t stride = 1;
    for (size_t e = d + 1; e < sizes.size(); ++e) stride *= sizes[e];
    return stride;
  };
  std::vector<std::shared_ptr<Group>> held;
  std::vector<BroadcastDim> dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t stride = stride_of(d);
    BroadcastDim& dim = dims.emplace_back();
    for (int64_t first = 0; first < points; ++first) {
      if (first / stride % sizes[d] != 0) continue;
      Ranks line;
      for (int64_t i = 0; i < sizes[d]; ++i) line.push_back(first + i * stride);
      auto group = world.create(line);
      if (!group) continue;
      dim = {group.get(), line};
      held.push_back(std::move(group));
    }
  }
  struct Sent {
    int64_t source = 0;
    std::vector<int64_t> point;
    std::vector<std::byte> memory;
  };
  std::vector<Sent> buffers(static_cast<size_t>(random.pick(12)));
  for (size_t b = 0; b < buffers.size(); ++b) {
    buffers[b].source = random.pick(points);
    for (size_t d = 0; d < sizes.size(); ++d)
      buffers[b].point.push_back(buffers[b].source / stride_of(d) % sizes[d]);
    const int64_t bytes = random.pick(3) == 0 ? random.pick(200000) : random.pick(500);
    buffers[b].memory = filled(bytes, static_cast<int64_t>(b), world.rank());
  }
  const int64_t in_flight = 1 + random.pick(9);
  if (world.rank() >= points) return;
  HierarchicalBroadcast broadcasts(dims, in_flight);
  for (Sent& sent : buffers) broadcasts.add(byte_view(std::span(sent.memory)), sent.point);
  broadcasts.wait_all();
  for (size_t b = 0; b < buffers.size(); ++b) {
    const Sent& sent = buffers[b];
    require(sent.memory == filled(std::ssize(sent.memory), static_cast<int64_t>(b), sent.source),
            "buffer {} differs", b);
  }
}

}  // namespace spolia
