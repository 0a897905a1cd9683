// Fills tiles: finds the chunks that hold a tile's elements, reads them in file order, and puts every element
// in its place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/engine/crc_ledger.h"
#include "spolia/engine/gather.h"
#include "spolia/engine/tile.h"
#include "spolia/format/byte_source.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/state/copy_index.h"

namespace spolia {

/// What the threads of one execution share.
struct ReadContext {
  const TransferPlan& plan;
  const Source& source;
  const Catalog& target;
  bool check_crcs;
  CopyIndices copies;   // of the plan
  ChunkIndices chunks;  // of the source
  CrcLedger ledger;

  /// Whether reading ahead a payload's bytes from `offset` on (in its file) is new: each part is read ahead
  /// once.
  bool is_new_ahead(const PayloadKey& payload, int64_t offset) {
    std::lock_guard lock(ahead_mutex);
    const auto [known, fresh] = ahead.try_emplace(payload, offset);
    return fresh || std::exchange(known->second, std::max(known->second, offset)) < offset;
  }
  std::mutex ahead_mutex;
  std::map<PayloadKey, int64_t> ahead;  // where the last part begins

  ReadContext(const TransferPlan& p, const Source& s, const Catalog& t, bool check)
      : plan(p),
        source(s),
        target(t),
        check_crcs(check),
        copies(p.copies, p.first_copy),
        chunks(s.catalog()) {}
};

/// One thread's reader, with its scratch memory and its open decoders.
class TileReader {
 public:
  explicit TileReader(ReadContext& context);

  /// Decides how `out`, the buffer of a tile with these regions, will be filled.
  void plan(std::span<const TileRegion> regions, std::span<std::byte> out);
  /// Fills it, reading in the order of the source's files.
  void read();
  void read(std::span<const TileRegion> regions, std::span<std::byte> out) {
    plan(regions, out);
    read();
  }

  /// Whether the planned tile is long runs of a file's bytes as they are.
  bool is_plain_copy() const;
  /// Instead of read(), where it is: calls `copy` for each run with its file, the offset there, its place in
  /// the buffer and its length.
  void for_each_copy(const std::function<void(const InputFile& file, int64_t offset, const std::byte* place,
                                              int64_t length)>& copy);
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
    std::vector<WantedBox> wanted;
  };
  struct Decoder {
    PayloadKey key;
    std::unique_ptr<ByteSource> bytes;
  };

  void add_wanted(const TileRegion& region, std::byte* data);
  void want(size_t tensor, uint32_t chunk, WantedBox box);
  void run_together(std::span<const ReadOp> ops);
  void run_alone(const ReadOp& op);
  void deliver(const ReadOp& op, const std::byte* bytes);
  void fetch(const Payload& payload, int64_t offset, std::span<std::byte> out);
  ByteSource& decoder_of(const Payload& payload);
  int64_t position(const ReadOp& op) const;

  ReadContext& context_;
  Buffer scratch_;
  std::vector<ChunkUse> uses_;                            // of the tile being read
  std::map<std::pair<size_t, uint32_t>, size_t> use_of_;  // by tensor and chunk: where in uses_
  ReadPlan reads_;                                        // likewise
  std::vector<Decoder> decoders_;                         // the last one used at the back
  std::set<PayloadKey> opened_;                           // by decoders, since close_decoders()
  int64_t bytes_read_ = 0;
  int64_t decoders_reopened_ = 0;
};

}  // namespace spolia
