#include "spolia/layout/device_mesh.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/text.h"
#include "spolia/layout/text_reader.h"

namespace spolia {
namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 20;

int64_t count_ranks(const Dims& shape) {
  std::optional<int64_t> count = 1;
  for (int64_t size : shape) {
    if (size <= 0) throw InvalidArgumentError("a device mesh of shape {} has no ranks", list_text(shape));
    if (count) count = try_mul(*count, size);
  }
  if (!count || *count > kMaxRanks) {
    throw InvalidArgumentError("a device mesh of shape {} has more than {} ranks", list_text(shape),
                               kMaxRanks);
  }
  return *count;
}

std::vector<int64_t> first_ranks(int64_t count) {
  std::vector<int64_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void check_names(const Dims& shape, std::span<const std::string> names) {
  if (names.empty()) return;
  if (names.size() != shape.size()) {
    throw InvalidArgumentError("a device mesh of shape {} needs {} dim names, not {}", list_text(shape),
                               shape.size(), names.size());
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty() || quote(names[i]) != '"' + names[i] + '"') {
      throw InvalidArgumentError("{} is no name for a dim of a device mesh", quote(names[i]));
    }
    if (std::ranges::count(names, names[i]) > 1) {
      throw InvalidArgumentError("two dims of a device mesh have the name {}", quote(names[i]));
    }
  }
}

/// The positions in `ranks` by rising rank.
std::vector<uint32_t> sorted_positions(std::span<const int64_t> ranks) {
  std::vector<uint32_t> positions(ranks.size());
  std::iota(positions.begin(), positions.end(), 0);
  auto rank_at = [&](uint32_t position) { return ranks[position]; };
  std::ranges::sort(positions, {}, rank_at);
  if (!positions.empty() && rank_at(positions.front()) < 0) {
    throw InvalidArgumentError("a device mesh has the negative rank {}", rank_at(positions.front()));
  }
  auto twice = std::ranges::adjacent_find(positions, {}, rank_at);
  if (twice != positions.end()) {
    throw InvalidArgumentError("rank {} is in a device mesh twice", rank_at(*twice));
  }
  return positions;
}

}  // namespace

DeviceMesh::DeviceMesh(Dims shape, std::vector<std::string> dim_names)
    : DeviceMesh(shape, std::move(dim_names), first_ranks(count_ranks(shape))) {}

DeviceMesh::DeviceMesh(Dims shape, std::vector<std::string> dim_names, std::vector<int64_t> ranks) {
  if (count_ranks(shape) != std::ssize(ranks)) {
    throw InvalidArgumentError("a device mesh of shape {} has {} ranks, not {}", list_text(shape),
                               count_ranks(shape), ranks.size());
  }
  check_names(shape, dim_names);
  std::vector<uint32_t> by_rank = sorted_positions(ranks);
  grid_ = std::make_shared<Grid>(
      Grid{std::move(shape), std::move(dim_names), std::move(ranks), std::move(by_rank)});
}

std::optional<Dims> DeviceMesh::coordinates_of(int64_t rank) const {
  auto rank_at = [&](uint32_t position) { return grid_->ranks[position]; };
  auto found = std::ranges::lower_bound(grid_->by_rank, rank, {}, rank_at);
  if (found == grid_->by_rank.end() || rank_at(*found) != rank) return std::nullopt;
  Dims coordinates(ndim());
  int64_t position = *found;
  for (size_t d = ndim(); d-- > 0; position /= shape()[d]) coordinates[d] = position % shape()[d];
  return coordinates;
}

size_t DeviceMesh::dim_named(std::string_view name) const {
  auto found = std::ranges::find(grid_->dim_names, name);
  if (found == grid_->dim_names.end()) {
    throw InvalidArgumentError("the device mesh {} has no dim {}", text(), quote(name));
  }
  return static_cast<size_t>(found - grid_->dim_names.begin());
}

std::vector<int64_t> DeviceMesh::ranks_along(size_t dim, int64_t rank) const {
  std::optional<DeviceMesh> line = sub_mesh(std::span<const size_t>(&dim, 1), rank);
  return line ? std::vector(line->ranks().begin(), line->ranks().end()) : std::vector<int64_t>();
}

std::optional<DeviceMesh> DeviceMesh::sub_mesh(std::span<const size_t> dims, int64_t rank) const {
  for (size_t dim : dims) {
    if (dim >= ndim() || std::ranges::count(dims, dim) > 1) {
      throw InvalidArgumentError("[{}] are not distinct dims of the device mesh {}", fmt::join(dims, ", "),
                                 text());
    }
  }
  std::optional<Dims> coordinates = coordinates_of(rank);
  if (!coordinates) return std::nullopt;

  // The position of the rank whose coordinates in `dims` are 0; from there the grid opens a dim at a time.
  Dims strides = row_major_strides(shape());
  int64_t first = 0;
  for (size_t d = 0; d < ndim(); ++d) {
    if (std::ranges::find(dims, d) == dims.end()) first += (*coordinates)[d] * strides[d];
  }
  Dims sub_shape;
  std::vector<std::string> sub_names;
  std::vector<int64_t> positions = {first};
  for (size_t dim : dims) {
    sub_shape.push_back(shape()[dim]);
    if (!dim_names().empty()) sub_names.push_back(dim_names()[dim]);
    std::vector<int64_t> opened;
    for (int64_t position : positions) {
      for (int64_t c = 0; c < shape()[dim]; ++c) opened.push_back(position + c * strides[dim]);
    }
    positions = std::move(opened);
  }
  for (int64_t& position : positions) position = ranks()[position];
  return DeviceMesh(std::move(sub_shape), std::move(sub_names), std::move(positions));
}

std::optional<DeviceMesh> DeviceMesh::sub_mesh(std::span<const std::string> names, int64_t rank) const {
  std::vector<size_t> dims;
  for (const std::string& name : names) dims.push_back(dim_named(name));
  return sub_mesh(dims, rank);
}

std::string DeviceMesh::text() const {
  std::string out = shape().empty() ? "0-d" : shape_text(shape());
  if (!dim_names().empty()) {
    std::vector<std::string> names;
    for (const std::string& name : dim_names()) names.push_back(name_text(name));
    out += fmt::format(" ({})", fmt::join(names, ", "));
  }
  if (!std::ranges::equal(ranks(), first_ranks(std::ssize(ranks())))) out += " on " + list_text(ranks());
  return out;
}

}  // namespace spolia
