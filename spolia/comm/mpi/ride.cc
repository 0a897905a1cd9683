#include "spolia/comm/mpi/ride.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/error.h"
#include "spolia/comm/mpi/tree.h"

namespace spolia {
namespace {

using Kind = CollectiveKind;

/// One of the two is empty on each rank of a broadcast.
int64_t broadcast_bytes(const Collective& c) { return std::ssize(c.send) + std::ssize(c.receive); }

void check_size(int64_t bytes, int64_t expected) {
  if (bytes == expected) return;
  throw CorruptError("a message between ranks carries {} bytes, and {} are expected", bytes, expected);
}

}  // namespace

bool rides(const Collective& collective, int ranks) {
  if (collective.meets_only) return false;
  switch (collective.kind) {
    case Kind::kBroadcast:
      return broadcast_bytes(collective) <= kMostRiding;
    case Kind::kAllGather:
      return std::ssize(collective.receive) <= kMostRiding;
    case Kind::kAllReduce:  // no subtree but the root's is more than half of the ranks
      return std::ssize(collective.send) <= kMostRiding / std::max(1, ranks / 2);
    default:
      return false;
  }
}

int64_t Ride::given_by(int place) const {
  switch (collective_.kind) {
    case Kind::kBroadcast:
      return place == collective_.peer ? broadcast_bytes(collective_) : 0;
    case Kind::kAllGather:
      return collective_.receive_bytes[static_cast<size_t>(place)];
    default:
      return std::ssize(collective_.send);
  }
}

Ride::Ride(const Collective& collective, int place, int ranks)
    : collective_(collective), place_(place), ranks_(ranks) {
  begins_.push_back(0);
  for (int p = place; p < end_of_subtree(place, ranks); ++p) begins_.push_back(begins_.back() + given_by(p));
  gathered_.resize(static_cast<size_t>(begins_.back()));
  std::ranges::copy(collective.send, gathered_.begin());
}

void Ride::add(int child, std::span<const std::byte> gathered) {
  const auto begin = begins_[static_cast<size_t>(child - place_)];
  const auto end = begins_[static_cast<size_t>(end_of_subtree(child, ranks_) - place_)];
  check_size(std::ssize(gathered), end - begin);
  std::ranges::copy(gathered, gathered_.begin() + begin);
}

std::vector<std::byte> Ride::result() const {
  if (collective_.kind != Kind::kAllReduce) return gathered_;
  const int64_t bytes = std::ssize(collective_.send);
  std::vector<std::byte> reduced(static_cast<size_t>(bytes));
  std::vector<const std::byte*> from;
  for (int p = 0; p < ranks_; ++p) from.push_back(gathered_.data() + begins_[static_cast<size_t>(p)]);
  std::byte* const to[] = {reduced.data()};
  if (bytes > 0) reduce(collective_.dtype, collective_.op, from, to, 0, bytes);
  return reduced;
}

void Ride::land(std::span<const std::byte> result) const {
  const bool gives_all = collective_.kind == Kind::kBroadcast && place_ == collective_.peer;
  check_size(std::ssize(result),
             std::ssize(gives_all ? collective_.send : std::span<const std::byte>(collective_.receive)));
  if (!gives_all) std::ranges::copy(result, collective_.receive.begin());
}

}  // namespace spolia
