// Fills tiles: finds the chunks that hold a tile's elements, reads them in file order, and puts every element
// in its place.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/engine/crc_ledger.h"
#include "spolia/engine/gather.h"
#include "spolia/format/byte_source.h"
#include "spolia/format/source.h"
#include "spolia/layout/box_index.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

/// For each source tensor, the index of its chunks, made when first asked for. Thread-safe.
class ChunkIndices {
 public:
  explicit ChunkIndices(const Catalog& catalog) : catalog_(catalog), indices_(catalog.tensors.size()) {}
  /// The chunks of a tensor that overlap `box`, in rising order.
  std::vector<uint32_t> overlapping(size_t tensor, const Box& box);

 private:
  struct Slot {
    std::once_flag once;
    std::optional<BoxIndex> index;
  };
  const Catalog& catalog_;
  std::deque<Slot> indices_;
};

/// What the threads of one execution share.
struct ReadContext {
  const TransferPlan& plan;
  const Source& source;
  const Catalog& target;
  bool check_crcs;
  ChunkIndices indices;
  CrcLedger ledger;
};

/// One thread's reader, with its scratch memory and its open decoders.
class TileReader {
 public:
  explicit TileReader(ReadContext& context);

  /// Fills `out`, the buffer of a tile with these regions.
  void read(std::span<const TileRegion> regions, std::span<std::byte> out);
  /// Reads a part of a payload for its checksum alone.
  void read_for_check(const CrcLedger::Gap& gap);
  /// Drops the decoders of compressed items; to be called where reading jumps elsewhere.
  void close_decoders();

  int64_t bytes_read() const { return bytes_read_; }
  int64_t decoders_reopened() const { return decoders_reopened_; }

 private:
  struct ChunkUse {
    size_t tensor, chunk;
    Payload payload;
  };
  struct Decoder {
    PayloadKey key;
    std::unique_ptr<ByteSource> bytes;
  };

  void plan_region(const TileRegion& region, std::byte* data);
  void run_together(std::span<const ReadOp> ops);
  void run_alone(const ReadOp& op);
  void deliver(const ReadOp& op, std::byte* bytes);
  void fetch(const Payload& payload, int64_t offset, std::span<std::byte> out);
  ByteSource& decoder_of(const Payload& payload);
  int64_t position(const ReadOp& op) const;

  ReadContext& context_;
  Buffer scratch_;
  std::vector<ChunkUse> uses_;     // of the tile being read
  std::vector<ReadOp> ops_;        // likewise
  std::vector<Decoder> decoders_;  // the last one used at the back
  std::set<PayloadKey> opened_;    // by decoders, since close_decoders()
  int64_t bytes_read_ = 0;
  int64_t decoders_reopened_ = 0;
};

}  // namespace spolia
