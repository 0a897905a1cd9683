#include "spolia/layout/layout.h"

#include <map>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

constexpr int64_t kOutside = 1000;  // a rank that no mesh here has

// ---- An independent truth: placements applied to an array that holds every element's number. ----

using Indices = std::vector<int64_t>;

/// A dense row-major array, each element the number it has in the global tensor.
struct Array {
  Dims shape;
  Indices data;
};

Array numbered(const Dims& shape) {
  Array array{shape, Indices(numel(shape))};
  std::iota(array.data.begin(), array.data.end(), 0);
  return array;
}

/// numpy's take(array, indices, axis).
Array take(const Array& array, size_t axis, const Indices& indices) {
  Array taken{array.shape, {}};
  taken.shape[axis] = std::ssize(indices);
  int64_t outer = 1, inner = 1;
  for (size_t d = 0; d < axis; ++d) outer *= array.shape[d];
  for (size_t d = axis + 1; d < array.shape.size(); ++d) inner *= array.shape[d];
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t index : indices) {
      for (int64_t i = 0; i < inner; ++i) {
        taken.data.push_back(array.data[(o * array.shape[axis] + index) * inner + i]);
      }
    }
  }
  return taken;
}

Indices iota(int64_t count) {
  Indices indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

/// torch.chunk(indices, parts), with empty ones at the end. Deals them out one by one.
std::vector<Indices> chunk(const Indices& indices, int64_t parts, size_t chunk_size) {
  std::vector<Indices> chunks(1);
  for (int64_t index : indices) {
    if (chunks.back().size() == chunk_size) chunks.emplace_back();
    chunks.back().push_back(index);
  }
  chunks.resize(parts);
  return chunks;
}
std::vector<Indices> chunk(const Indices& indices, int64_t parts) {
  return chunk(indices, parts, (indices.size() + parts - 1) / parts);
}

/// numpy's array_split.
std::vector<Indices> array_split(const Indices& indices, int64_t parts) {
  std::vector<Indices> pieces(parts);
  int64_t size = std::ssize(indices), at = 0;
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t n = size / parts + (p < size % parts); n > 0; --n) pieces[p].push_back(indices[at++]);
  }
  return pieces;
}

class Simulator {
 public:
  explicit Simulator(const Dims& shape) : array_(numbered(shape)) {}

  const Array& array() const { return array_; }
  size_t flattened() const { return flattened_; }

  /// The elements that a ragged shard over `count` leading dims would share out.
  int64_t leading(size_t count) const {
    int64_t elements = 1;
    for (size_t axis = 0; axis <= axis_of(count - 1); ++axis) elements *= array_.shape[axis];
    return elements;
  }

  void apply(const Placement& placement, int64_t parts, int64_t part) {
    if (auto* shard = std::get_if<Shard>(&placement)) {
      size_t axis = axis_of(shard->dim);
      Indices all = iota(array_.shape[axis]);
      array_ = take(array_, axis,
                    (shard->split == Split::kCeil ? chunk(all, parts) : array_split(all, parts))[part]);
    } else if (auto* strided = std::get_if<StridedShard>(&placement)) {
      size_t axis = axis_of(strided->dim);
      std::vector<Indices> chunks = chunk(iota(array_.shape[axis]), strided->split_factor);
      Indices mine;
      for (const Indices& whole_chunk : chunks) {
        size_t basis = (strided->split == StridedSplit::kAligned ? chunks[0] : whole_chunk).size();
        Indices piece = chunk(whole_chunk, parts, (basis + parts - 1) / parts)[part];
        mine.insert(mine.end(), piece.begin(), piece.end());
      }
      array_ = take(array_, axis, mine);
    } else if (auto* ragged = std::get_if<RaggedShard>(&placement)) {
      reshape(ragged->dims.size());
      Indices all = iota(array_.shape[0]), mine;
      int64_t sum = std::accumulate(ragged->units.begin(), ragged->units.end(), int64_t{0}), at = 0;
      for (int64_t p = 0; p <= part; ++p) {
        int64_t count = std::ssize(all) * ragged->units[p] / sum;
        mine.assign(all.begin() + at, all.begin() + at + count);
        at += count;
      }
      array_ = take(array_, 0, mine);
    }
  }

