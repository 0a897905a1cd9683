#include "spolia/plan/distribution.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

TensorEntry described(std::string name, const Dims& shape, DType dtype = DType::kFloat32) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = shape;
  return tensor;
}

Catalog catalog_of(std::vector<TensorEntry> tensors) {
  Catalog catalog;
  catalog.tensors = std::move(tensors);
  sort_entries(catalog);
  return catalog;
}

std::vector<int64_t> bytes_by_writer(const Catalog& catalog, size_t writers) {
  std::vector<int64_t> bytes(writers);
  for (const TensorEntry& tensor : catalog.tensors) {
    for (const Extent& extent : tensor.extents) bytes.at(extent.file) += extent.length;
  }
  return bytes;
}

// ---- Brute force ----

/// How often each element of a tensor is in a chunk.
std::vector<int> times_written(const TensorEntry& tensor) {
  std::vector<int> times(static_cast<size_t>(numel(tensor.shape)));
  const Dims strides = row_major_strides(tensor.shape);
  for (size_t c = 0; c < tensor.chunks(); ++c) {
    const Box box = tensor.boxes[c];
    for (int64_t n = 0; n < box.numel(); ++n) {
      int64_t at = 0, rest = n;
      for (size_t d = box.ndim(); d-- > 0; rest /= box.sizes[d]) {
        at += (box.offsets[d] + rest % box.sizes[d]) * strides[d];
      }
      ++times.at(static_cast<size_t>(at));
    }
  }
  return times;
}

/// The chunks that `rank` writes, in order.
std::vector<Box> written_by(const TensorEntry& tensor, int64_t rank) {
  std::vector<Box> boxes;
  for (size_t c = 0; c < tensor.chunks(); ++c) {
    if (tensor.extents[c].file == rank && !tensor.boxes[c].empty()) boxes.push_back(tensor.boxes[c]);
  }
  return boxes;
}

std::vector<Box> held_by(const TensorEntry& tensor, int64_t rank) {
  std::vector<Box> boxes;
  for (const LocalBox& box : tensor.layout->shard(tensor.shape, rank).boxes) boxes.push_back(box.global);
  return boxes;
}

void check_tensor(const TensorEntry& tensor, size_t writers) {
  RC_ASSERT(tensor.layout != nullptr);
  RC_ASSERT(std::ranges::all_of(times_written(tensor), [](int times) { return times == 1; }));
  RC_ASSERT(tensor.boxes.size() == tensor.chunks());
  for (size_t c = 0; c < tensor.chunks(); ++c) {
    RC_ASSERT(tensor.extents[c].offset == 0);
    RC_ASSERT(tensor.extents[c].length == byte_size(tensor.dtype, tensor.boxes[c].sizes));
    RC_ASSERT(tensor.extents[c].file < writers);
    if (numel(tensor.shape) > 0) RC_ASSERT(!tensor.boxes[c].empty());
  }
  if (numel(tensor.shape) == 0) {
    RC_ASSERT(tensor.chunks() == 1u);
    RC_ASSERT(tensor.boxes[0] == whole(tensor.shape));
    RC_ASSERT(tensor.layout->mesh().coordinates_of(tensor.extents[0].file).has_value());
  }
  RC_ASSERT(std::ranges::is_sorted(tensor.extents, {}, &Extent::file));
  for (int64_t rank = 0; rank < static_cast<int64_t>(writers); ++rank) {
    const std::vector<int64_t> replicas = tensor.layout->replicas(rank);
    const std::vector<Box> written = written_by(tensor, rank), held = held_by(tensor, rank);
    for (const Box& box : written) {
      RC_ASSERT(std::ranges::any_of(held, [&](const Box& of) { return contains(of, box); }));
    }
    if (!tensor.replica) continue;
    const bool writes = !replicas.empty() && replicas.at(*tensor.replica) == rank;
    RC_ASSERT(written == (writes ? held : std::vector<Box>()));
  }
  // Where there is one copy, boxes need not be listed.
  if (tensor.layout->replicas(tensor.layout->mesh().ranks()[0]).size() == 1 && numel(tensor.shape) > 0) {
    RC_ASSERT(tensor.replica == 0u);
  }
}

// ---- Random rules and tensors ----

