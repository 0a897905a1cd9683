// The sink that writes tiles into files, where the target catalog says.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "spolia/engine/executor.h"
#include "spolia/store/store.h"

namespace spolia {

/// Each target tensor is one chunk, stored row-major at its extent. `files` are the target catalog's files,
/// open for writing. Catalog and files outlive the sink.
class FileSink final : public TileSink {
 public:
  FileSink(const Catalog& target, std::span<const std::unique_ptr<OutputFile>> files)
      : target_(target), files_(files) {}

  void put(std::span<const TileRegion> regions, std::span<std::byte> bytes) override;

 private:
  const Catalog& target_;
  std::span<const std::unique_ptr<OutputFile>> files_;
};

}  // namespace spolia
