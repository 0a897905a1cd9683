#include "spolia/plan/ownership.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/layout/coverage.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;

using Parts = std::vector<OwnedPart>;

auto key_of(const OwnedPart& p) { return std::tuple(p.tensor, p.shard, p.owner, p.box.offsets, p.box.sizes); }

bool same(const Parts& a, const Parts& b) { return std::ranges::equal(a, b, {}, key_of, key_of); }

// ---- Brute force ----

/// What is held: a box and its holders.
struct Held {
  size_t tensor, shard;
  std::vector<Box> boxes;
  std::vector<int64_t> ranks;
  int64_t bytes = 0;
};

/// All shards of all tensors, those without elements too.
std::vector<Held> held_shards(std::span<const SharedTensor> tensors) {
  std::vector<Held> all;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const SharedTensor& tensor = tensors[t];
    std::map<size_t, Held> shards;
    if (tensor.layout != nullptr) {
      for (int64_t rank : tensor.layout->mesh().ranks()) {
        const size_t id = static_cast<size_t>(*tensor.layout->shard_id(rank));
        Held& held = shards[id];
        held.ranks.push_back(rank);
        held.boxes.clear();
        for (const LocalBox& box : tensor.layout->shard(tensor.shape, rank).boxes)
          held.boxes.push_back(box.global);
      }
    }
    for (size_t b = 0; b < tensor.boxes.size(); ++b) {
      shards[b].boxes = {tensor.boxes[b].box};
      shards[b].ranks = tensor.boxes[b].ranks;
    }
    for (auto& [id, held] : shards) {
      held.tensor = t;
      held.shard = id;
      std::ranges::sort(held.ranks);
      for (const Box& box : held.boxes) held.bytes += byte_size(tensor.dtype, box.sizes);
      all.push_back(std::move(held));
    }
  }
  return all;
}

/// The least that the busiest rank can own, were bytes water: by the theorem of maximal flow and minimal cut
/// it is, over all sets of ranks, the most that only they hold, a rank.
int64_t least_busiest(std::span<const Held> held, int64_t ranks) {
  std::map<uint32_t, int64_t> bytes;  // by the holders' bits
  for (const Held& h : held) {
    uint32_t bits = 0;
    for (int64_t rank : h.ranks) bits |= 1u << rank;
    bytes[bits] += h.bytes;
  }
  int64_t most = 0;
  for (uint32_t set = 1; set < 1u << ranks; ++set) {
    int64_t sum = 0;
    for (const auto& [holders, b] : bytes) sum += (holders & ~set) == 0 ? b : 0;
    most = std::max(most, sum / std::popcount(set));
  }
  return most;
}

/// Whether the parts' boxes tile the shard's, checked box by box.
bool tile(const std::vector<Box>& shard, const std::vector<Box>& parts) {
  int64_t elements = 0;
  for (const Box& box : shard) elements += box.numel();
  for (size_t i = 0; i < parts.size(); ++i) {
    elements -= parts[i].numel();
    if (parts[i].empty()) return false;
    if (std::ranges::none_of(shard, [&](const Box& box) { return contains(box, parts[i]); })) return false;
    for (size_t j = 0; j < i; ++j) {
      if (!intersect(parts[i], parts[j]).empty()) return false;
    }
  }
  return elements == 0;
}

/// The parts of one shard, by owner.
std::map<int64_t, std::vector<Box>> owners_of(const Parts& parts, const Held& held) {
  std::map<int64_t, std::vector<Box>> owners;
  for (const OwnedPart& part : parts) {
    if (part.tensor == held.tensor && part.shard == held.shard) owners[part.owner].push_back(part.box);
  }
  return owners;
}

