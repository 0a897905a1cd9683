#include "spolia/layout/layout.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "spolia/base/checked.h"

namespace spolia {
namespace {

/// Consecutive numbers [begin, begin + length) at the places [at, at + length) of a list.
struct Run {
  int64_t at, begin, length;
};

/// A list of distinct numbers >= 0 as runs: the indices of a dim that a rank holds, in local order. No run is
/// empty, and none continues the one before it.
class RunList {
 public:
  RunList() = default;
  explicit RunList(int64_t size) { append(0, size); }

  const std::vector<Run>& runs() const { return runs_; }
  int64_t size() const { return runs_.empty() ? 0 : runs_.back().at + runs_.back().length; }

  void append(int64_t begin, int64_t length) {
    if (length == 0) return;
    if (!runs_.empty() && runs_.back().begin + runs_.back().length == begin) {
      runs_.back().length += length;
      return;
    }
    if (runs_.size() == Layout::kMaxBoxes) {
      throw UnsupportedError("a rank's shard falls into more than {} pieces along a dim", Layout::kMaxBoxes);
    }
    runs_.push_back({size(), begin, length});
  }

  /// The runs at the places [begin, end), cut to them.
  std::vector<Run> within(int64_t begin, int64_t end) const {
    std::vector<Run> found;
    auto run = std::ranges::upper_bound(runs_, begin, {}, [](const Run& r) { return r.at + r.length; });
    for (; run != runs_.end() && run->at < end; ++run) {
      int64_t from = std::max(begin, run->at), to = std::min(end, run->at + run->length);
      found.push_back({from, run->begin + (from - run->at), to - from});
    }
    return found;
  }

  /// The numbers at the places that `places` lists.
  RunList at(const RunList& places) const {
    RunList picked;
    for (const Run& place : places.runs()) {
      for (const Run& run : within(place.begin, place.begin + place.length)) {
        picked.append(run.begin, run.length);
      }
    }
    return picked;
  }

 private:
  std::vector<Run> runs_;
};

/// The `part`-th of the parts of `length` that [0, size) is cut into, the last one shorter; empty beyond.
Run part_of(int64_t size, int64_t length, int64_t part) {
  int64_t begin = length == 0 || part > size / length ? size : part * length;
  return {0, begin, std::min(length, size - begin)};
}

// Which places of a list of `size` the `part`-th of `parts` ranks holds.

RunList places_of(const Shard& shard, int64_t size, int64_t parts, int64_t part) {
  RunList places;
  if (shard.split == Split::kCeil) {
    Run run = part_of(size, ceil_div(size, parts), part);
    places.append(run.begin, run.length);
  } else {
    int64_t least = size / parts, larger = size % parts;
    places.append(part * least + std::min(part, larger), least + (part < larger ? 1 : 0));
  }
  return places;
}

RunList places_of(const StridedShard& strided, int64_t size, int64_t parts, int64_t part) {
  RunList places;
  int64_t chunk = ceil_div(size, strided.split_factor);
  if (chunk > 0 && ceil_div(size, chunk) > static_cast<int64_t>(Layout::kMaxBoxes)) {
    throw UnsupportedError("{}: {} elements fall into more than {} chunks", placement_text(strided), size,
                           Layout::kMaxBoxes);
  }
  for (int64_t begin = 0; begin < size;) {
    int64_t length = std::min(chunk, size - begin);
    int64_t piece = ceil_div(strided.split == StridedSplit::kAligned ? chunk : length, parts);
    Run run = part_of(length, piece, part);
    places.append(begin + run.begin, run.length);
    begin += length;
  }
  return places;
}

RunList places_of(const RaggedShard& ragged, int64_t size, int64_t part) {
  auto unit = ragged.units.begin() + part;
  int64_t sum = std::reduce(ragged.units.begin(), ragged.units.end());
  if (size % sum != 0) {
    throw InvalidArgumentError("{}: {} elements cannot be shared out in {} equal units",
                               placement_text(ragged), size, sum);
  }
  RunList places;
  places.append(size / sum * std::reduce(ragged.units.begin(), unit), size / sum * *unit);
  return places;
}

/// What a rank holds while placements are applied to it one after the other.
class LocalTensor {
 public:
  explicit LocalTensor(std::span<const int64_t> shape) : flat_(1) {
    for (int64_t size : shape) dims_.emplace_back(size);
  }

  /// Keeps what the `part`-th of `parts` ranks holds. `placement` is normalized.
  void apply(const Placement& placement, int64_t parts, int64_t part) {
    if (auto* shard = std::get_if<Shard>(&placement)) {
      RunList& dim = local_dim(shard->dim, placement);
      dim = dim.at(places_of(*shard, dim.size(), parts, part));
    } else if (auto* strided = std::get_if<StridedShard>(&placement)) {
      RunList& dim = local_dim(strided->dim, placement);
      dim = dim.at(places_of(*strided, dim.size(), parts, part));
    } else if (auto* ragged = std::get_if<RaggedShard>(&placement)) {
      flatten(*ragged);
      flat_ = flat_.at(places_of(*ragged, flat_.size(), part));
    }
  }

  Dims shape() const {
    Dims sizes = sizes_before_flattening();
    if (flattened_ == 0) return sizes;
    Dims shape = {flat_.size()};
    for (size_t d = flattened_; d < sizes.size(); ++d) shape.push_back(sizes[d]);
    return shape;
  }

