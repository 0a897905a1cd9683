#include "spolia/format/target.h"

#include "spolia/base/checked.h"

namespace spolia {

BlockChecksums::BlockChecksums(const Catalog& catalog, int64_t block_bytes) : block_bytes_(block_bytes) {
  size_t blocks = 0;
  for (const TensorEntry& tensor : catalog.tensors) {
    first_chunk_.push_back(first_block_.size());
    for (const Extent& extent : tensor.extents) {
      first_block_.push_back(blocks);
      if (block_bytes > 0) blocks += static_cast<size_t>(ceil_div(extent.length, block_bytes));
    }
  }
  first_chunk_.push_back(first_block_.size());
  first_block_.push_back(blocks);
  crcs_.resize(blocks);
}

std::span<const uint32_t> BlockChecksums::of(size_t tensor, size_t chunk) const {
  const size_t c = first_chunk_[tensor] + chunk;
  return std::span(crcs_).subspan(first_block_[c], first_block_[c + 1] - first_block_[c]);
}

std::span<uint32_t> BlockChecksums::of(size_t tensor, size_t chunk) {
  const size_t c = first_chunk_[tensor] + chunk;
  return std::span(crcs_).subspan(first_block_[c], first_block_[c + 1] - first_block_[c]);
}

std::vector<std::string> finish_all(const Target& target, const Source& source,
                                    const BlockChecksums& checksums, std::span<OutputFile* const> files,
                                    OutputFolder& folder) {
  std::vector<std::string> finished;
  for (size_t f = 0; f < files.size(); ++f) {
    finished.push_back(target.finish_file(static_cast<uint32_t>(f), checksums, *files[f], folder));
  }
  return target.finish(source, finished, files.empty() ? nullptr : files.front(), folder);
}

}  // namespace spolia
