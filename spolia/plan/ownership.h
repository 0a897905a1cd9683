// Ownership: of what several ranks hold, who writes it, or reads it for all. Pure.
//
// A tensor is held in shards, each by one rank or by several that hold the same. The owners of the parts of
// all shards are chosen so that the busiest rank has little to do: within a twentieth, or a mebibyte, of what
// the mean rank or the worst placed set of ranks has to do whatever is done. The same arguments give the same
// answer on every rank.
//
// How. Bytes that the same ranks hold are poured over them like water, fewest holders first, until no rank
// can be relieved; that gives each rank its due of each set. What one rank alone holds is its own. Of the
// rest, shards go to the holders that are furthest below their due, largest first: whole where that keeps the
// balance, else cut. Small shards that the same ranks hold stay together, up to half a mebibyte, so that few
// ranks have to be asked for them. Only ranks that share larger ones know each other's loads: where small
// shards are all that others have in common with them, their holders take turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spolia/layout/layout.h"
#include "spolia/tensor/dtype.h"

namespace spolia {

/// A box of a tensor, and the ranks that hold it: rising, at least one.
struct HeldBox {
  Box box;
  std::vector<int64_t> ranks;
};

/// A tensor as ranks share it: by a layout, or in boxes that are listed (disjoint).
struct SharedTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  std::shared_ptr<const Layout> layout;  // where it is set, `boxes` is empty
  std::vector<HeldBox> boxes;
};

/// Which of the ranks that hold a shard own it.
enum class Replicas : uint8_t {
  kBalanced,    // one, so that the loads are even
  kLowestRank,  // one, the lowest
  kEachHost,    // one on every host, balanced among its ranks: each host has a whole copy of what it holds
  kEvery,       // each of them
  // but for kBalanced, shards are never cut
};

/// Whether a shard that several ranks hold may be cut between them.
enum class CutShards : uint8_t {
  kNever,
  kForBalance,  // where a whole one would leave the loads more than a twentieth or a mebibyte uneven
  kAlways,      // into a part for each holder, where parts have at least `least_part` bytes
};

struct OwnershipOptions {
  Replicas replicas = Replicas::kBalanced;
  CutShards cut = CutShards::kForBalance;
  int64_t least_part = int64_t{256} << 10;  // bytes; of a shard that is cut, no rank owns less
  std::vector<int64_t> hosts;               // for kEachHost: of each rank, a number of its host
};

/// A box of a shard and its owner. No box is empty, but the one of a tensor without elements, which is owned
/// once. Parts of one shard are disjoint, and together the shard; where several ranks own copies, each has
/// the whole. Of one shard a rank may own several: those of a strided one, or a run of rows that begins and
/// ends inside slices.
struct OwnedPart {
  size_t tensor = 0;
  size_t shard = 0;  // Layout::shard_id(), or the number of the listed box
  Box box;           // of the global tensor
  int64_t owner = 0;
};

/// Parts in the order of tensors, of each by shard, then by owner, then in the order of the local buffer.
///
/// `ranks`: of the job, 0 to ranks - 1. Without `rank`: all parts. With it: those of the shards that this
/// rank holds, whoever owns them (of copies for each host, those of its own host). The work for that grows
/// with the tensors times the ranks that share anything larger than small with this one (through any number
/// of others), not with all parts. Tensors should share their layouts: finding out that two are equal takes
/// as long as their meshes are large.
///
/// InvalidArgumentError for a rank that is not in the job, or a Partial layout; UnsupportedError for a dtype
/// finer than a byte in more than one piece; Layout::shard()'s where a layout does not suit a shape.
std::vector<OwnedPart> assign_owners(std::span<const SharedTensor> tensors, int64_t ranks,
                                     const OwnershipOptions& options = {},
                                     std::optional<int64_t> rank = std::nullopt);

/// Which of the ranks that hold the same (Layout::replicas()) `rank` is: its coordinates in the replicated
/// mesh dims, counted row-major. Nothing where it is outside the mesh.
std::optional<int64_t> replica_number(const Layout& layout, int64_t rank);

/// The bytes that each rank owns; `parts`: all of them.
std::vector<int64_t> owned_bytes(std::span<const SharedTensor> tensors, std::span<const OwnedPart> parts,
                                 int64_t ranks);

}  // namespace spolia
