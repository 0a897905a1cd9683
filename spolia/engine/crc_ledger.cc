#include "spolia/engine/crc_ledger.h"

#include <algorithm>
#include <iterator>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"

namespace spolia {

PayloadKey key_of(const Payload& payload) {
  return {payload.stored.file, payload.stored.offset, payload.offset};
}

size_t CrcLedger::KeyHash::operator()(const PayloadKey& key) const {
  const int64_t numbers[] = {key.file, key.stored, key.offset};
  return xxh3_64(std::as_bytes(std::span(numbers)));
}

void throw_crc_mismatch(const Catalog& catalog, size_t tensor, size_t chunk, const Payload& payload,
                        const ChecksumBlock& block, uint32_t found) {
  const TensorEntry& entry = catalog.tensors[tensor];
  const int64_t start = payload.codec == Codec::kNone ? payload.offset + block.offset : 0;
  throw CorruptError(
      "{}: the bytes of tensor {} at offset {} ({} bytes, chunk {}) have CRC-32 {:08x}, the file says "
      "{:08x}; "
      "they were damaged after they were written",
      quote(catalog.path_of(payload.stored.file).string()), quote(entry.name), payload.stored.offset + start,
      block.length, box_text(entry.boxes[chunk]), found, block.crc32);
}

/// Takes those parts of [offset, end) that nobody has taken yet.
void CrcLedger::claim_in_block(Pieces& pieces, size_t block, int64_t offset, int64_t end,
                               std::vector<Range>& claimed) {
  auto next = pieces.upper_bound(offset);
  if (next != pieces.begin()) {
    auto before = std::prev(next);
    offset = std::max(offset, before->first + before->second.length);
  }
  while (offset < end) {
    const int64_t until = next == pieces.end() ? end : std::min(end, next->first);
    if (until > offset) {
      claimed.push_back({block, offset, until - offset});
      pieces.emplace_hint(next, offset, Piece{until - offset, 0, false});
    }
    if (next == pieces.end()) break;
    offset = std::max(offset, next->first + next->second.length);
    ++next;
  }
}

/// The same for a range of any of a payload's blocks.
std::vector<CrcLedger::Range> CrcLedger::claim(const PayloadKey& key, size_t tensor, size_t chunk,
                                               const Payload& payload, int64_t offset, int64_t length) {
  std::lock_guard lock(mutex_);
  if (done_.contains(key)) return {};
  const size_t blocks = payload.checksum_blocks();
  auto [at, fresh] = open_.try_emplace(key, Entry{tensor, chunk, payload, {}, {}, blocks});
  Entry& entry = at->second;
  if (fresh) entry.done.resize(blocks);
  std::vector<Range> claimed;
  const int64_t end = offset + length;
  const int64_t block_bytes = payload.checksum_block(0).length;  // of all but the last
  for (size_t b = static_cast<size_t>(offset / block_bytes); b < blocks; ++b) {
    const ChecksumBlock block = payload.checksum_block(b);
    if (block.offset >= end) break;
    if (entry.done[b]) continue;
    claim_in_block(entry.open[b], b, std::max(offset, block.offset),
                   std::min(end, block.offset + block.length), claimed);
  }
  return claimed;
}

/// Joins a hashed piece with the neighbours that are hashed too.
void CrcLedger::join(Pieces& pieces, Pieces::iterator piece) {
  auto append = [&](auto low, auto high) {
    if (!low->second.hashed || !high->second.hashed || low->first + low->second.length != high->first)
      return false;
    low->second.crc = crc32_combine(low->second.crc, high->second.crc, high->second.length);
    low->second.length += high->second.length;
    pieces.erase(high);
    return true;
  };
  auto next = std::next(piece);
  if (next != pieces.end()) append(piece, next);
  if (piece != pieces.begin()) append(std::prev(piece), piece);
}

void CrcLedger::add(const Catalog& catalog, size_t tensor, size_t chunk, const Payload& payload,
                    int64_t offset, std::span<const std::byte> bytes) {
  if (!payload.has_checksums() || bytes.empty()) return;
  const PayloadKey key = key_of(payload);
  const std::vector<Range> claimed =
      claim(key, tensor, chunk, payload, offset, static_cast<int64_t>(bytes.size()));
  if (claimed.empty()) return;

  std::vector<uint32_t> crcs;
  for (const Range& range : claimed) {
    crcs.push_back(crc32(
        0, bytes.subspan(static_cast<size_t>(range.offset - offset), static_cast<size_t>(range.length))));
  }

  std::lock_guard lock(mutex_);
  Entry& entry = open_.at(key);  // still open: the pieces claimed above are not hashed yet
  for (size_t i = 0; i < claimed.size(); ++i) {
    const size_t b = claimed[i].block;
    Pieces& pieces = entry.open.at(b);
    auto piece = pieces.find(claimed[i].offset);
    piece->second.crc = crcs[i];
    piece->second.hashed = true;
    join(pieces, piece);
    const ChecksumBlock block = payload.checksum_block(b);
    const Piece& first = pieces.begin()->second;
    if (pieces.size() > 1 || !first.hashed || first.length != block.length) continue;
    if (first.crc != block.crc32) throw_crc_mismatch(catalog, tensor, chunk, payload, block, first.crc);
    entry.open.erase(b);
    entry.done[b] = true;
    --entry.left;
    ++checked_;
  }
  if (entry.left > 0) return;
  open_.erase(key);
  done_.insert(key);
}

std::vector<CrcLedger::Gap> CrcLedger::gaps() const {
  std::lock_guard lock(mutex_);
  std::vector<Gap> gaps;
  for (const auto& [key, entry] : open_) {
    for (const auto& [b, pieces] : entry.open) {
      const ChecksumBlock block = entry.payload.checksum_block(b);
      int64_t offset = block.offset;
      auto add_gap = [&, &e = entry](int64_t until) {
        if (until > offset) gaps.push_back({e.tensor, e.chunk, e.payload, offset, until - offset});
      };
      for (const auto& [begin, piece] : pieces) {
        add_gap(begin);
        offset = begin + piece.length;
      }
      add_gap(block.offset + block.length);
    }
  }
  return gaps;
}

int64_t CrcLedger::checked() const {
  std::lock_guard lock(mutex_);
  return checked_;
}

}  // namespace spolia
