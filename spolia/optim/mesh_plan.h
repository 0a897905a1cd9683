// Who computes which parameter's step on a mesh, and in which order. Pure; the same on every rank.
//
// A parameter's mesh is seen as rows and columns. A row is the ranks that hold the tensor once, together:
// they differ in the mesh dims that shard it. A column is the ranks that hold the same shard: its replicas.
// Of each parameter one row is the owner. Its state lives there, and there alone is its step taken; the
// replicas are sent the result. What needs whole matrices is gathered within that row, each matrix to one
// rank.
//
// A parameter with so much work that one row would have visibly more than its share is owned by several rows:
// each has a part of every shard, along the shard's leading dim. That suits what is elementwise, and batches
// of matrices, as experts are: a matrix is then all in one row's parts. The parts of such a batch are as
// large as to fill up what other parameters left uneven, where all shards have as many indices.
//
// Where there are more replicas than a host has ranks, rows are put into replica groups by host. Each group
// has an owner of its own for each parameter, and no result crosses hosts.
//
// Owners are chosen by newton_schulz_work() of each matrix, experts and the parts of fused matrices one by
// one; what is elementwise counts its elements. The largest come first, each to where the
// busiest rank is least busy; loads are kept over all batches and meshes, and ties take turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "spolia/optim/leading_part.h"
#include "spolia/optim/matrix_units.h"

namespace spolia {

/// A parameter as all ranks of its mesh know it.
struct MeshTensor {
  std::string name;
  DType dtype = DType::kFloat32;   // of what replicas are sent
  DType update = DType::kFloat32;  // of what is gathered: float64 where the parameter is, else float32
  Dims shape;                      // of the whole
  std::shared_ptr<const Layout> layout;
  bool frozen = false;
  std::optional<MatrixRule> matrices;  // that need to be whole; nothing: each element by itself
  bool row_moments = false;            // there is NorMuon's state

  /// Whether that travels with the update: each rank of a row has all of it. Where matrices are whole on the
  /// ranks, it is cut as they are.
  bool moments_travel() const { return row_moments && !leaves_whole(*matrices, shape, *layout); }
};

struct MeshPlanOptions {
  /// What the update of a batch's shards takes on a rank; a larger tensor is a batch by itself. Positive.
  int64_t batch_bytes = int64_t{64} << 20;
  std::vector<int64_t> hosts;  // World::hosts(); none: all ranks are on one host
  /// How many groups the replicas of each parameter are split into. 0: one group where no more ranks are
  /// replicas than the largest host has, else one a host (or a set of hosts that rows lie on alike).
  int64_t replica_groups = 0;
};

/// The owner of a parameter in one replica group.
struct MeshOwner {
  std::vector<size_t> rows;    // mostly one; of several each has its part of all shards, in this order
  std::vector<int64_t> units;  // the rank that computes each of matrix_units()

  /// The number of a row's part; nothing where it is not among them.
  std::optional<size_t> part_of(size_t row) const;
};

struct MeshBatch {
  std::vector<size_t> tensors;  // those with the most work first
  int64_t bytes = 0;            // as MeshPlanOptions::batch_bytes counts
  bool exchanges = false;       // whether anything is gathered within rows
};

/// Parameters of one mesh and layout.
struct MeshGroup {
  Layout layout;  // with dims counted from the front
  std::vector<size_t> replicated_dims;
  std::vector<std::vector<int64_t>> rows;           // their ranks by place; by replica coordinates, row-major
  std::vector<std::vector<size_t>> replica_groups;  // rows
  std::vector<MeshBatch> batches;

  struct Position {
    size_t row = 0, place = 0, replica_group = 0;
  };
  /// Nothing where the rank is outside the mesh.
  std::optional<Position> position_of(int64_t rank) const;
  /// A row's coordinates in the replicated dims.
  Dims coordinates(size_t row) const;
};

struct MeshPlan {
  struct Assignment {
    size_t group = 0, batch = 0;
    LeadingCut cut;                 // of each shard, for the rows of an owner
    std::vector<MeshOwner> owners;  // by replica group
  };

  std::vector<MeshTensor> tensors;
  std::vector<MeshGroup> groups;                       // in the order in which they are stepped
  std::vector<std::optional<Assignment>> assignments;  // by tensor; frozen ones have none
  std::vector<int64_t> loads;                          // by rank: the work of what it owns

  /// The owner in the replica group of `rank`; nullptr where the tensor is frozen, or the rank outside its
  /// mesh.
  const MeshOwner* owner_for(size_t tensor, int64_t rank) const;
  /// What `rank` owns of its shard of the tensor; nothing where it is in no row that owns some.
  std::optional<LeadingPart> owned_part(size_t tensor, int64_t rank) const;
  bool has_state(size_t tensor, int64_t rank) const { return owned_part(tensor, rank).has_value(); }
  /// How the ranks that own the tensor share its state: the shards of its layout over the owning row. Where
  /// there are several replica groups, the first mesh dim counts them; where several rows own parts, the last
  /// one does. Precondition: it is not frozen.
  std::shared_ptr<const Layout> state_layout(size_t tensor) const;

  /// For people: groups with their rows and replica groups, batches, of each tensor the owning rows with
  /// their coordinates and the rank of each matrix, and every rank's load.
  std::string text() const;
  /// The tensors of which `rank` has state, and what it computes of them.
  std::string owned_text(int64_t rank) const;
  /// For programs: {"all": {tensor: {"dtype", "shape", "group", "batch", "owners": [{"rows", "coordinates",
  /// "matrices": ranks}]}}, "owned": {rank: [tensors]}, "groups": [{"layout", "rows": [{"coordinates",
  /// "ranks"}], "replica_groups", "batches": [{"bytes", "exchanges", "tensors"}]}], "loads": by rank}. Frozen
  /// tensors have no group, batch and owners.
  nlohmann::ordered_json json() const;
};

/// InvalidArgumentError, naming the tensor, where a layout is Partial or does not suit its shape, a matrix
/// rule does not fit, a name is there twice, or the replicas cannot be split into so many groups.
MeshPlan plan_mesh(std::vector<MeshTensor> tensors, const MeshPlanOptions& options = {});

/// The rows of each replica group. `count` as MeshPlanOptions::replica_groups: groups are unions of hosts
/// where there are hosts enough, else parts of them. InvalidArgumentError for more groups than rows.
std::vector<std::vector<size_t>> split_replicas(std::span<const std::vector<int64_t>> rows,
                                                std::span<const int64_t> hosts, int64_t count);

}  // namespace spolia
