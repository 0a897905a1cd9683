// Small operations whose bytes ride on the messages with which the ranks agree (tree.h): up the tree goes
// what the ranks give, and the go that comes down carries what all get. They take no step beyond a barrier's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spolia/comm/collective.h"

namespace spolia {

/// No message carries more.
inline constexpr int64_t kMostRiding = int64_t{2} << 10;

/// Whether an operation's bytes ride: a broadcast or all-gather that delivers no more than kMostRiding to a
/// rank, an all-reduce of which half the ranks give no more than that. The same on all ranks that agree.
bool rides(const Collective& collective, int ranks);

/// One rank's part in an operation that rides.
class Ride {
 public:
  /// Takes what this rank gives. `collective` outlives it.
  Ride(const Collective& collective, int place, int ranks);

  /// What the places of this rank's subtree give, one after the other.
  const std::vector<std::byte>& gathered() const { return gathered_; }
  /// What a child has gathered. CorruptError where it is not as much as the child's subtree gives.
  void add(int child, std::span<const std::byte> gathered);
  /// At place 0, once it has gathered everything: what all get.
  std::vector<std::byte> result() const;
  /// Writes what all get where this rank wants it. CorruptError where it is not as much.
  void land(std::span<const std::byte> result) const;

 private:
  int64_t given_by(int place) const;

  const Collective& collective_;
  const int place_, ranks_;
  std::vector<int64_t> begins_;  // of what each place of the subtree gives, and the end
  std::vector<std::byte> gathered_;
};

}  // namespace spolia
