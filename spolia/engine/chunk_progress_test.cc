#include "spolia/engine/chunk_progress.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/hash.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

RC_GTEST_PROP(ChunkProgress, ChecksumsAreThoseOfTheBlocksInWhateverOrderPiecesCome, ()) {
  const int64_t length = pick(1, 300);
  const int64_t block_bytes = *rc::gen::element<int64_t>(1, 7, 64, 300, BlockChecksums::kWholeChunk);
  std::vector<std::byte> bytes(static_cast<size_t>(length));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(pick(0, 256));

  std::vector<std::pair<int64_t, int64_t>> pieces;  // [begin, end)
  for (int64_t at = 0; at < length;) {
    const int64_t end = pick(at, length) + 1;
    pieces.push_back({at, end});
    at = end;
  }
  for (size_t i = pieces.size(); i > 1; --i) {
    std::swap(pieces[i - 1], pieces[static_cast<size_t>(pick(0, static_cast<int64_t>(i)))]);
  }

  Catalog target;
  target.tensors = {whole_tensor("other", DType::kInt8, Dims{5}, {0, 0, 5}),
                    whole_tensor("w", DType::kInt8, Dims{length}, {0, 5, length})};
  BlockChecksums checksums(target, block_bytes);
  ChunkProgress progress(target, checksums);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto [begin, end] = pieces[i];
    const auto piece = std::span(bytes).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    RC_ASSERT(progress.add(1, 0, begin, end - begin, piece) == (i + 1 == pieces.size()));
  }
  std::vector<uint32_t> expected;
  const int64_t block = std::min(block_bytes, length);
  for (int64_t at = 0; at < length; at += block) {
    expected.push_back(crc32(0, std::span(bytes).subspan(static_cast<size_t>(at),
                                                         static_cast<size_t>(std::min(block, length - at)))));
  }
  const std::span<uint32_t> found = checksums.of(1, 0);
  RC_ASSERT(std::vector(found.begin(), found.end()) == expected);
  for (uint32_t crc : checksums.of(0, 0)) RC_ASSERT(crc == 0u);
}

}  // namespace
}  // namespace spolia
