// Device mesh: the ranks of a job, or some of them, arranged in a grid.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/tensor/shape.h"

namespace spolia {

/// A grid of distinct ranks in row-major order, whose dims may have names. An immutable value; copies are
/// cheap (they share) and may be used by any thread. A 0-d mesh holds one rank.
class DeviceMesh {
 public:
  /// The ranks 0, 1, ... in a grid of `shape`.
  explicit DeviceMesh(Dims shape, std::vector<std::string> dim_names = {});

  /// Any distinct ranks >= 0, listed in row-major order. InvalidArgumentError where a size is not positive,
  /// the ranks do not fill the shape, a rank occurs twice, or there are names (no names is fine) that are
  /// empty, unprintable, double, or not one a dim; or there are more than 2^20 ranks.
  DeviceMesh(Dims shape, std::vector<std::string> dim_names, std::vector<int64_t> ranks);

  size_t ndim() const { return grid_->shape.size(); }
  const Dims& shape() const { return grid_->shape; }
  std::span<const std::string> dim_names() const { return grid_->dim_names; }
  std::span<const int64_t> ranks() const { return grid_->ranks; }

  /// Where `rank` stands in the grid; nothing where it is outside the mesh.
  std::optional<Dims> coordinates_of(int64_t rank) const;

  /// The dim of that name; InvalidArgumentError where there is none.
  size_t dim_named(std::string_view name) const;

  /// The ranks that differ from `rank` in `dim` alone, itself among them, by rising coordinate. Empty where
  /// `rank` is outside the mesh.
  std::vector<int64_t> ranks_along(size_t dim, int64_t rank) const;

  /// The part of the mesh that `rank` reaches along `dims` (distinct), with those dims in the order given.
  /// Nothing where `rank` is outside the mesh.
  std::optional<DeviceMesh> sub_mesh(std::span<const size_t> dims, int64_t rank) const;
  /// The same by names.
  std::optional<DeviceMesh> sub_mesh(std::span<const std::string> dim_names, int64_t rank) const;

  /// "2x2 (dp, tp)"; " on [0, 1, 6, 7]" follows where the ranks are not 0, 1, ... A name of more than
  /// letters, digits, _, - and . stands in quotes. The 0-d mesh is "0-d". parse_mesh() (layout_text.h) reads
  /// it.
  std::string text() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
    return a.grid_ == b.grid_ || *a.grid_ == *b.grid_;
  }

 private:
  struct Grid {
    Dims shape;
    std::vector<std::string> dim_names;
    std::vector<int64_t> ranks;
    std::vector<uint32_t> by_rank;  // positions in `ranks`, by rising rank
    bool operator==(const Grid&) const = default;
  };
  std::shared_ptr<const Grid> grid_;
};

}  // namespace spolia
