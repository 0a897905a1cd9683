// Box index: which of many boxes overlap a given one.
//
// A k-d tree over the boxes: each node halves its boxes along the dim in which they lie most spread out
// (counted in boxes side by side), and knows the bounding box of what is below. The shape of the tree follows
// from the number of boxes alone, so nodes need no links. On grids, whatever the order of the boxes, a query
// takes about O(log n + answers).
#pragma once

#include <cstdint>
#include <vector>

#include "spolia/layout/box.h"

namespace spolia {

/// Immutable; any number of threads may query it at once. At most about 12 bytes a box.
class BoxIndex {
 public:
  /// `boxes` is borrowed: it must outlive the index unchanged. Its boxes lie in some shape (fits()).
  /// UnsupportedError for 2^32 boxes or more.
  explicit BoxIndex(const BoxList& boxes);

  /// The numbers of the boxes that share an element with `query`, in rising order. `query` has the boxes'
  /// ndim and numbers as sound as theirs.
  std::vector<uint32_t> overlapping(const Box& query) const;

  /// What the index itself holds, in bytes.
  size_t memory_bytes() const;

 private:
  size_t leaves(size_t begin, size_t end) const { return (end - begin + leaf_size_ - 1) / leaf_size_; }
  size_t middle(size_t begin, size_t end) const { return begin + leaves(begin, end) / 2 * leaf_size_; }
  void build(size_t node, size_t begin, size_t end);
  void search(size_t node, size_t begin, size_t end, const Box& query, std::vector<uint32_t>& found) const;

  const BoxList* boxes_;
  size_t leaf_size_;
  std::vector<uint32_t> order_;  // the non-empty boxes; every node has a range of them
  // Of each node, in preorder, the first index its boxes hold in every dim, then the index after the last.
  std::vector<int64_t> bounds_;
};

}  // namespace spolia
