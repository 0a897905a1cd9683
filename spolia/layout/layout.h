// Layout: a device mesh and a placement for each of its dims, as a function from a rank to what it holds.
//
// Placements are applied from left to right: the first mesh dim cuts the global tensor, the second what the
// first left to the rank, and so on. Any combination is fine, several mesh dims on one tensor dim included.
//
// A ragged shard over dims 0..k-1 flattens them: from then on they are one local dim, 0, which later
// placements may cut again (shard(0), strided(0, f), ragged over 0 alone, or over 0..m-1 with m >= k, which
// takes more dims in). The dims 1..k-1 are gone, and a later placement that names one of them alone is an
// InvalidArgumentError; dims from k on keep their numbers. Where a ragged shard comes after others, it
// flattens and shares out what those left to the rank.
//
// How it is computed: for each tensor dim, the list of index runs that the rank holds, in local order; a
// placement picks from one list. A ragged shard instead picks from a list of runs of the row-major order over
// the flattened dims, and boxes_of_flat_range() turns each of them back into boxes at the end. The rank's
// boxes are the products of the runs of all dims.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/layout/box.h"
#include "spolia/layout/device_mesh.h"
#include "spolia/layout/placement.h"

namespace spolia {

/// A box of the global tensor and where it lies in a rank's buffer: its element at index i (counted from the
/// box's own corner) is element local_offset + sum of i[d] * local_strides[d].
struct LocalBox {
  Box global;
  int64_t local_offset = 0;
  Dims local_strides;
  friend bool operator==(const LocalBox&, const LocalBox&) = default;
};

/// What one rank holds.
struct RankShard {
  /// Of the row-major buffer. Dims that a ragged shard flattened are one dim here; a rank outside the mesh
  /// has [0].
  Dims local_shape;
  /// Disjoint, none of them empty; together they fill the buffer. In the order of the buffer's runs.
  std::vector<LocalBox> boxes;
};

/// An immutable value; may be used by any thread.
class Layout {
 public:
  /// InvalidArgumentError unless there is one placement a mesh dim, and a ragged shard has one unit a rank.
  Layout(DeviceMesh mesh, std::vector<Placement> placements);

  const DeviceMesh& mesh() const { return mesh_; }
  std::span<const Placement> placements() const { return placements_; }

  /// Whether some mesh dim is Partial: ranks hold operands of a reduction, not the tensor.
  bool is_partial() const;

  /// What `rank` holds of a tensor of `shape`; of a Partial mesh dim, the whole box. InvalidArgumentError
  /// where a placement does not suit the shape, CorruptError where the shape's elements overflow 64 bits,
  /// UnsupportedError where the rank would hold more than kMaxBoxes boxes.
  RankShard shard(std::span<const int64_t> shape, int64_t rank) const;
  static constexpr size_t kMaxBoxes = size_t{1} << 18;

  /// A number from 0 up that two ranks share exactly where they differ in replicated mesh dims alone, so
  /// that they hold the same data, whatever the shape. Nothing where `rank` is outside the mesh.
  std::optional<int64_t> shard_id(int64_t rank) const;

  /// The ranks with the shard id of `rank`, itself among them, in the mesh's order. Empty where `rank` is
  /// outside the mesh.
  std::vector<int64_t> replicas(int64_t rank) const;

  /// "[strided(0, 2), shard(0)] over 2x2 (dp, tp)".
  std::string text() const;

  friend bool operator==(const Layout&, const Layout&) = default;

 private:
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
};

}  // namespace spolia
