#include "spolia/engine/chunk_progress.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "spolia/base/hash.h"

namespace spolia {

void CrcPieces::add(int64_t offset, int64_t length, uint32_t crc) {
  auto append = [&](auto low, auto high) {
    if (low->first + low->second.length != high->first) return;
    low->second.crc = crc32_combine(low->second.crc, high->second.crc, high->second.length);
    low->second.length += high->second.length;
    pieces_.erase(high);
  };
  const auto piece = pieces_.emplace(offset, Piece{length, crc}).first;
  if (auto next = std::next(piece); next != pieces_.end()) append(piece, next);
  if (piece != pieces_.begin()) append(std::prev(piece), piece);
}

bool ChunkProgress::add(size_t tensor, size_t chunk, int64_t offset, int64_t length,
                        std::span<const std::byte> bytes) {
  const int64_t total = target_.tensors[tensor].extents[chunk].length;
  const int64_t end = offset + length;
  const std::span<uint32_t> crcs = checksums_.of(tensor, chunk);

  struct Part {
    int64_t block, offset, length;
    uint32_t crc;
  };
  std::vector<Part> parts;  // of blocks that are not whole in `bytes`
  if (!crcs.empty()) {
    const int64_t block_bytes = std::min(checksums_.block_bytes(), total);
    for (int64_t at = offset; at < end;) {
      const int64_t block = at / block_bytes, begin = block * block_bytes;
      const int64_t until = std::min(end, begin + block_bytes);
      const uint32_t crc =
          crc32(0, bytes.subspan(static_cast<size_t>(at - offset), static_cast<size_t>(until - at)));
      if (until - at == std::min(block_bytes, total - begin)) {
        crcs[static_cast<size_t>(block)] = crc;
      } else {
        parts.push_back({block, at - begin, until - at, crc});
      }
      at = until;
    }
  }
  if (length == total) return true;

  std::lock_guard lock(mutex_);
  const auto entry = open_.try_emplace(ChunkKey{tensor, chunk}).first;
  OpenChunk& progress = entry->second;
  for (const Part& part : parts) progress.blocks[part.block].add(part.offset, part.length, part.crc);
  progress.written += length;
  if (progress.written < total) return false;
  for (const auto& [block, pieces] : progress.blocks) crcs[static_cast<size_t>(block)] = pieces.crc();
  open_.erase(entry);
  return true;
}

}  // namespace spolia