 private:
  size_t axis_of(size_t dim) const { return dim == 0 || flattened_ == 0 ? dim : dim - (flattened_ - 1); }

  void reshape(size_t count) {
    if (count < flattened_) count = flattened_;
    int64_t rows = leading(count);
    Dims shape = {rows};
    for (size_t axis = axis_of(count - 1) + 1; axis < array_.shape.size(); ++axis) {
      shape.push_back(array_.shape[axis]);
    }
    array_.shape = shape;
    flattened_ = count;
  }

  Array array_;
  size_t flattened_ = 0;
};

// ---- Comparing a layout with it ----

/// The global number at each place of the local buffer, from the boxes; -1 where they leave a place unset.
/// Fails where two boxes name one place.
Indices buffer_of(const RankShard& shard, const Dims& shape) {
  Indices buffer(numel(shard.local_shape), -1);
  Dims global_strides = row_major_strides(shape);
  for (const LocalBox& box : shard.boxes) {
    RC_ASSERT(!box.global.empty());
    RC_ASSERT(fits(box.global.offsets, box.global.sizes, shape));
    for (int64_t n = 0; n < box.global.numel(); ++n) {
      int64_t global = 0, local = box.local_offset, rest = n;
      for (size_t d = shape.size(); d-- > 0; rest /= box.global.sizes[d]) {
        int64_t i = rest % box.global.sizes[d];
        global += (box.global.offsets[d] + i) * global_strides[d];
        local += i * box.local_strides[d];
      }
      RC_ASSERT(local >= 0 && local < std::ssize(buffer));
      RC_ASSERT(buffer[local] == -1);
      buffer[local] = global;
    }
  }
  return buffer;
}

struct Case {
  Layout layout;
  Dims shape;
};

DeviceMesh random_mesh() {
  Dims shape;
  for (int64_t d = pick(1, 4); d > 0; --d) shape.push_back(pick(1, 5));
  Indices ranks = iota(numel(shape));
  int64_t step = pick(1, 4), turn = pick(0, 4);
  std::ranges::rotate(ranks, ranks.begin() + turn % std::ssize(ranks));
  for (int64_t& rank : ranks) rank *= step;
  return DeviceMesh(shape, {}, ranks);
}

/// Units for `parts` ranks whose sum divides `total`.
Indices random_units(int64_t total, int64_t parts) {
  Indices divisors;
  for (int64_t n = 1; n <= std::max<int64_t>(total, 6); ++n) {
    if (total % n == 0) divisors.push_back(n);
  }
  Indices units(parts, 0);
  for (int64_t left = *rc::gen::elementOf(divisors); left > 0;) {
    int64_t some = pick(1, left + 1);
    units[pick(0, parts)] += some;
    left -= some;
  }
  return units;
}

/// A placement that may come next for ranks that hold what `ranks` says.
Placement random_placement(const std::vector<Simulator>& ranks, size_t ndim, int64_t parts) {
  size_t flattened = ranks[0].flattened();
  int64_t kind = pick(0, ndim == 0 ? 2 : 8);
  if (kind == 0) return Replicate{};
  if (kind == 1) return Partial{};
  if (kind >= 6) {
    size_t count = pick(1, ndim + 1);
    if (count > 1 && count < flattened) count = flattened;
    int64_t total = 0;
    for (const Simulator& rank : ranks) total = std::gcd(total, rank.leading(count));
    RaggedShard ragged{{}, random_units(total, parts)};
    for (size_t d = 0; d < count; ++d) ragged.dims.push_back(static_cast<int64_t>(d));
    return ragged;
  }
  int64_t dim = pick(0, static_cast<int64_t>(ndim));
  if (dim < static_cast<int64_t>(flattened)) dim = 0;
  if (pick(0, 2)) dim -= static_cast<int64_t>(ndim);
  if (kind <= 3) return Shard{dim, *rc::gen::element(Split::kCeil, Split::kBalanced)};
  return StridedShard{dim, pick(1, 6), *rc::gen::element(StridedSplit::kAligned, StridedSplit::kChunked)};
}

