#include "spolia/layout/coverage.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

/// Boxes by the row-major order of their corners, equal corners by number.
struct SortedBoxes {
  std::vector<uint64_t> corners;  // the flat index of a box's first element
  std::vector<uint32_t> numbers;
};

/// Least significant digit first; stable.
void radix_sort(SortedBoxes& boxes, uint64_t largest) {
  constexpr int kDigitBits = 11;
  constexpr uint64_t kDigits = uint64_t{1} << kDigitBits;
  SortedBoxes other{std::vector<uint64_t>(boxes.corners.size()), std::vector<uint32_t>(boxes.numbers.size())};
  for (int shift = 0; shift < static_cast<int>(std::bit_width(largest)); shift += kDigitBits) {
    std::array<size_t, kDigits> next{};
    for (uint64_t corner : boxes.corners) ++next[corner >> shift & (kDigits - 1)];
    size_t sum = 0;
    for (size_t& start : next) sum += std::exchange(start, sum);
    for (size_t i = 0; i < boxes.corners.size(); ++i) {
      size_t to = next[boxes.corners[i] >> shift & (kDigits - 1)]++;
      other.corners[to] = boxes.corners[i];
      other.numbers[to] = boxes.numbers[i];
    }
    std::swap(boxes, other);
  }
}

/// Takes boxes that equal the first one at their corner out of `sorted`. (Boxes that share a corner and
/// differ overlap; the check finds them.)
std::vector<ReplicaBox> take_out_replicas(const BoxList& boxes, SortedBoxes& sorted) {
  std::vector<ReplicaBox> replicas;
  size_t kept = 0;
  uint32_t first = 0;  // at the corner of the box before
  for (size_t i = 0; i < sorted.numbers.size(); ++i) {
    uint32_t box = sorted.numbers[i];
    if (i == 0 || sorted.corners[i] != sorted.corners[i - 1]) {
      first = box;
    } else if (std::ranges::equal(boxes.sizes(first), boxes.sizes(box))) {
      replicas.push_back({box, first});
      continue;
    }
    sorted.numbers[kept++] = box;
  }
  sorted.numbers.resize(kept);
  std::ranges::sort(replicas, {}, &ReplicaBox::box);
  return replicas;
}

/// Parts boxes until each is alone in its region; see the header.
class Parting {
 public:
  /// `order` holds non-empty boxes that fit in `shape`, by rising offset in dim 0.
  Parting(const BoxList& boxes, std::vector<uint32_t> order, std::span<const int64_t> shape,
          int64_t work_limit)
      : boxes_(boxes), order_(std::move(order)), work_left_(work_limit) {
    tasks_.push_back({whole(shape), 0, order_.size(), 0, 0, order_.size()});
  }

  std::optional<CoverageFault> run() {
    while (!tasks_.empty() && !fault_) {
      Task task = std::move(tasks_.back());
      tasks_.pop_back();
      order_.resize(task.stored);
      if (task.uncut < boxes_.ndim()) {
        part(task);
      } else {
        halve(task);
      }
    }
    return fault_;
  }

 private:
  /// To show: the boxes order_[begin, end), each of which meets `region`, tile it. They are sorted by where
  /// they begin in `dim`; the `uncut` dims before `dim` (cyclically) are known to part nothing.
  struct Task {
    Box region;
    size_t begin, end;
    size_t dim, uncut;
    size_t stored;  // the size of order_ when the task was made: what lies beyond is others', done by now
  };

  // A box's range in a dim, inside the region.
  int64_t begin_of(uint32_t box, size_t dim, const Box& region) const {
    return std::max(boxes_.offsets(box)[dim], region.offsets[dim]);
  }
  int64_t end_of(uint32_t box, size_t dim, const Box& region) const {
    return std::min(boxes_.offsets(box)[dim] + boxes_.sizes(box)[dim],
                    region.offsets[dim] + region.sizes[dim]);
  }

  void spend(size_t work) {
    work_left_ -= static_cast<int64_t>(work);
    if (work_left_ < 0) {
      throw UnsupportedError("the {} boxes are too irregular to check: that would take too much work",
                             boxes_.size());
    }
  }