  std::vector<LocalBox> boxes() const {
    Dims sizes = sizes_before_flattening();
    std::vector<LocalBox> boxes;
    if (numel(shape()) == 0) return boxes;
    Dims strides = row_major_strides(sizes);
    std::span<const int64_t> leading(sizes.data(), flattened_);
    int64_t slice = numel(std::span<const int64_t>(sizes).subspan(flattened_));
    for (const Run& run : flat_.runs()) {
      // Element n of the flattened order stands n - run.begin after the start of this run's elements.
      int64_t shift = (run.at - run.begin) * slice;
      for (const Box& window : boxes_of_flat_range(leading, run.begin, run.begin + run.length)) {
        add_products(window, shift, strides, boxes);
      }
    }
    return boxes;
  }

 private:
  Dims sizes_before_flattening() const {
    Dims sizes;
    for (const RunList& dim : dims_) sizes.push_back(dim.size());
    return sizes;
  }

  RunList& local_dim(int64_t dim, const Placement& placement) {
    size_t d = static_cast<size_t>(dim);
    if (d >= flattened_) return dims_[d];
    if (d == 0) return flat_;
    throw InvalidArgumentError("{}: a ragged shard on an earlier mesh dim has flattened dims 0 to {}",
                               placement_text(placement), flattened_ - 1);
  }

  void flatten(const RaggedShard& ragged) {
    size_t count = ragged.dims.size();
    if (count > 1 && count < flattened_) {
      throw InvalidArgumentError("{}: a ragged shard on an earlier mesh dim has flattened dims 0 to {}",
                                 placement_text(ragged), flattened_ - 1);
    }
    if (count <= flattened_) return;
    int64_t inner =
        numel(std::span<const int64_t>(sizes_before_flattening()).first(count).subspan(flattened_));
    RunList wider;
    for (const Run& run : flat_.runs()) {
      wider.append(checked_mul(run.begin, inner), checked_mul(run.length, inner));
    }
    flat_ = std::move(wider);
    flattened_ = count;
  }

  /// Adds the products of the runs of all dims; of the flattened dims, those inside `window`.
  void add_products(const Box& window, int64_t shift, const Dims& strides,
                    std::vector<LocalBox>& boxes) const {
    std::vector<std::vector<Run>> runs;
    size_t count = 1;
    for (size_t d = 0; d < dims_.size(); ++d) {
      runs.push_back(d < flattened_ ? dims_[d].within(window.offsets[d], window.offsets[d] + window.sizes[d])
                                    : dims_[d].runs());
      count *= runs.back().size();  // of at most kMaxBoxes each
      if (count > Layout::kMaxBoxes - boxes.size()) {
        throw UnsupportedError("a rank's shard falls into more than {} boxes", Layout::kMaxBoxes);
      }
    }
    for (size_t n = 0; n < count; ++n) {
      LocalBox box{whole(strides), shift, strides};
      size_t rest = n;
      for (size_t d = dims_.size(); d-- > 0; rest /= runs[d].size()) {
        const Run& run = runs[d][rest % runs[d].size()];
        box.global.offsets[d] = run.begin;
        box.global.sizes[d] = run.length;
        box.local_offset += run.at * strides[d];
      }
      boxes.push_back(std::move(box));
    }
  }

  std::vector<RunList> dims_;  // of each tensor dim the indices held, as if nothing were flattened
  size_t flattened_ = 0;       // how many leading dims are one
  RunList flat_;               // of the row-major order over those dims' places, the ones held
};

}  // namespace

Layout::Layout(DeviceMesh mesh, std::vector<Placement> placements)
    : mesh_(std::move(mesh)), placements_(std::move(placements)) {
  if (placements_.size() != mesh_.ndim()) {
    throw InvalidArgumentError("the device mesh {} needs {} placements, not {}", mesh_.text(), mesh_.ndim(),
                               placements_.size());
  }
  for (size_t m = 0; m < placements_.size(); ++m) {
    auto* ragged = std::get_if<RaggedShard>(&placements_[m]);
    if (ragged != nullptr && std::ssize(ragged->units) != mesh_.shape()[m]) {
      throw InvalidArgumentError("{}: mesh dim {} needs {} units, one a rank", placement_text(*ragged), m,
                                 mesh_.shape()[m]);
    }
  }
}

bool Layout::is_partial() const { return std::ranges::any_of(placements_, spolia::is_partial); }

RankShard Layout::shard(std::span<const int64_t> shape, int64_t rank) const {
  numel(shape);  // fits in 64 bits
  std::vector<Placement> steps;
  for (const Placement& placement : placements_) steps.push_back(normalized(placement, shape.size()));
  std::optional<Dims> coordinates = mesh_.coordinates_of(rank);
  if (!coordinates) return {{0}, {}};
  LocalTensor local(shape);
  for (size_t m = 0; m < steps.size(); ++m) local.apply(steps[m], mesh_.shape()[m], (*coordinates)[m]);
  return {local.shape(), local.boxes()};
}

std::optional<int64_t> Layout::shard_id(int64_t rank) const {
  std::optional<Dims> coordinates = mesh_.coordinates_of(rank);
  if (!coordinates) return std::nullopt;
  int64_t id = 0;
  for (size_t m = 0; m < placements_.size(); ++m) {
    if (!is_replicate(placements_[m])) id = id * mesh_.shape()[m] + (*coordinates)[m];
  }
  return id;
}

std::vector<int64_t> Layout::replicas(int64_t rank) const {
  std::vector<size_t> replicated;
  for (size_t m = 0; m < placements_.size(); ++m) {
    if (is_replicate(placements_[m])) replicated.push_back(m);
  }
  std::optional<DeviceMesh> group = mesh_.sub_mesh(replicated, rank);
  return group ? std::vector(group->ranks().begin(), group->ranks().end()) : std::vector<int64_t>();
}

std::string Layout::text() const {
  std::vector<std::string> texts;
  for (const Placement& placement : placements_) texts.push_back(placement_text(placement));
  return fmt::format("[{}] over {}", fmt::join(texts, ", "), mesh_.text());
}

}  // namespace spolia