/// A layout, and what each rank of its mesh holds according to the simulator.
std::pair<Case, std::vector<Simulator>> random_case() {
  DeviceMesh mesh = random_mesh();
  Dims shape;
  for (int64_t d = pick(0, 10) == 0 ? 0 : pick(1, 4); d > 0; --d) {
    shape.push_back(pick(0, 13) == 0 ? 0 : pick(1, 9));
  }
  std::vector<Simulator> simulators(mesh.ranks().size(), Simulator(shape));
  std::vector<Placement> placements;
  for (size_t m = 0; m < mesh.ndim(); ++m) {
    int64_t parts = mesh.shape()[m];
    placements.push_back(random_placement(simulators, shape.size(), parts));
    for (size_t r = 0; r < simulators.size(); ++r) {
      int64_t part = (*mesh.coordinates_of(mesh.ranks()[r]))[m];
      simulators[r].apply(normalized(placements.back(), shape.size()), parts, part);
    }
  }
  return {Case{Layout(mesh, placements), shape}, simulators};
}

constexpr int kCases = 5;  // a property; each is checked a hundred times

RC_GTEST_PROP(Layout, EveryRankHoldsWhatTheSimulatorSays, ()) {
  for (int n = 0; n < kCases; ++n) {
    auto [c, simulators] = random_case();
    RC_LOG() << c.layout.text() << " of " << list_text(c.shape) << "\n";
    for (size_t r = 0; r < simulators.size(); ++r) {
      RankShard shard = c.layout.shard(c.shape, c.layout.mesh().ranks()[r]);
      RC_ASSERT(shard.local_shape == simulators[r].array().shape);
      RC_ASSERT(buffer_of(shard, c.shape) == simulators[r].array().data);
    }
    RankShard outside = c.layout.shard(c.shape, kOutside);
    RC_ASSERT(outside.local_shape == Dims{0});
    RC_ASSERT(outside.boxes.empty());
  }
}

RC_GTEST_PROP(Layout, RanksTogetherHoldEveryElementOnceAReplica, ()) {
  for (int n = 0; n < kCases; ++n) {
    Case c = random_case().first;
    RC_LOG() << c.layout.text() << " of " << list_text(c.shape) << "\n";
    int64_t copies = 1;
    for (size_t m = 0; m < c.layout.placements().size(); ++m) {
      const Placement& placement = c.layout.placements()[m];
      if (is_replicate(placement) || is_partial(placement)) copies *= c.layout.mesh().shape()[m];
    }
    Indices counts(numel(c.shape), 0);
    for (int64_t rank : c.layout.mesh().ranks()) {
      for (int64_t global : buffer_of(c.layout.shard(c.shape, rank), c.shape)) ++counts[global];
    }
    RC_ASSERT(std::ranges::all_of(counts, [&](int64_t count) { return count == copies; }));
  }
}

RC_GTEST_PROP(Layout, ReplicasHoldTheSame, ()) {
  Case c = random_case().first;
  std::map<int64_t, Indices> groups;
  for (int64_t rank : c.layout.mesh().ranks()) groups[*c.layout.shard_id(rank)].push_back(rank);
  int64_t next = 0;
  for (const auto& [id, ranks] : groups) {
    RC_ASSERT(id == next++);  // ids are dense
    RankShard first = c.layout.shard(c.shape, ranks[0]);
    for (int64_t rank : ranks) {
      RankShard shard = c.layout.shard(c.shape, rank);
      RC_ASSERT(shard.boxes == first.boxes && shard.local_shape == first.local_shape);
      RC_ASSERT(c.layout.replicas(rank) == ranks);
    }
  }
  RC_ASSERT(!c.layout.shard_id(kOutside));
  RC_ASSERT(c.layout.replicas(kOutside).empty());
}

// ---- Facts ----

std::vector<Dims> local_shapes(const Layout& layout, const Dims& shape) {
  std::vector<Dims> shapes;
  for (int64_t rank : layout.mesh().ranks()) shapes.push_back(layout.shard(shape, rank).local_shape);
  return shapes;
}

/// The indices of a 1-D tensor of `size` that `rank` holds, in local order.
Indices indices_of(const Layout& layout, int64_t size, int64_t rank) {
  Indices indices;
  for (const LocalBox& box : layout.shard(Dims{size}, rank).boxes) {
    EXPECT_EQ(box.local_offset, std::ssize(indices));
    for (int64_t i = 0; i < box.global.sizes[0]; ++i) indices.push_back(box.global.offsets[0] + i);
  }
  return indices;
}