DeviceMesh random_mesh() {
  Dims shape;
  for (int64_t d = pick(0, 4); d > 0; --d) shape.push_back(pick(1, 4));
  std::vector<int64_t> ranks(static_cast<size_t>(numel(shape)));
  const int64_t first = pick(0, 4), step = pick(1, 3);
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = first + static_cast<int64_t>(r) * step;
  std::ranges::rotate(ranks, ranks.begin() + pick(0, std::ssize(ranks)));
  return DeviceMesh(shape, {}, ranks);
}

Placement random_placement(int64_t parts) {
  const int64_t kind = pick(0, 8);
  if (kind <= 2) return Replicate{};
  if (kind <= 4) return Shard{pick(-1, 2), pick(0, 2) ? Split::kCeil : Split::kBalanced};
  if (kind <= 6) {
    return StridedShard{pick(-1, 2), pick(1, 5),
                        pick(0, 2) ? StridedSplit::kAligned : StridedSplit::kChunked};
  }
  RaggedShard ragged{{0}, std::vector<int64_t>(static_cast<size_t>(parts))};
  if (pick(0, 2)) ragged.dims.push_back(1);
  for (int64_t units = pick(1, 5); units > 0; --units) ++ragged.units[static_cast<size_t>(pick(0, parts))];
  return ragged;
}

LayoutRule random_rule(std::string pattern, const DeviceMesh& common) {
  LayoutRule rule;
  rule.pattern = std::move(pattern);
  if (pick(0, 3) == 0) rule.mesh = random_mesh();
  for (int64_t parts : rule.mesh ? rule.mesh->shape() : common.shape()) {
    rule.placements.push_back(random_placement(parts));
  }
  return rule;
}

Dims random_shape() {
  Dims shape;
  for (int64_t d = pick(0, 8) == 0 ? 0 : pick(1, 4); d > 0; --d) {
    shape.push_back(pick(0, 10) == 0 ? 0 : pick(0, 2) ? 12 : pick(1, 14));
  }
  return shape;
}

/// Whether the rules' layout of a tensor has a shard for each of its ranks.
bool suits(const LayoutRules& rules, const TensorEntry& tensor) {
  try {
    const auto layout = rules.layout_of(tensor.name, tensor.shape);
    for (int64_t rank : layout->mesh().ranks()) layout->shard(tensor.shape, rank);
    return true;
  } catch (const InvalidArgumentError&) {
    return false;
  }
}

LayoutRules random_rules() {
  const DeviceMesh mesh = random_mesh();
  return LayoutRules(mesh, {random_rule("*", mesh), random_rule("b*", mesh), random_rule("*1", mesh)});
}

TensorEntry random_tensor(std::string name) {
  return described(std::move(name), random_shape(),
                   *rc::gen::element(DType::kFloat32, DType::kInt8, DType::kComplex128));
}

RC_GTEST_PROP(Distribution, EveryElementIsWrittenOnceByARankThatHoldsIt, ()) {
  for (int n = 0; n < 20; ++n) {
    const LayoutRules rules = random_rules();
    std::vector<TensorEntry> tensors;
    for (const char* name : {"a1", "a2", "b1", "b2"}) {
      tensors.push_back(random_tensor(name));
      for (int tries = 0; tries < 20 && !suits(rules, tensors.back()); ++tries) {
        tensors.back() = random_tensor(name);
      }
      if (!suits(rules, tensors.back())) tensors.back().shape = {};
    }
    Catalog catalog = catalog_of(std::move(tensors));
    const size_t writers = distribute(catalog, rules);
    RC_ASSERT(writers == static_cast<size_t>(rules.ranks()));
    for (const TensorEntry& tensor : catalog.tensors) {
      RC_LOG() << tensor.layout->text() << " of " << list_text(tensor.shape) << "\n";
      check_tensor(tensor, writers);
    }
  }
}

RC_GTEST_PROP(Distribution, WhatDoesNotSuitIsRefused, ()) {
  const LayoutRules rules = random_rules();
  Catalog catalog = catalog_of({random_tensor("a1"), random_tensor("b2")});
  if (suits(rules, catalog.tensors[0]) && suits(rules, catalog.tensors[1])) {
    distribute(catalog, rules);
  } else {
    RC_ASSERT_THROWS_AS(distribute(catalog, rules), InvalidArgumentError);
  }
}

