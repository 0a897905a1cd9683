// Which boxes follow from layouts: what a rank's part need not spell out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

/// The boxes of a tensor of `shape` that `rank` writes: those of its shard if it is number `replica` of the
/// ranks that hold the same (Layout::replicas()), else none. Errors are those of Layout::shard().
std::vector<Box> boxes_written(const Layout& layout, uint32_t replica, std::span<const int64_t> shape,
                               int64_t rank);

/// Deals out to the chunks of a rank's file, in their order, the boxes that layouts give them. Tensors of one
/// layout and shape are computed once a rank.
class BoxDealer {
 public:
  /// Uses the tensors' layouts, replica numbers and shapes; the catalog outlives the object.
  explicit BoxDealer(const Catalog& catalog);

  /// Whether the tensor's boxes follow from its layout: it has one with a replica number, and elements.
  bool deals(size_t tensor) const { return group_of_[tensor] != kNoGroup; }

  /// Begins a rank's file of so many chunks, which bound what is computed for it.
  void start(int64_t rank, size_t chunks);
  /// The next of the boxes of a tensor that it deals; nullptr where the rank has no more, or where the file
  /// has too few chunks for all of them.
  const Box* next(size_t tensor);
  /// Ends the file: a tensor of which not all boxes were asked for, though some were.
  std::optional<size_t> unfinished() const;

 private:
  /// Tensors that are shared out alike.
  struct Group {
    const Layout* layout;
    uint32_t replica;
    Dims shape;
    std::optional<std::vector<Box>> boxes;  // of the rank, once asked for
  };
  static constexpr uint32_t kNoGroup = ~uint32_t{0};

  std::vector<Group> groups_;
  std::vector<uint32_t> group_of_;  // of each tensor
  std::vector<size_t> dealt_;       // of each tensor, how many boxes
  std::vector<size_t> tensors_;     // those of which there were some
  int64_t rank_ = 0;
  size_t room_ = 0;  // chunks that no tensor has a claim to yet
};

}  // namespace spolia