TEST(Layout, CeilAndBalancedSplits) {
  DeviceMesh three({3}), four({4});
  EXPECT_EQ(local_shapes(Layout(three, {Shard{0}}), {7}), (std::vector<Dims>{{3}, {3}, {1}}));
  EXPECT_EQ(local_shapes(Layout(three, {Shard{0, Split::kBalanced}}), {7}),
            (std::vector<Dims>{{3}, {2}, {2}}));
  EXPECT_EQ(local_shapes(Layout(four, {Shard{0}}), {6}), (std::vector<Dims>{{2}, {2}, {2}, {0}}));
  EXPECT_EQ(local_shapes(Layout(four, {Shard{0}}), {5, 3}),
            (std::vector<Dims>{{2, 3}, {2, 3}, {1, 3}, {0, 3}}));
  EXPECT_EQ(local_shapes(Layout(four, {Shard{0}}), {2}), (std::vector<Dims>{{1}, {1}, {0}, {0}}));
}

TEST(Layout, StridedShards) {
  DeviceMesh two({2});
  Layout aligned(two, {StridedShard{0, 2}});
  EXPECT_EQ(indices_of(aligned, 5, 0), (Indices{0, 1, 3, 4}));
  EXPECT_EQ(indices_of(aligned, 5, 1), (Indices{2}));
  Layout chunked(two, {StridedShard{0, 2, StridedSplit::kChunked}});
  EXPECT_EQ(indices_of(chunked, 5, 0), (Indices{0, 1, 3}));
  EXPECT_EQ(indices_of(chunked, 5, 1), (Indices{2, 4}));
  for (const Layout& layout : {aligned, chunked}) {
    EXPECT_EQ(indices_of(layout, 8, 0), (Indices{0, 1, 4, 5}));
    EXPECT_EQ(indices_of(layout, 8, 1), (Indices{2, 3, 6, 7}));
  }
}

TEST(Layout, FullyShardedAfterTensorParallel) {
  // 8 rows: tensor parallelism halves them, then each half is sharded over dp.
  Layout layout(DeviceMesh({2, 2}, {"dp", "tp"}), {StridedShard{0, 2}, Shard{0}});
  EXPECT_EQ(layout.text(), "[strided(0, 2), shard(0)] over 2x2 (dp, tp)");
  EXPECT_EQ(indices_of(layout, 8, 0), (Indices{0, 1}));
  EXPECT_EQ(indices_of(layout, 8, 1), (Indices{4, 5}));
  EXPECT_EQ(indices_of(layout, 8, 2), (Indices{2, 3}));
  EXPECT_EQ(indices_of(layout, 8, 3), (Indices{6, 7}));
  // The default order cuts left to right.
  Layout plain(DeviceMesh({2, 2}), {Shard{0}, Shard{0}});
  EXPECT_EQ(indices_of(plain, 8, 1), (Indices{2, 3}));
  EXPECT_EQ(indices_of(plain, 8, 2), (Indices{4, 5}));
}

TEST(Layout, PlainShardsAreOneBox) {
  Layout layout(DeviceMesh({2, 2}), {Shard{0}, Shard{1}});
  RankShard shard = layout.shard(Dims{4, 6}, 3);
  ASSERT_EQ(shard.boxes.size(), 1u);
  EXPECT_EQ(shard.boxes[0], (LocalBox{{{2, 3}, {2, 3}}, 0, {3, 1}}));
  // Strided shards whose pieces meet are merged.
  EXPECT_EQ(Layout(DeviceMesh({1}), {StridedShard{0, 4}}).shard(Dims{8}, 0).boxes.size(), 1u);
}

TEST(Layout, RaggedShards) {
  // 5 * 3 * 6 = 90 elements in 15 units of 6, each with 7 trailing elements.
  Layout layout(DeviceMesh({4}), {RaggedShard{{0, 1, 2}, {3, 7, 4, 1}}});
  EXPECT_EQ(local_shapes(layout, {5, 3, 6, 7}), (std::vector<Dims>{{18, 7}, {42, 7}, {24, 7}, {6, 7}}));
  RankShard second = layout.shard(Dims{5, 3, 6, 7}, 1);
  ASSERT_EQ(second.boxes.size(), 2u);
  EXPECT_EQ(second.boxes[0], (LocalBox{{{1, 0, 0, 0}, {2, 3, 6, 7}}, 0, {126, 42, 7, 1}}));
  EXPECT_EQ(second.boxes[1], (LocalBox{{{3, 0, 0, 0}, {1, 1, 6, 7}}, 252, {126, 42, 7, 1}}));
  EXPECT_EQ(local_shapes(Layout(DeviceMesh({3}), {RaggedShard{{0}, {0, 1, 0}}}), {3, 2}),
            (std::vector<Dims>{{0, 2}, {3, 2}, {0, 2}}));
}

