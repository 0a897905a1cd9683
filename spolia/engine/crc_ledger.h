// Which bytes of which payloads were read, and whether their CRC-32s are what the file says.
//
// Payloads are read in pieces, by several threads, in any order, some twice and some in part. The ledger
// hashes each byte once, joins the pieces' CRCs as they become adjacent, and compares when a block is
// complete: a run of a payload with a checksum of its own, often all of the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "spolia/format/source.h"

namespace spolia {

/// Names a payload: its file, and where in it (and in what it decodes to) it starts.
struct PayloadKey {
  uint32_t file = 0;
  int64_t stored = 0;
  int64_t offset = 0;
  friend auto operator<=>(const PayloadKey&, const PayloadKey&) = default;
};
PayloadKey key_of(const Payload& payload);

/// Throws the CorruptError for a block of a payload whose bytes have another CRC-32 than the file says.
[[noreturn]] void throw_crc_mismatch(const Catalog& catalog, size_t tensor, size_t chunk,
                                     const Payload& payload, const ChecksumBlock& block, uint32_t found);

/// Thread-safe.
class CrcLedger {
 public:
  /// Notes `bytes`, read from `offset` of a payload of the chunk. CorruptError where they complete a block
  /// and its CRC-32 is wrong. A payload without checksums is ignored.
  void add(const Catalog& catalog, size_t tensor, size_t chunk, const Payload& payload, int64_t offset,
           std::span<const std::byte> bytes);

  /// A part of a block that nobody read.
  struct Gap {
    size_t tensor, chunk;
    Payload payload;
    int64_t offset, length;  // in the payload
  };
  /// The gaps of all blocks that were read in part, in the order of their files.
  std::vector<Gap> gaps() const;

  /// How many checksums were compared.
  int64_t checked() const;

 private:
  struct Piece {
    int64_t length = 0;
    uint32_t crc = 0;
    bool hashed = false;  // false while a thread is at it
  };
  using Pieces = std::map<int64_t, Piece>;  // by offset in the payload; disjoint
  /// A payload of which not every block is checked.
  struct Entry {
    size_t tensor, chunk;
    Payload payload;
    std::map<size_t, Pieces> open;  // the blocks that were read in part
    std::vector<bool> done;         // of all blocks, whether it is checked
    size_t left;                    // how many are not
  };
  struct Range {
    size_t block;
    int64_t offset, length;
  };
  std::vector<Range> claim(const PayloadKey& key, size_t tensor, size_t chunk, const Payload& payload,
                           int64_t offset, int64_t length);
  static void claim_in_block(Pieces& pieces, size_t block, int64_t offset, int64_t end,
                             std::vector<Range>& claimed);
  static void join(Pieces& pieces, Pieces::iterator piece);

  mutable std::mutex mutex_;
  std::map<PayloadKey, Entry> open_;
  struct KeyHash {
    size_t operator()(const PayloadKey& key) const;
  };
  struct KeyEqual {
    bool operator()(const PayloadKey& a, const PayloadKey& b) const { return (a <=> b) == 0; }
  };
  std::unordered_set<PayloadKey, KeyHash, KeyEqual> done_;  // payloads of which every block is checked
  int64_t checked_ = 0;
};

}  // namespace spolia