/// Whether every shard is owned once, by its holders, in parts that are not too small.
void check_owned_once(std::span<const SharedTensor> tensors, std::span<const Held> shards, const Parts& parts,
                      int64_t least_part) {
  RC_ASSERT(std::ranges::is_sorted(
      parts, {}, [](const OwnedPart& p) { return std::tuple(p.tensor, p.shard, p.owner); }));
  std::vector<int> empties(tensors.size());
  size_t seen = 0;
  for (const Held& held : shards) {
    const auto owners = owners_of(parts, held);
    std::vector<Box> boxes;
    for (const auto& [owner, owned] : owners) {
      RC_ASSERT(std::ranges::binary_search(held.ranks, owner));
      int64_t bytes = 0;
      for (const Box& box : owned) bytes += byte_size(tensors[held.tensor].dtype, box.sizes);
      RC_ASSERT(bytes >= std::min(least_part, held.bytes));
      boxes.insert(boxes.end(), owned.begin(), owned.end());
    }
    seen += boxes.size();
    if (numel(tensors[held.tensor].shape) == 0) {
      empties[held.tensor] += static_cast<int>(boxes.size());
      for (const Box& box : boxes) RC_ASSERT(box == whole(tensors[held.tensor].shape));
    } else {
      RC_ASSERT(tile(held.boxes, boxes));
    }
  }
  RC_ASSERT(seen == parts.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    const bool empty = numel(tensors[t].shape) == 0 && (tensors[t].layout || !tensors[t].boxes.empty());
    RC_ASSERT(empties[t] == (empty ? 1 : 0));
  }
}

void check_balanced(std::span<const SharedTensor> tensors, std::span<const Held> shards, const Parts& parts,
                    int64_t ranks) {
  const int64_t least = least_busiest(shards, ranks);
  int64_t total = 0;
  for (const Held& held : shards) total += held.bytes;
  const int64_t busiest = std::ranges::max(owned_bytes(tensors, parts, ranks));
  const int64_t due = std::max(least, total / ranks);
  RC_LOG() << "busiest " << busiest << ", least possible " << due << ", " << ranks << " ranks\n";
  RC_ASSERT(busiest <= std::max(due + due / 20, due + kMiB));
}

// ---- Random jobs ----

/// From small ones to 64 MiB and more, in odd numbers.
Dims random_shape() {
  const int64_t ndim = pick(0, 12) == 0 ? 0 : pick(1, 5);
  if (ndim == 0) return {};
  if (pick(0, 15) == 0) return Dims(static_cast<size_t>(ndim), 0);
  const int64_t bits = pick(4, 25);
  Dims shape(static_cast<size_t>(ndim), 1);
  for (int64_t b = 0; b < bits; ++b) shape[static_cast<size_t>(pick(0, ndim))] *= 2;
  for (int64_t& size : shape) size += pick(0, size);
  return shape;
}

Placement random_placement(int64_t ndim, int64_t parts) {
  const int64_t kind = pick(0, 9);
  if (kind < 4 || ndim == 0) return Replicate{};
  const int64_t dim = pick(0, ndim);
  if (kind < 7) return Shard{dim, pick(0, 2) ? Split::kCeil : Split::kBalanced};
  if (kind < 8) return StridedShard{dim, pick(1, 4)};
  RaggedShard ragged{{0}, std::vector<int64_t>(static_cast<size_t>(parts))};
  for (int64_t& units : ragged.units) units = pick(0, 3);
  return ragged;
}

/// A mesh of some of the job's ranks, all different; often a stage, or all in order.
DeviceMesh random_mesh(int64_t ranks) {
  std::vector<int64_t> order(static_cast<size_t>(ranks));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (pick(0, 4) == 0) {
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(pick(0, static_cast<int64_t>(i)))]);
    }
  } else if (pick(0, 3) == 0) {
    std::ranges::rotate(order, order.begin() + pick(0, ranks));
  }
  Dims shape;
  int64_t count = 1;
  for (int64_t d = pick(0, 4); d > 0; --d) {
    const int64_t size = pick(1, ranks / count + 1);
    shape.push_back(size);
    count *= size;
  }
  order.resize(static_cast<size_t>(count));
  return DeviceMesh(shape, {}, order);
}

std::shared_ptr<const Layout> random_layout(const DeviceMesh& mesh, const Dims& shape) {
  for (;;) {
    std::vector<Placement> placements;
    for (int64_t size : mesh.shape()) placements.push_back(random_placement(std::ssize(shape), size));
    auto layout = std::make_shared<const Layout>(mesh, placements);
    try {
      for (int64_t rank : mesh.ranks()) layout->shard(shape, rank);
      return layout;
    } catch (const Error&) {
    }
  }
}