TEST(Layout, ZeroDimensional) {
  Layout layout(DeviceMesh({2}), {Replicate{}});
  RankShard shard = layout.shard(Dims{}, 1);
  EXPECT_EQ(shard.local_shape, Dims{});
  ASSERT_EQ(shard.boxes.size(), 1u);
  EXPECT_EQ(shard.boxes[0], LocalBox{});
  EXPECT_THROW(Layout(DeviceMesh({2}), {Shard{0}}).shard(Dims{}, 0), InvalidArgumentError);
}

TEST(Layout, PartialHoldsTheWholeBox) {
  Layout layout(DeviceMesh({2, 2}), {Partial{}, Shard{0}});
  EXPECT_TRUE(layout.is_partial());
  EXPECT_EQ(layout.shard(Dims{4}, 0).boxes, layout.shard(Dims{4}, 2).boxes);
  EXPECT_NE(layout.shard_id(0), layout.shard_id(2));  // operands are not replicas
  EXPECT_FALSE(Layout(DeviceMesh({2}), {Shard{0}}).is_partial());
}

TEST(Layout, RefusesWhatMakesNoSense) {
  DeviceMesh two({2}), grid({2, 2});
  EXPECT_THROW(Layout(two, {}), InvalidArgumentError);
  EXPECT_THROW(Layout(two, {RaggedShard{{0}, {1, 1, 1}}}), InvalidArgumentError);
  EXPECT_THROW(Layout(two, {Shard{2}}).shard(Dims{4, 4}, 0), InvalidArgumentError);
  EXPECT_THROW(Layout(two, {Shard{2}}).shard(Dims{4, 4}, kOutside), InvalidArgumentError);
  EXPECT_THROW(Layout(two, {RaggedShard{{0}, {2, 1}}}).shard(Dims{4}, 0), InvalidArgumentError);
  RaggedShard both{{0, 1}, {1, 1}};
  EXPECT_THROW(Layout(grid, {both, Shard{1}}).shard(Dims{4, 4}, 0), InvalidArgumentError);
  RaggedShard all{{0, 1, 2}, {1, 1}};
  EXPECT_THROW(Layout(grid, {all, both}).shard(Dims{4, 4, 4}, 0), InvalidArgumentError);
}

TEST(Layout, HostileNumbersEndInErrors) {
  constexpr int64_t kHuge = int64_t{1} << 61;
  DeviceMesh two({2});
  EXPECT_THROW(Layout(two, {Replicate{}}).shard(Dims{kHuge, kHuge}, 0), CorruptError);
  EXPECT_THROW(Layout(two, {Replicate{}}).shard(Dims{-1}, 0), CorruptError);
  EXPECT_THROW(Layout(two, {StridedShard{0, kHuge}}).shard(Dims{kHuge}, 0), UnsupportedError);
  EXPECT_THROW(Layout(two, {StridedShard{0, kHuge}}).shard(Dims{kHuge}, 1), UnsupportedError);
  EXPECT_EQ(indices_of(Layout(two, {StridedShard{0, INT64_MAX}}), 3, 0), (Indices{0, 1, 2}));
  // Each dim alone is fine, their product is not.
  StridedShard first{0, 1000}, second{1, 1000};
  EXPECT_THROW(Layout(DeviceMesh({2, 2}), {first, second}).shard(Dims{4000, 4000}, 0), UnsupportedError);
  EXPECT_EQ(Layout(two, {Shard{0}}).shard(Dims{INT64_MAX}, 1).local_shape, Dims{INT64_MAX / 2});
  EXPECT_TRUE(Layout(two, {Replicate{}}).shard(Dims{kHuge, kHuge, 0}, 0).boxes.empty());
}

}  // namespace
}  // namespace spolia
