// From boxes of a stored chunk to the reads that fetch them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spolia/format/source.h"
#include "spolia/layout/box.h"

namespace spolia {

/// A block of elements in memory: the first one's address and strides in bytes, one a dim.
struct Block {
  std::byte* data = nullptr;
  Dims strides;
  DType dtype = DType::kUInt8;
};

/// A box of a tensor, inside one of its chunks, and where its elements go.
struct WantedBox {
  Box box;
  Block target;
};

/// Elements among the bytes of a read, and where they go.
struct ReadPiece {
  int64_t offset = 0;  // of the first element, in bytes from the start of the read
  Dims sizes;
  Dims strides;  // in bytes
  Block target;
};

/// One contiguous read of a payload, or several of one length at even distances, whose bytes are put one
/// after the other.
struct ReadOp {
  size_t payload = 0;     // the caller's number for the payload
  int64_t offset = 0;     // of the first byte, from the start of the payload
  int64_t length = 0;     // bytes to read, of each run
  int64_t runs = 1;       // how many
  int64_t distance = 0;   // from the start of one to the next one's
  bool in_place = false;  // it has one piece, whose block it fills as it is: bytes may be read straight there
  size_t first_piece = 0, end_piece = 0;  // in ReadPlan::pieces
};

struct ReadPlan {
  std::vector<ReadOp> ops;
  std::vector<ReadPiece> pieces;

  std::span<const ReadPiece> pieces_of(const ReadOp& op) const {
    return std::span(pieces).subspan(op.first_piece, op.end_piece - op.first_piece);
  }
  void clear() {
    ops.clear();
    pieces.clear();
  }
};

/// From this length on, reading elements straight into place beats reading them with others.
inline constexpr int64_t kLongRead = int64_t{256} << 10;

/// Appends to `plan` the reads that fetch the `wanted` boxes (inside `chunk`, not empty; no two of them
/// overlap) out of the chunk's payload, whose elements are of `dtype`.
///
/// Boxes that lie among each other in the payload, such as the columns of several shards in the same rows,
/// are read together, so that each byte is read once. A read that is not in place takes at most
/// `scratch_bytes`, and over-reads at most as much as it uses (or 64 KiB, which costs a disk no more than
/// less would). A box that would over-read more, and is runs of 1 KiB or more at even distances, is read run
/// by run; others are cut along their widest stride. Pure.
void plan_reads(const Payload& payload, size_t payload_number, DType dtype, const Box& chunk,
                std::span<const WantedBox> wanted, int64_t scratch_bytes, ReadPlan& plan);

}  // namespace spolia
