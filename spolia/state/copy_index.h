// Which of a target's many copies fill a box of it.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "spolia/layout/box_index.h"
#include "spolia/state/region_copy.h"

namespace spolia {

/// For each target of many copies the index of their boxes, made when first asked for; few are looked at one
/// by one. Thread-safe.
class CopyIndices {
 public:
  /// `copies` are by target, those of target t: [first_copy[t], first_copy[t + 1]). Both outlive the object.
  CopyIndices(std::span<const RegionCopy> copies, std::span<const size_t> first_copy);

  /// The numbers, in `copies`, of the target's copies that fill something of `box`, in rising order. One that
  /// is of the whole target is always among them.
  std::vector<size_t> overlapping(size_t target, const Box& box);

 private:
  struct Slot {
    std::once_flag once;
    BoxList boxes;
    std::optional<BoxIndex> index;
  };
  std::span<const RegionCopy> copies_;
  std::span<const size_t> first_copy_;
  std::map<size_t, Slot> indices_;  // by target, for those of many copies
};

}  // namespace spolia
