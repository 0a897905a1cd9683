// From a box of a stored chunk to the reads that fetch it.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// One contiguous read of a payload, and the block its elements go to.
struct ReadOp {
  size_t payload = 0;     // the caller's number for the payload
  int64_t offset = 0;     // of the first byte, from the start of the payload
  int64_t length = 0;     // bytes to read; the elements among them lie at `source_strides` from the first
  bool in_place = false;  // the bytes are the block itself: they may be read straight into it
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims source_strides;  // in bytes
  Block target;
};

/// Appends to `ops` the reads that fetch `part` (a box of the tensor, inside `chunk`, not empty) out of the
/// chunk's payload into `target`.
///
/// A read that is not in place spans at most `scratch_bytes`, and over-reads at most as much as it uses (or
/// 64 KiB, which costs a disk no more than less would); strided boxes that do not fit that are cut along
/// their widest stride. Pure.
void plan_reads(const Payload& payload, size_t payload_number, DType dtype, const Box& chunk, const Box& part,
                const Block& target, int64_t scratch_bytes, std::vector<ReadOp>& ops);

}  // namespace spolia
