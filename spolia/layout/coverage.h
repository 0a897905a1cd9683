// Coverage: do these boxes hold every element of a shape exactly once?
//
// How it is decided. Boxes are sorted by the row-major order of their corners. Along one dim, a plane that
// cuts no box parts them into groups that can be looked at alone; so the boxes are parted along dim 0, each
// group along dim 1, and so on in turn, until a group is one box that has to fill its region. Tilings that
// come from layouts part completely this way, in one pass over the sorted boxes. A group that no plane parts
// (a pinwheel, or boxes that overlap) is halved by force, its boxes with it, until it parts or every box in
// it fills the region; then two boxes are an overlap. A region without boxes is a gap. All of it is exact;
// what grows with unruly input is the work, and that is limited.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/layout/box.h"

namespace spolia {

enum class FaultKind : uint8_t {
  kOutOfBounds,  // box `first`, which is `box`, does not fit in the shape
  kOverlap,      // the boxes `first` < `second` both hold `box`: all that they have in common
  kGap,          // no box holds anything of `box`
};

struct CoverageFault {
  FaultKind kind;
  size_t first = 0, second = 0;
  Box box;
  friend bool operator==(const CoverageFault&, const CoverageFault&) = default;
};

/// Box number `box` is the same as box number `original`, a lower one.
struct ReplicaBox {
  size_t box = 0, original = 0;
  friend bool operator==(const ReplicaBox&, const ReplicaBox&) = default;
};

struct Coverage {
  std::optional<CoverageFault> fault;  // the first one met; nothing where the coverage is exact
  std::vector<ReplicaBox> replicas;    // by rising `box`; only where they are allowed
};

struct CoverageOptions {
  /// Boxes that are exactly alike are one box, and listed as replicas, rather than overlaps.
  bool allow_replicas = false;
  /// How many times a box may be looked at, all boxes together.
  int64_t work_limit = int64_t{1} << 28;
};

/// Checks the boxes against `shape`. Numbers may be a stranger's. The lowest box that is out of bounds is met
/// before any other fault. Empty boxes have to fit and count for nothing. A 0-d shape needs one box.
///
/// Takes 24 bytes a box for the time being. CorruptError where the shape has a negative size or its elements
/// overflow 64 bits; UnsupportedError where the boxes are so irregular that `work_limit` does not do, or
/// where there are 2^32 of them.
Coverage check_coverage(const BoxList& boxes, std::span<const int64_t> shape,
                        const CoverageOptions& options = {});

/// "chunks 3 and 7 both hold [0, 4] + [2, 3]".
std::string fault_text(const CoverageFault& fault, std::span<const int64_t> shape);

}  // namespace spolia