  /// Cuts off groups along task.dim. Single boxes are settled here; the first larger group becomes a task,
  /// and so does what is left after it.
  void part(Task& task) {
    size_t dim = task.dim;
    Box& region = task.region;
    const int64_t region_end = region.offsets[dim] + region.sizes[dim];
    while (task.begin < task.end) {
      int64_t begin = begin_of(order_[task.begin], dim, region);
      if (region.offsets[dim] < begin) return report_gap(region, dim, begin);
      int64_t end = end_of(order_[task.begin], dim, region);
      size_t next = task.begin + 1;
      while (next < task.end && begin_of(order_[next], dim, region) < end) {
        end = std::max(end, end_of(order_[next++], dim, region));
      }
      size_t count = next - task.begin;
      spend(count);
      if (count > 1) {
        if (count == task.end - task.begin && end == region_end) return turn(task, task.uncut + 1);
        Task group = task;
        group.region.sizes[dim] = end - begin;
        group.end = next;
        cut_off(task, next, end);
        tasks_.push_back(std::move(task));
        return turn(group, 1);
      }
      if (!settle(order_[task.begin], dim, end, region)) return;
      cut_off(task, next, end);
    }
    if (region.sizes[dim] > 0) report_gap(region, dim, region_end);
  }

  void cut_off(Task& task, size_t next, int64_t end) {
    task.region.sizes[task.dim] -= end - task.region.offsets[task.dim];
    task.region.offsets[task.dim] = end;
    task.begin = next;
    task.uncut = 0;
  }

  /// Goes on with the next dim.
  void turn(Task& task, size_t uncut) {
    task.uncut = uncut;
    task.dim = task.dim + 1 == boxes_.ndim() ? 0 : task.dim + 1;
    auto first = order_.begin() + static_cast<std::ptrdiff_t>(task.begin);
    auto last = order_.begin() + static_cast<std::ptrdiff_t>(task.end);
    auto before = [this, dim = task.dim](uint32_t a, uint32_t b) {
      return boxes_.offsets(a)[dim] < boxes_.offsets(b)[dim];
    };
    if (!std::is_sorted(first, last, before)) std::stable_sort(first, last, before);
    tasks_.push_back(std::move(task));
  }

  /// Whether `box` alone fills the part of `region` before `end` in `dim`; else reports what it leaves.
  bool settle(uint32_t box, size_t dim, int64_t end, const Box& region) {
    for (size_t d = 0; d < boxes_.ndim(); ++d) {
      if (d == dim) continue;
      int64_t region_end = region.offsets[d] + region.sizes[d];
      if (begin_of(box, d, region) == region.offsets[d] && end_of(box, d, region) == region_end) continue;
      Box part = region;
      part.sizes[dim] = end - region.offsets[dim];
      fault_ = CoverageFault{FaultKind::kGap, 0, 0, subtract(part, boxes_[box]).front()};
      return false;
    }
    return true;
  }

  void report_gap(Box region, size_t dim, int64_t end) {
    region.sizes[dim] = end - region.offsets[dim];
    fault_ = CoverageFault{FaultKind::kGap, 0, 0, std::move(region)};
  }

  /// Settles a region that no plane parts: cuts it, and the boxes in it, at some plane where a box begins or
  /// ends.
  void halve(const Task& task) {
    size_t count = task.end - task.begin;
    if (count == 0) {
      fault_ = CoverageFault{FaultKind::kGap, 0, 0, task.region};
      return;
    }
    std::optional<Plane> plane = best_plane(task);
    if (plane) {
      // The far half first: the last task made is the next one done, so faults are met in order.
      add_half(task, plane->dim, plane->at, task.region.offsets[plane->dim] + task.region.sizes[plane->dim]);
      add_half(task, plane->dim, task.region.offsets[plane->dim], plane->at);
    } else if (count > 1) {  // every box fills the region
      auto [a, b] = std::minmax(order_[task.begin], order_[task.begin + 1]);
      fault_ = CoverageFault{FaultKind::kOverlap, a, b, intersect(boxes_[a], boxes_[b])};
    }
  }

  struct Plane {
    size_t dim;
    int64_t at;
  };

