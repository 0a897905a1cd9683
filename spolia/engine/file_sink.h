// The sink that writes tiles into files, where a target says, with what belongs around the chunks.
#pragma once

#include <span>
#include <vector>

#include "spolia/engine/chunk_progress.h"
#include "spolia/engine/executor.h"
#include "spolia/format/target.h"
#include "spolia/store/store.h"

namespace spolia {

/// `files` are the target catalog's files, open for writing. Everything that is handed in outlives the sink.
/// What lies side by side in a file is written at once, up to a mebibyte where it has to be put together
/// first.
class FileSink final : public TileSink {
 public:
  FileSink(const Target& target, std::span<OutputFile* const> files, BlockChecksums& checksums,
           size_t workers);

  void put(size_t worker, std::span<const TileRegion> regions, std::span<std::byte> bytes) override;

  std::optional<Place> place_of(const TileRegion& region) const override;
  void put_copied(size_t worker, std::span<const TileRegion> regions) override;

  /// Writes the frames of chunks that have no bytes, which no tile brings. Once, at the end.
  void finish();

 private:
  class Writer;

  void put_region(Writer& writer, const TileRegion& region, std::span<const std::byte> bytes);

  const Target& target_;
  const std::span<OutputFile* const> files_;
  BlockChecksums& checksums_;
  ChunkProgress progress_;
  std::vector<std::vector<std::byte>> staging_;  // one a worker
};

}  // namespace spolia
