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
                        uint32_t found) {
  const TensorEntry& entry = catalog.tensors[tensor];
  throw CorruptError(
      "{}: the bytes of tensor {} at offset {} ({} bytes, chunk {}) have CRC-32 {:08x}, the file says "
      "{:08x}; "
      "they were damaged after they were written",
      quote(catalog.path_of(payload.stored.file).string()), quote(entry.name),
      payload.stored.offset + (payload.codec == Codec::kNone ? payload.offset : 0), payload.length,
      box_text(entry.boxes[chunk]), found, *payload.crc32);
}

/// Takes those parts of the range that nobody has taken yet.
std::vector<CrcLedger::Range> CrcLedger::claim(Entry& entry, int64_t offset, int64_t length) {
  std::vector<Range> claimed;
  const int64_t end = offset + length;
  auto next = entry.pieces.upper_bound(offset);
  if (next != entry.pieces.begin()) {
    auto before = std::prev(next);
    offset = std::max(offset, before->first + before->second.length);
  }
  while (offset < end) {
    const int64_t until = next == entry.pieces.end() ? end : std::min(end, next->first);
    if (until > offset) {
      claimed.push_back({offset, until - offset});
      entry.pieces.emplace_hint(next, offset, Piece{until - offset, 0, false});
    }
    if (next == entry.pieces.end()) break;
    offset = std::max(offset, next->first + next->second.length);
    ++next;
  }
  return claimed;
}

/// Joins a hashed piece with the neighbours that are hashed too.
void CrcLedger::join(Entry& entry, std::map<int64_t, Piece>::iterator piece) {
  auto append = [&](auto low, auto high) {
    if (!low->second.hashed || !high->second.hashed || low->first + low->second.length != high->first)
      return false;
    low->second.crc = crc32_combine(low->second.crc, high->second.crc, high->second.length);
    low->second.length += high->second.length;
    entry.pieces.erase(high);
    return true;
  };
  auto next = std::next(piece);
  if (next != entry.pieces.end()) append(piece, next);
  if (piece != entry.pieces.begin()) append(std::prev(piece), piece);
}

void CrcLedger::add(const Catalog& catalog, size_t tensor, size_t chunk, const Payload& payload,
                    int64_t offset, std::span<const std::byte> bytes) {
  if (!payload.crc32 || bytes.empty()) return;
  const PayloadKey key = key_of(payload);
  std::vector<Range> claimed;
  {
    std::lock_guard lock(mutex_);
    if (done_.contains(key)) return;
    auto [at, fresh] = open_.try_emplace(key, Entry{tensor, chunk, payload, {}});
    claimed = claim(at->second, offset, static_cast<int64_t>(bytes.size()));
  }
  if (claimed.empty()) return;

  std::vector<uint32_t> crcs;
  for (const Range& range : claimed) {
    crcs.push_back(crc32(
        0, bytes.subspan(static_cast<size_t>(range.offset - offset), static_cast<size_t>(range.length))));
  }

  std::lock_guard lock(mutex_);
  Entry& entry = open_.at(key);  // still open: the pieces claimed above are not hashed yet
  for (size_t i = 0; i < claimed.size(); ++i) {
    auto piece = entry.pieces.find(claimed[i].offset);
    piece->second.crc = crcs[i];
    piece->second.hashed = true;
    join(entry, piece);
  }
  const Piece& first = entry.pieces.begin()->second;
  if (entry.pieces.size() > 1 || !first.hashed || first.length != payload.length) return;
  if (first.crc != *payload.crc32) throw_crc_mismatch(catalog, tensor, chunk, payload, first.crc);
  open_.erase(key);
  done_.insert(key);
}

std::vector<CrcLedger::Gap> CrcLedger::gaps() const {
  std::lock_guard lock(mutex_);
  std::vector<Gap> gaps;
  for (const auto& [key, entry] : open_) {
    int64_t offset = 0;
    auto add_gap = [&](int64_t until) {
      if (until > offset) gaps.push_back({entry.tensor, entry.chunk, entry.payload, offset, until - offset});
    };
    for (const auto& [begin, piece] : entry.pieces) {
      add_gap(begin);
      offset = begin + piece.length;
    }
    add_gap(entry.payload.length);
  }
  return gaps;
}

int64_t CrcLedger::checked() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(done_.size());
}

}  // namespace spolia
