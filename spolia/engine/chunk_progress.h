// How far the chunks of a target are written, and their checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>

#include "spolia/format/target.h"

namespace spolia {

/// The CRC-32 of a run of bytes, from the CRCs of its pieces in any order. Pieces do not overlap.
class CrcPieces {
 public:
  void add(int64_t offset, int64_t length, uint32_t crc);
  /// The CRC of all pieces. Precondition: they form one run.
  uint32_t crc() const { return pieces_.begin()->second.crc; }

 private:
  struct Piece {
    int64_t length = 0;
    uint32_t crc = 0;
  };
  std::map<int64_t, Piece> pieces_;  // by offset; neighbours are joined
};

/// Watches chunks being written in pieces, by several threads, in any order. Thread-safe.
class ChunkProgress {
 public:
  /// Both outlive the object. Checksums are set where `checksums` has blocks.
  ChunkProgress(const Catalog& target, BlockChecksums& checksums) : target_(target), checksums_(checksums) {}

  /// Notes that `length` bytes are written from `offset` of a chunk's bytes. True for the piece that
  /// completes the chunk: its checksums are then all set. No byte is noted twice. `bytes` are looked at only
  /// where there are checksums.
  bool add(size_t tensor, size_t chunk, int64_t offset, int64_t length, std::span<const std::byte> bytes);

 private:
  struct OpenChunk {
    int64_t written = 0;
    std::map<int64_t, CrcPieces> blocks;  // those that came in pieces
  };
  struct ChunkKey {
    size_t tensor, chunk;
    friend auto operator<=>(const ChunkKey&, const ChunkKey&) = default;
  };

  const Catalog& target_;
  BlockChecksums& checksums_;
  std::mutex mutex_;
  std::map<ChunkKey, OpenChunk> open_;
};

}  // namespace spolia
