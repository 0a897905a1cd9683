// Which bytes of which payloads were read, and whether their CRC-32 is what the file says.
//
// Payloads are read in pieces, by several threads, in any order, some twice and some in part. The ledger
// hashes each byte once, joins the pieces' CRCs as they become adjacent, and compares when a payload is
// complete.
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

/// Throws the CorruptError for a payload whose bytes have another CRC-32 than the file says.
[[noreturn]] void throw_crc_mismatch(const Catalog& catalog, size_t tensor, size_t chunk,
                                     const Payload& payload, uint32_t found);

/// Thread-safe.
class CrcLedger {
 public:
  /// Notes `bytes`, read from `offset` of a payload of the chunk. CorruptError where they complete it and the
  /// CRC-32 is wrong. A payload without a CRC is ignored.
  void add(const Catalog& catalog, size_t tensor, size_t chunk, const Payload& payload, int64_t offset,
           std::span<const std::byte> bytes);

  /// A part of a payload that nobody read.
  struct Gap {
    size_t tensor, chunk;
    Payload payload;
    int64_t offset, length;
  };
  /// The gaps of all payloads that were read in part, in the order of their files.
  std::vector<Gap> gaps() const;

  int64_t checked() const;

 private:
  struct Piece {
    int64_t length = 0;
    uint32_t crc = 0;
    bool hashed = false;  // false while a thread is at it
  };
  struct Entry {
    size_t tensor, chunk;
    Payload payload;
    std::map<int64_t, Piece> pieces;  // by offset; disjoint
  };
  struct Range {
    int64_t offset, length;
  };
  static std::vector<Range> claim(Entry& entry, int64_t offset, int64_t length);
  static void join(Entry& entry, std::map<int64_t, Piece>::iterator piece);

  mutable std::mutex mutex_;
  std::map<PayloadKey, Entry> open_;
  struct KeyHash {
    size_t operator()(const PayloadKey& key) const;
  };
  struct KeyEqual {
    bool operator()(const PayloadKey& a, const PayloadKey& b) const { return (a <=> b) == 0; }
  };
  std::unordered_set<PayloadKey, KeyHash, KeyEqual> done_;
};

}  // namespace spolia