std::vector<int64_t> random_ranks(int64_t ranks) {
  std::set<int64_t> some;
  for (int64_t n = pick(1, ranks + 1); n > 0; --n) some.insert(pick(0, ranks));
  return {some.begin(), some.end()};
}

SharedTensor tensor_of(Dims shape, std::shared_ptr<const Layout> layout, DType dtype = DType::kFloat32) {
  return {dtype, std::move(shape), std::move(layout), {}};
}

struct Job {
  int64_t ranks = 1;
  std::vector<SharedTensor> tensors;
};

/// `tangled`: whether each tensor may have ranks of its own, which need not lie in or apart from others'.
Job random_job(bool tangled) {
  Job job;
  job.ranks = pick(1, 11);
  const DeviceMesh common = random_mesh(job.ranks);
  for (int64_t n = pick(1, 40); n > 0; --n) {
    SharedTensor tensor;
    tensor.dtype = *rc::gen::element(DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kComplex128);
    tensor.shape = random_shape();
    const int64_t kind = pick(0, tangled ? 4 : 1);
    if (kind < 2) {
      tensor.layout = random_layout(kind == 0 ? common : random_mesh(job.ranks), tensor.shape);
    } else {
      for (const Box& box : tensor.shape.empty() || numel(tensor.shape) == 0
                                ? std::vector<Box>{whole(tensor.shape)}
                                : split(whole(tensor.shape), 0, ceil_div(tensor.shape[0], pick(1, 4)))) {
        tensor.boxes.push_back({box, random_ranks(job.ranks)});
      }
    }
    job.tensors.push_back(std::move(tensor));
  }
  return job;
}

RC_GTEST_PROP(Ownership, MeshesAreBalanced, ()) {
  for (int n = 0; n < 5; ++n) {
    const Job job = random_job(false);
    const std::vector<Held> shards = held_shards(job.tensors);
    const Parts parts = assign_owners(job.tensors, job.ranks);
    check_owned_once(job.tensors, shards, parts, 256 * kKiB);
    check_balanced(job.tensors, shards, parts, job.ranks);
  }
}

RC_GTEST_PROP(Ownership, AnySetsOfRanksAreBalanced, ()) {
  for (int n = 0; n < 5; ++n) {
    const Job job = random_job(true);
    const std::vector<Held> shards = held_shards(job.tensors);
    const Parts parts = assign_owners(job.tensors, job.ranks);
    check_owned_once(job.tensors, shards, parts, 256 * kKiB);
    check_balanced(job.tensors, shards, parts, job.ranks);
  }
}

RC_GTEST_PROP(Ownership, RingsOfPairsAreBalanced, ()) {
  Job job;
  job.ranks = pick(3, 13);
  for (int64_t r = 0; r < job.ranks; ++r) {
    for (int64_t n = pick(0, 4); n > 0; --n) {
      const Dims shape = {pick(1, 3000), 1024};
      std::vector<int64_t> pair = {r, (r + 1) % job.ranks};
      std::ranges::sort(pair);
      job.tensors.push_back({DType::kFloat32, shape, nullptr, {{whole(shape), pair}}});
    }
  }
  check_balanced(job.tensors, held_shards(job.tensors), assign_owners(job.tensors, job.ranks), job.ranks);
}

