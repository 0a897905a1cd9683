// Boxes: axis-aligned blocks of elements of a tensor's global shape. Everything Spolia moves is boxes.
//
// A box is [offset, offset + size) in each dim. A box with a size of 0 is empty: it holds nothing, overlaps
// nothing, and is equal to itself alone. A 0-d box holds one element. Offsets and sizes are >= 0; fits()
// checks a stranger's.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "spolia/tensor/shape.h"

namespace spolia {

struct Box {
  Dims offsets;
  Dims sizes;

  size_t ndim() const { return sizes.size(); }
  bool empty() const;
  int64_t numel() const;
  friend bool operator==(const Box&, const Box&) = default;
};

/// The box of a whole tensor.
Box whole(std::span<const int64_t> shape);

/// "[0, 4] + [2, 3]": offsets and sizes, for messages.
std::string box_text(const Box& box);

/// Whether the box has as many dims as the shape, no negative number, and lies inside (empty ones at the edge
/// do).
bool fits(std::span<const int64_t> offsets, std::span<const int64_t> sizes, std::span<const int64_t> shape);

/// Whether every element of `inner` lies in `outer`. Empty boxes lie in every box.
bool contains(const Box& outer, const Box& inner);

/// The common elements; empty (sizes 0 in the dims that miss) where there are none. Both have the same ndim.
Box intersect(const Box& a, const Box& b);

/// What remains of `a` without `b`, as at most 2 * ndim disjoint boxes in row-major order of their offsets.
std::vector<Box> subtract(const Box& a, const Box& b);

/// `box` cut along `dim` into pieces of at most `size` (> 0), in order.
std::vector<Box> split(const Box& box, size_t dim, int64_t size);

/// `box` cut, in row-major order, into boxes of at most `elements` (> 0) each, that are contiguous in a
/// row-major buffer of the box's sizes: whole slices of a leading dim where those are small enough, else
/// pieces of a slice.
std::vector<Box> split_row_major(const Box& box, int64_t elements);

/// `box` cut into boxes of at most `elements` (> 0) each, in row-major order of their corners: as long in the
/// last dim as they can be with 512 in `dim`, another one (small ones: with as much): for moving from rows
/// that run along `dim` to rows that run along the last, where short runs cost more.
std::vector<Box> split_in_blocks(const Box& box, size_t dim, int64_t elements);

/// The elements [begin, end) of the row-major order of `shape`, as at most 2 * ndim - 1 disjoint boxes in
/// that order.
std::vector<Box> boxes_of_flat_range(std::span<const int64_t> shape, int64_t begin, int64_t end);

/// Many boxes of one ndim, packed: 16 bytes a dim each. What catalogs and indices hold.
class BoxList {
 public:
  explicit BoxList(size_t ndim = 0) : ndim_(ndim) {}

  size_t ndim() const { return ndim_; }
  size_t size() const { return count_; }
  std::span<const int64_t> offsets(size_t i) const { return {numbers_.data() + 2 * ndim_ * i, ndim_}; }
  std::span<const int64_t> sizes(size_t i) const { return {numbers_.data() + 2 * ndim_ * i + ndim_, ndim_}; }
  Box operator[](size_t i) const { return {Dims(offsets(i)), Dims(sizes(i))}; }

  void reserve(size_t count) { numbers_.reserve(count * 2 * ndim_); }
  void shrink_to_fit() { numbers_.shrink_to_fit(); }
  /// Both spans have ndim() numbers.
  void add(std::span<const int64_t> offsets, std::span<const int64_t> sizes);
  void add(const Box& box) { add(box.offsets, box.sizes); }

  friend bool operator==(const BoxList&, const BoxList&) = default;

 private:
  size_t ndim_;
  size_t count_ = 0;
  std::vector<int64_t> numbers_;  // per box: ndim offsets, then ndim sizes
};

}  // namespace spolia
