// Checkpoints of torch.save files: one file, or a Hugging Face folder of pytorch_model*.bin.
//
// Nested state dicts are flattened (flatten.h). Tensors that share a storage share its bytes. Values keep
// their place in the catalog.
#pragma once

#include <filesystem>
#include <memory>

#include "spolia/format/source.h"

namespace spolia {

/// One torch.save file. UnsupportedError for files from before torch 1.6, TorchScript archives, and for a
/// tensor that is only a rank's part of a DTensor.
std::unique_ptr<Source> open_torch_save(std::shared_ptr<const Store> store,
                                        const std::filesystem::path& file);

/// A folder with an index (pytorch_model.bin.index.json), or else of one pytorch_model*.bin. MismatchError
/// where the index and the files disagree: each tensor must be in just the file that the index says.
/// UnsupportedError where it is not clear which files belong together.
std::unique_ptr<Source> open_torch_bin_folder(std::shared_ptr<const Store> store,
                                              const std::filesystem::path& folder);

}  // namespace spolia