OwnershipOptions random_options(int64_t ranks) {
  OwnershipOptions options;
  options.replicas = static_cast<Replicas>(pick(0, 4));
  options.cut = static_cast<CutShards>(pick(0, 3));
  options.least_part = pick(0, 2) ? 256 * kKiB : pick(1, 100'000);
  for (int64_t r = 0; r < ranks; ++r) options.hosts.push_back(pick(0, 2) ? r / 2 : pick(0, 3));
  return options;
}

RC_GTEST_PROP(Ownership, OneRankFindsItsPartOfTheWhole, ()) {
  for (int n = 0; n < 5; ++n) {
    const Job job = random_job(pick(0, 2));
    const OwnershipOptions options = random_options(job.ranks);
    const Parts all = assign_owners(job.tensors, job.ranks, options);
    std::map<std::pair<size_t, size_t>, std::vector<int64_t>> holders;
    for (const Held& held : held_shards(job.tensors)) holders[{held.tensor, held.shard}] = held.ranks;
    for (int64_t rank = 0; rank < job.ranks; ++rank) {
      Parts due;
      for (const OwnedPart& part : all) {
        const auto host = [&](int64_t r) { return options.hosts[static_cast<size_t>(r)]; };
        const bool other_copy =
            options.replicas == Replicas::kEachHost && host(part.owner) != host(rank) && !part.box.empty();
        if (!other_copy && std::ranges::binary_search(holders[{part.tensor, part.shard}], rank))
          due.push_back(part);
      }
      RC_ASSERT(same(assign_owners(job.tensors, job.ranks, options, rank), due));
    }
  }
}

RC_GTEST_PROP(Ownership, OptionsSayWhoOwnsCopies, ()) {
  const Job job = random_job(pick(0, 2));
  OwnershipOptions options = random_options(job.ranks);
  const Parts parts = assign_owners(job.tensors, job.ranks, options);
  if (options.replicas == Replicas::kBalanced) {
    check_owned_once(job.tensors, held_shards(job.tensors), parts, options.least_part);
  }
  for (const Held& held : held_shards(job.tensors)) {
    if (held.bytes == 0) continue;
    const auto owners = owners_of(parts, held);
    if (options.replicas == Replicas::kBalanced) {
      if (options.cut == CutShards::kNever) RC_ASSERT(owners.size() == 1u);
      if (options.cut == CutShards::kAlways) {
        // A step of a share may be a quarter of the least part; elements have at most 16 bytes.
        const int64_t parts_due =
            held.bytes / (options.least_part + std::max<int64_t>(options.least_part / 4, 16));
        RC_ASSERT(std::ssize(owners) >= std::min(std::ssize(held.ranks), parts_due));
      }
      continue;
    }
    std::set<int64_t> hosts;
    for (const auto& [owner, boxes] : owners) {
      RC_ASSERT(tile(held.boxes, boxes));
      RC_ASSERT(std::ranges::binary_search(held.ranks, owner));
      hosts.insert(options.hosts[static_cast<size_t>(owner)]);
    }
    std::set<int64_t> hosts_due;
    for (int64_t rank : held.ranks) hosts_due.insert(options.hosts[static_cast<size_t>(rank)]);
    if (options.replicas == Replicas::kLowestRank)
      RC_ASSERT(owners.size() == 1u && owners.begin()->first == held.ranks[0]);
    if (options.replicas == Replicas::kEvery) RC_ASSERT(owners.size() == held.ranks.size());
    if (options.replicas == Replicas::kEachHost)
      RC_ASSERT(owners.size() == hosts.size() && hosts == hosts_due);
  }
}

// ---- Examples ----

std::shared_ptr<const Layout> layout_of(Dims mesh, std::vector<Placement> placements) {
  return std::make_shared<const Layout>(DeviceMesh(std::move(mesh)), std::move(placements));
}

TEST(Ownership, ALargeReplicatedTensorIsCutIntoRows) {
  const std::vector<SharedTensor> tensors = {tensor_of({4096, 4096}, layout_of({4}, {Replicate{}}))};
  const Parts parts = assign_owners(tensors, 4);
  ASSERT_EQ(parts.size(), 4u);
  for (int64_t r = 0; r < 4; ++r) {
    EXPECT_EQ(parts[static_cast<size_t>(r)].owner, r);
    EXPECT_EQ(parts[static_cast<size_t>(r)].box, (Box{{1024 * r, 0}, {1024, 4096}}));
  }
}

TEST(Ownership, FewLargeSlicesAreCutInside) {
  const std::vector<SharedTensor> tensors = {tensor_of({1, 2, 4096, 1024}, layout_of({4}, {Replicate{}}))};
  const Parts parts = assign_owners(tensors, 4);
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ(parts[2].box, (Box{{0, 1, 0, 0}, {1, 1, 2048, 1024}}));
  EXPECT_EQ(owned_bytes(tensors, parts, 4), std::vector<int64_t>(4, 8 * kMiB));
}

TEST(Ownership, SmallShardsStayTogether) {
  const auto replicated = layout_of({8}, {Replicate{}});
  std::vector<SharedTensor> tensors(100, tensor_of({}, replicated, DType::kInt64));
  Parts parts = assign_owners(tensors, 8);
  ASSERT_EQ(parts.size(), 100u);
  for (const OwnedPart& part : parts) EXPECT_EQ(part.owner, 0);
  // Sixteen runs of half a mebibyte.
  tensors.assign(256, tensor_of({8 << 10}, replicated));
  EXPECT_EQ(owned_bytes(tensors, assign_owners(tensors, 8), 8), std::vector<int64_t>(8, kMiB));
  parts = assign_owners(tensors, 8);
  size_t changes = 0;
  for (size_t i = 1; i < parts.size(); ++i) changes += parts[i].owner != parts[i - 1].owner ? 1 : 0;
  EXPECT_EQ(changes, 15u);
}

TEST(Ownership, WhatHasNoChoiceComesFirst) {
  const std::vector<SharedTensor> tensors = {
      tensor_of({1 << 20}, layout_of({2}, {Replicate{}})),
      tensor_of({2 << 20},
                std::make_shared<const Layout>(DeviceMesh({1}), std::vector<Placement>{Replicate{}}))};
  const Parts parts = assign_owners(tensors, 2);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].owner, 1);
  EXPECT_EQ(parts[1].owner, 0);
}