RC_GTEST_PROP(Distribution, ReplicatedTensorsAreBalanced, ()) {
  std::vector<TensorEntry> tensors;
  int64_t total = 0;
  for (int64_t n = pick(1, 40); n > 0; --n) {
    tensors.push_back(described("t" + std::to_string(n), {pick(0, 4000), pick(1, 4000)}));
    total += tensors.back().bytes();
  }
  Catalog catalog = catalog_of(std::move(tensors));
  const Dims shape = {pick(1, 5), pick(1, 5)};
  const size_t writers = distribute(catalog, LayoutRules(DeviceMesh(shape), {}));
  const int64_t busiest = std::ranges::max(bytes_by_writer(catalog, writers));
  const int64_t mean = total / static_cast<int64_t>(writers);
  RC_ASSERT(writers == static_cast<size_t>(numel(shape)));
  RC_ASSERT(busiest <= std::max(mean + mean / 20, mean + (int64_t{1} << 20)));
}

// ---- Examples ----

TEST(Distribution, ShardsOfEqualTensorsGoToDifferentReplicas) {
  constexpr int64_t kLarge = 1 << 18;
  Catalog catalog = catalog_of({described("a", {kLarge}), described("b", {kLarge}), described("c", {2})});
  const LayoutRules rules = parse_layout_rules("mesh = 2x2 (dp, tp); *: [shard(0)] over (tp)");
  EXPECT_EQ(distribute(catalog, rules), 4u);
  EXPECT_EQ(catalog.tensors[0].extents, (std::vector<Extent>{{0, 0, 2 * kLarge}, {1, 0, 2 * kLarge}}));
  EXPECT_EQ(catalog.tensors[0].replica, 0u);
  EXPECT_EQ(catalog.tensors[1].extents, (std::vector<Extent>{{2, 0, 2 * kLarge}, {3, 0, 2 * kLarge}}));
  EXPECT_EQ(catalog.tensors[1].replica, 1u);
  EXPECT_EQ(catalog.tensors[1].boxes[1], (Box{{kLarge / 2}, {kLarge / 2}}));
  EXPECT_EQ(catalog.tensors[2].replica, 0u);
  EXPECT_EQ(catalog.tensors[0].layout, catalog.tensors[1].layout);
}

TEST(Distribution, ALargeReplicatedTensorIsCutBetweenItsRanks) {
  Catalog catalog = catalog_of({described("a", {4, 1 << 20}), described("step", {})});
  distribute(catalog, parse_layout_rules("mesh = 4"));
  const TensorEntry& tensor = catalog.tensors[0];
  EXPECT_EQ(tensor.replica, std::nullopt);
  ASSERT_EQ(tensor.chunks(), 4u);
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(tensor.extents[r], (Extent{r, 0, 4 << 20}));
    EXPECT_EQ(tensor.boxes[r], (Box{{r, 0}, {1, 1 << 20}}));
  }
  EXPECT_EQ(catalog.tensors[1].replica, 0u);
}

TEST(Distribution, WhatHasNoChoiceIsPlacedFirst) {
  Catalog catalog = catalog_of({described("fixed", {1 << 15}), described("free", {1 << 16})});
  distribute(catalog, parse_layout_rules("mesh = 2; fixed: [replicate] over 1"));
  EXPECT_EQ(catalog.tensors[0].extents[0].file, 0u);
  EXPECT_EQ(catalog.tensors[1].extents[0].file, 1u);
}

TEST(Distribution, ChunksFollowTheRanksNotTheMesh) {
  Catalog catalog = catalog_of({described("a", {6})});
  distribute(catalog, parse_layout_rules("mesh = 3 on [7, 0, 4]; a: [shard(0)]"));
  EXPECT_EQ(catalog.tensors[0].extents, (std::vector<Extent>{{0, 0, 8}, {4, 0, 8}, {7, 0, 8}}));
  EXPECT_EQ(catalog.tensors[0].boxes[0], (Box{{2}, {2}}));
  EXPECT_EQ(catalog.tensors[0].boxes[2], (Box{{0}, {2}}));
}

TEST(Distribution, ElementsFinerThanAByteStayTogether) {
  const LayoutRules sharded = parse_layout_rules("mesh = 2; *: [shard(0)]");
  Catalog fine = catalog_of({described("a", {3, 4}, DType::kFloat4E2M1FN)});
  EXPECT_EQ(distribute(fine, parse_layout_rules("mesh = 2")), 2u);
  EXPECT_EQ(fine.tensors[0].extents, (std::vector<Extent>{{0, 0, 6}}));
  EXPECT_THROW(distribute(fine, sharded), UnsupportedError);
  // One rank gets all of it, the other nothing.
  Catalog row = catalog_of({described("a", {1, 4}, DType::kFloat4E2M1FN)});
  EXPECT_EQ(distribute(row, sharded), 2u);
  Catalog empty = catalog_of({described("a", {0, 4}, DType::kFloat4E2M1FN)});
  EXPECT_EQ(distribute(empty, sharded), 2u);
  EXPECT_EQ(empty.tensors[0].extents, (std::vector<Extent>{{0, 0, 0}}));
}

