// Checkpoints of torch.distributed.checkpoint (DCP): a folder of `.metadata` and `__{rank}_{n}.distcp`.
//
// The metadata says which item of which file holds a chunk. An item is a torch.save archive of one tensor
// (or of one value), plain or as one zstd frame; its payload is found at first use. Where the writer was set
// to safetensors, a file is one safetensors blob, in which a chunk is found by its tensor's name.
#pragma once

#include <filesystem>
#include <memory>

#include "spolia/format/source.h"

namespace spolia {

/// Reads `.metadata`, or else the `__{rank}.metadata` that ranks wrote each for itself. CorruptError where
/// there is neither, but the data files of an interrupted save, or where a rank's metadata is missing. A data
/// file that is missing is noticed when it is needed.
std::unique_ptr<Source> open_dcp(std::shared_ptr<const Store> store, const std::filesystem::path& folder);

}  // namespace spolia