  /// In each dim the middle one of the planes inside the region where a box begins or ends; of these the one
  /// with the fewest boxes on its fuller side. Nothing where every box fills the region.
  std::optional<Plane> best_plane(const Task& task) {
    std::optional<Plane> best;
    size_t least = std::numeric_limits<size_t>::max();
    std::vector<int64_t> planes;
    for (size_t d = 0; d < boxes_.ndim(); ++d) {
      int64_t region_begin = task.region.offsets[d], region_end = region_begin + task.region.sizes[d];
      spend(2 * (task.end - task.begin));
      planes.clear();
      for (size_t i = task.begin; i < task.end; ++i) {
        int64_t begin = begin_of(order_[i], d, task.region), end = end_of(order_[i], d, task.region);
        if (begin > region_begin) planes.push_back(begin);
        if (end < region_end) planes.push_back(end);
      }
      if (planes.empty()) continue;
      auto middle = planes.begin() + std::ssize(planes) / 2;
      std::nth_element(planes.begin(), middle, planes.end());
      size_t near = 0, far = 0;
      for (size_t i = task.begin; i < task.end; ++i) {
        near += begin_of(order_[i], d, task.region) < *middle;
        far += end_of(order_[i], d, task.region) > *middle;
      }
      if (std::max(near, far) < least) {
        least = std::max(near, far);
        best = Plane{d, *middle};
      }
    }
    return best;
  }

  /// Makes a task of the boxes that meet [begin, end) of the region in `dim`.
  void add_half(const Task& task, size_t dim, int64_t begin, int64_t end) {
    Task half{task.region, order_.size(), 0, 0, 0, 0};
    half.region.offsets[dim] = begin;
    half.region.sizes[dim] = end - begin;
    for (size_t i = task.begin; i < task.end; ++i) {
      uint32_t box = order_[i];
      if (begin_of(box, dim, task.region) < end && end_of(box, dim, task.region) > begin)
        order_.push_back(box);
    }
    half.end = half.stored = order_.size();
    half.dim = boxes_.ndim() - 1;  // turn() goes on to dim 0
    turn(half, 0);
  }

  const BoxList& boxes_;
  std::vector<uint32_t> order_;
  std::vector<Task> tasks_;  // the last one is next
  int64_t work_left_;
  std::optional<CoverageFault> fault_;
};

}  // namespace

Coverage check_coverage(const BoxList& boxes, std::span<const int64_t> shape,
                        const CoverageOptions& options) {
  int64_t elements = numel(shape);
  if (boxes.size() > std::numeric_limits<uint32_t>::max()) {
    throw UnsupportedError("{} boxes in one tensor are too many to check", boxes.size());
  }
  Dims strides = elements > 0 ? row_major_strides(shape) : Dims(shape.size());
  SortedBoxes sorted;
  sorted.corners.reserve(boxes.size());
  sorted.numbers.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    std::span<const int64_t> offsets = boxes.offsets(i), sizes = boxes.sizes(i);
    if (!fits(offsets, sizes, shape)) return {CoverageFault{FaultKind::kOutOfBounds, i, 0, boxes[i]}, {}};
    if (std::ranges::find(sizes, 0) != sizes.end()) continue;
    uint64_t corner = 0;
    for (size_t d = 0; d < shape.size(); ++d) corner += static_cast<uint64_t>(offsets[d] * strides[d]);
    sorted.corners.push_back(corner);
    sorted.numbers.push_back(static_cast<uint32_t>(i));
  }
  if (elements == 0) return {};
  if (!std::ranges::is_sorted(sorted.corners)) radix_sort(sorted, static_cast<uint64_t>(elements - 1));

  Coverage coverage;
  if (options.allow_replicas) coverage.replicas = take_out_replicas(boxes, sorted);
  sorted.corners = {};
  coverage.fault = Parting(boxes, std::move(sorted.numbers), shape, options.work_limit).run();
  return coverage;
}

std::string fault_text(const CoverageFault& fault, std::span<const int64_t> shape) {
  switch (fault.kind) {
    case FaultKind::kOutOfBounds:
      return fmt::format("chunk {}, {}, does not fit in the shape {}", fault.first, box_text(fault.box),
                         list_text(shape));
    case FaultKind::kOverlap:
      return fmt::format("chunks {} and {} both hold {}", fault.first, fault.second, box_text(fault.box));
    case FaultKind::kGap:
      return fmt::format("no chunk holds {} of the shape {}", box_text(fault.box), list_text(shape));
  }
  return "unknown fault";
}

}  // namespace spolia
