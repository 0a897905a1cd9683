#include "spolia/layout/box_index.h"

#include <algorithm>
#include <limits>

#include "spolia/base/error.h"

namespace spolia {
namespace {

bool holds_nothing(std::span<const int64_t> sizes) { return std::ranges::find(sizes, 0) != sizes.end(); }

bool overlap(std::span<const int64_t> offsets, std::span<const int64_t> sizes, const Box& query) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (offsets[d] >= query.offsets[d] + query.sizes[d]) return false;
    if (query.offsets[d] >= offsets[d] + sizes[d]) return false;
  }
  return true;
}

}  // namespace

// A leaf of 4 * ndim boxes and its share of the nodes above it cost 16 bytes * ndim each, two nodes a leaf:
// 8 bytes a box, whatever the ndim, beside the 4 of its number.
BoxIndex::BoxIndex(const BoxList& boxes) : boxes_(&boxes), leaf_size_(4 * std::max<size_t>(boxes.ndim(), 1)) {
  if (boxes.size() > std::numeric_limits<uint32_t>::max()) {
    throw UnsupportedError("{} boxes in one tensor are too many to index", boxes.size());
  }
  order_.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!holds_nothing(boxes.sizes(i))) order_.push_back(static_cast<uint32_t>(i));
  }
  if (order_.empty()) return;
  size_t nodes = 2 * leaves(0, order_.size()) - 1;
  bounds_.resize(nodes * 2 * boxes.ndim());
  build(0, 0, order_.size());
}

void BoxIndex::build(size_t node, size_t begin, size_t end) {
  size_t ndim = boxes_->ndim();
  std::span<int64_t> first(bounds_.data() + node * 2 * ndim, ndim), last(first.data() + ndim, ndim);
  std::ranges::fill(first, std::numeric_limits<int64_t>::max());
  std::ranges::fill(last, 0);
  InlineVector<double, 5> total_size(ndim, 0.0);
  for (size_t i = begin; i < end; ++i) {
    std::span<const int64_t> offsets = boxes_->offsets(order_[i]), sizes = boxes_->sizes(order_[i]);
    for (size_t d = 0; d < ndim; ++d) {
      first[d] = std::min(first[d], offsets[d]);
      last[d] = std::max(last[d], offsets[d] + sizes[d]);
      total_size[d] += static_cast<double>(sizes[d]);
    }
  }
  if (end - begin <= leaf_size_) return;

  // The dim in which the most boxes of the mean size would stand side by side.
  size_t dim = 0;
  double most = 0;
  for (size_t d = 0; d < ndim; ++d) {
    double side_by_side = static_cast<double>(last[d] - first[d]) / total_size[d];
    if (side_by_side > most) {
      most = side_by_side;
      dim = d;
    }
  }
  size_t mid = middle(begin, end);
  if (ndim > 0) {
    auto at = [&](size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
    std::nth_element(at(begin), at(mid), at(end), [&](uint32_t a, uint32_t b) {
      int64_t offset_a = boxes_->offsets(a)[dim], offset_b = boxes_->offsets(b)[dim];
      return offset_a != offset_b ? offset_a < offset_b : a < b;
    });
  }
  build(node + 1, begin, mid);
  build(node + 2 * leaves(begin, mid), mid, end);
}

std::vector<uint32_t> BoxIndex::overlapping(const Box& query) const {
  std::vector<uint32_t> found;
  if (order_.empty() || query.empty()) return found;
  search(0, 0, order_.size(), query, found);
  std::ranges::sort(found);
  return found;
}

void BoxIndex::search(size_t node, size_t begin, size_t end, const Box& query,
                      std::vector<uint32_t>& found) const {
  size_t ndim = boxes_->ndim();
  const int64_t* bounds = bounds_.data() + node * 2 * ndim;
  for (size_t d = 0; d < ndim; ++d) {
    if (bounds[d] >= query.offsets[d] + query.sizes[d] || query.offsets[d] >= bounds[ndim + d]) return;
  }
  if (end - begin <= leaf_size_) {
    for (size_t i = begin; i < end; ++i) {
      if (overlap(boxes_->offsets(order_[i]), boxes_->sizes(order_[i]), query)) found.push_back(order_[i]);
    }
    return;
  }
  size_t mid = middle(begin, end);
  search(node + 1, begin, mid, query, found);
  search(node + 2 * leaves(begin, mid), mid, end, query, found);
}

size_t BoxIndex::memory_bytes() const {
  return sizeof(*this) + order_.capacity() * sizeof(uint32_t) + bounds_.capacity() * sizeof(int64_t);
}

}  // namespace spolia