TEST(Ownership, ATensorTiedAcrossStagesGoesWhereThereIsRoom) {
  // Stages of two ranks, an embedding tied between the first and the last; stage 0 has more to do.
  std::vector<SharedTensor> tensors;
  for (int64_t stage = 0; stage < 4; ++stage) {
    for (int64_t n = stage == 0 ? 6 : 4; n > 0; --n) {
      tensors.push_back(
          tensor_of({2 << 20}, std::make_shared<const Layout>(DeviceMesh({2}, {}, {2 * stage, 2 * stage + 1}),
                                                              std::vector<Placement>{Replicate{}})));
    }
  }
  tensors.push_back(
      tensor_of({4, 1 << 20}, std::make_shared<const Layout>(DeviceMesh({4}, {}, {0, 1, 6, 7}),
                                                             std::vector<Placement>{Replicate{}})));
  const std::vector<int64_t> bytes = owned_bytes(tensors, assign_owners(tensors, 8), 8);
  // The first stage has 24 a rank already, the last 16.
  EXPECT_EQ(bytes, (std::vector<int64_t>{24 * kMiB, 24 * kMiB, 16 * kMiB, 16 * kMiB, 16 * kMiB, 16 * kMiB,
                                         24 * kMiB, 24 * kMiB}));
}

TEST(Ownership, FinerThanAByteOnlyWhole) {
  const auto replicated = layout_of({2}, {Replicate{}});
  std::vector<SharedTensor> tensors(3, tensor_of({16 << 20}, replicated, DType::kFloat4E2M1FN));
  EXPECT_EQ(assign_owners(tensors, 2).size(), 3u);
  tensors[1].layout = layout_of({2}, {Shard{0}});
  EXPECT_THROW(assign_owners(tensors, 2), UnsupportedError);
}

TEST(Ownership, RefusesWhatIsNotInTheJob) {
  std::vector<SharedTensor> tensors = {tensor_of({4}, layout_of({4}, {Replicate{}}))};
  EXPECT_THROW(assign_owners(tensors, 3), InvalidArgumentError);
  EXPECT_THROW(assign_owners(tensors, 4, {}, 4), InvalidArgumentError);
  EXPECT_THROW(assign_owners(tensors, 4, {}, -1), InvalidArgumentError);
  EXPECT_THROW(assign_owners(tensors, 0), InvalidArgumentError);
  OwnershipOptions options;
  options.replicas = Replicas::kEachHost;
  EXPECT_THROW(assign_owners(tensors, 4, options), InvalidArgumentError);
  tensors[0] = {DType::kFloat32, {4}, nullptr, {{whole(Dims{4}), {1, 4}}}};
  EXPECT_THROW(assign_owners(tensors, 4), InvalidArgumentError);
  tensors[0].boxes[0].ranks.clear();
  EXPECT_THROW(assign_owners(tensors, 4), InvalidArgumentError);
  tensors[0] = tensor_of({4}, layout_of({4}, {Partial{}}));
  EXPECT_THROW(assign_owners(tensors, 4), InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
