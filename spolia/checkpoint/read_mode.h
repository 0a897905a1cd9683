// How ranks that want the same bytes get them, and what that costs.
#pragma once

#include <cstdint>
#include <string_view>

#include "spolia/comm/group.h"
#include "spolia/format/source.h"

namespace spolia {

enum class ReadMode : uint8_t {
  kCheapest,   // of those below, by what group and storage can do
  kEachRank,   // every rank reads for itself
  kOneReader,  // one rank reads a shard and sends it to the others that want it
  kParts,      // each of the ranks that want a shard reads a part of it, and sends that to the others
};
/// "each rank reads", ...
std::string_view name_of(ReadMode mode);

/// What reading and sending cost.
struct Speeds {
  double read_bytes = 0;    // a second, by all ranks together, that all read at once
  double sent_bytes = 0;    // a second, that broadcasts to all ranks take from their roots together
  double send_seconds = 0;  // of a small broadcast to all ranks
};

/// Measures them with at most 4 MiB of the source a rank and 8 MiB of memory, in some milliseconds.
/// Collective over the group; the same numbers on all ranks. What it reads is read again.
Speeds measure_speeds(Group& group, const Source& source);

/// What there is to be done, in bytes.
struct ReadCosts {
  int64_t busiest_each = 0;   // that the busiest rank reads where each reads for itself,
  int64_t busiest_whole = 0;  // where one reads each shard,
  int64_t busiest_parts = 0;  // and where each reads a part of it
  int64_t sent = 0;           // then, by all roots together
  int64_t broadcasts = 0;     // in so many, at the most
};

/// Pure.
ReadMode cheapest_mode(const Speeds& speeds, const ReadCosts& costs, int64_t ranks);

}  // namespace spolia
