// An operation of a group, as one rank asks for it: a plain value.
//
// Buffers are dense bytes here; strided ones are packed before and dealt out after (group.h). What the ranks
// of a group ask for under one number has to agree; disagreement() says where it does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/comm/reduce.h"
#include "spolia/device/device.h"
#include "spolia/tensor/dtype.h"

namespace spolia {

enum class CollectiveKind : uint8_t {
  kBarrier,        // nothing moves
  kBroadcast,      // the root's `send` lands in everybody else's `receive`
  kAllGather,      // everybody's `send`, one after the other by rank, lands in everybody's `receive`
  kAllReduce,      // the reduction of everybody's `send` lands in everybody's `receive`
  kReduceScatter,  // the same, cut into a part a rank; each gets its own
  kAllToAll,       // each rank's part for each other one
  kSend,           // between two ranks, apart from the others: `send` lands in the peer's `receive`
  kReceive,
};
/// "broadcast", "all-gather", ...
std::string_view name_of(CollectiveKind kind);
/// Whether the kind takes two ranks, and not all of the group.
inline bool is_between_two(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive;
}
inline bool is_reduction(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
}

struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kUInt8;  // of the elements; a reduction computes in it
  ReduceOp op = ReduceOp::kSum;
  int peer = 0;   // of a broadcast: the root; of send and receive: the other one. A place in the group
  Device device;  // where both buffers are
  /// What the device has to have done before the buffers are touched; stays alive, and is not recorded anew,
  /// until the operation has landed. Backends of host memory ignore it.
  DeviceEvent after;
  /// The ranks meet, and what they ask for is compared, but nothing moves and no buffer is touched. So do
  /// backends that move bytes otherwise ask a group of the host's.
  bool meets_only = false;
  /// Empty where this rank gives, or gets, nothing. They do not overlap, except where an operation is in
  /// place: the receive buffer of an all-reduce may be `send` itself, that of a reduce-scatter this rank's
  /// part of `send`, and the send buffer of an all-gather this rank's part of `receive`.
  std::span<const std::byte> send;
  std::span<std::byte> receive;
  /// Bytes of the parts, one a rank of the group, one after the other in the buffer. all-gather: what comes
  /// from each. reduce-scatter: what goes to each. all-to-all: both. Else empty.
  std::vector<int64_t> send_bytes, receive_bytes;
};

/// "broadcast of 4096 bytes (float32) from rank 2", for messages and logs. `ranks` are the group's. The same
/// on every rank of an operation, except between two, where each names the other.
std::string describe(const Collective& collective, std::span<const int64_t> ranks);

/// InvalidArgumentError where the place `place` of `ranks` cannot ask for this: parts that do not fill their
/// buffer, a peer that is not there, buffers that overlap. UnsupportedError for a reduction that cannot be
/// computed (reduce.h).
void check(const Collective& collective, int place, std::span<const int64_t> ranks);

/// Why what the places `a` and `b` of a group ask for under one number cannot go together, naming both ranks
/// and what each asks for; nothing where it can. Both have passed check().
std::optional<std::string> disagreement(const Collective& of_a, int a, const Collective& of_b, int b,
                                        std::span<const int64_t> ranks);

}  // namespace spolia