TEST(Distribution, MessagesNameRuleTensorAndShape) {
  Catalog catalog = catalog_of({described("a", {7})});
  try {
    distribute(catalog, parse_layout_rules("mesh = 2\n*: [ragged(0, [1, 1])]"));
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(
        error.what(),
        "line 2, \"*: [ragged(0, [1, 1])]\": tensor \"a\" of shape 7: ragged([0], [1, 1]): 7 elements "
        "cannot be shared out in 2 equal units");
  }
  EXPECT_THROW(distribute(catalog, parse_layout_rules("mesh = 2; b: [shard(0)]")), InvalidArgumentError);
}

TEST(Distribution, ManyTensorsOnManyRanksSlow) {
  std::vector<TensorEntry> tensors;
  for (int64_t t = 0; t < 2000; ++t) {
    tensors.push_back(described("t" + std::to_string(t), {4096 + t % 16, 1000 + t % 3}, DType::kBFloat16));
  }
  Catalog catalog = catalog_of(std::move(tensors));
  const size_t writers = distribute(
      catalog, parse_layout_rules("mesh = 8x16x8 (pp, dp, tp); *: [replicate, strided(0, 8), shard(0)]"));
  std::vector<int64_t> bytes = bytes_by_writer(catalog, writers);
  EXPECT_EQ(writers, 1024u);
  const int64_t mean = std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) / 1024;
  EXPECT_LE(std::ranges::max(bytes), mean + mean / 20);
}

// ---- Packing ----

TEST(Pack, FillsOneWriterAfterTheOther) {
  Catalog catalog = catalog_of({described("a", {10}, DType::kInt8), described("b", {6}, DType::kInt8),
                                described("c", {5}, DType::kInt8), described("d", {}, DType::kInt8),
                                described("e", {0, 7}, DType::kInt8)});
  EXPECT_EQ(pack(catalog, std::vector<size_t>{1, 0, 2, 3, 4}, 7), 3u);
  std::vector<uint32_t> files;
  for (const TensorEntry& tensor : catalog.tensors) files.push_back(tensor.extents.at(0).file);
  EXPECT_EQ(files, (std::vector<uint32_t>{1, 0, 2, 2, 2}));
  EXPECT_EQ(catalog.tensors[0].extents[0], (Extent{1, 0, 10}));
  EXPECT_EQ(catalog.tensors[3].boxes[0], Box{});
  EXPECT_EQ(catalog.tensors[4].boxes[0], whole(Dims{0, 7}));
  EXPECT_EQ(catalog.tensors[4].layout, nullptr);
}

RC_GTEST_PROP(Pack, WritersAreFilledInOrder, ()) {
  std::vector<TensorEntry> tensors;
  for (int64_t n = pick(0, 30); n > 0; --n) {
    tensors.push_back(described(std::to_string(n), {pick(0, 50)}, DType::kInt8));
  }
  Catalog catalog = catalog_of(std::move(tensors));
  std::vector<size_t> order(catalog.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::rotate(order, order.begin() + pick(0, std::ssize(order) + 1));
  const int64_t most = pick(1, 100);
  const size_t writers = pack(catalog, order, most);

  const std::vector<int64_t> bytes = bytes_by_writer(catalog, writers);
  std::vector<int64_t> count(writers);
  uint32_t last = 0;
  for (size_t t : order) {
    const Extent& extent = catalog.tensors[t].extents.at(0);
    RC_ASSERT(extent.file == last || extent.file == last + 1);                   // consecutive
    if (extent.file == last + 1) RC_ASSERT(bytes[last] + extent.length > most);  // the one before was full
    last = extent.file;
    ++count[extent.file];
  }
  for (size_t w = 0; w < writers; ++w) RC_ASSERT(count[w] > 0);
  for (const TensorEntry& tensor : catalog.tensors) {
    const size_t w = tensor.extents[0].file;
    if (bytes[w] > most) RC_ASSERT(tensor.bytes() == bytes[w] || tensor.bytes() == 0);
  }
}

}  // namespace
}  // namespace spolia
