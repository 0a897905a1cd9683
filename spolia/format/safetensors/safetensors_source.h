// Checkpoints of safetensors files: one file, a Hugging Face folder, or what the ranks of a
// torch.distributed.checkpoint save wrote with its Hugging Face writer.
//
// Chunks are row-major in their files and carry no checksums. Where a file records DCP_SHARDING_INFO its
// tensors are parts, and a tensor's shape is the least that holds all its parts: a lost last part makes it
// smaller without a trace, a lost other part leaves a gap, which the check of coverage finds. A part that
// several files hold is taken from the first of them by name.
//
// Tensors whose elements are finer than a byte have one chunk, the whole, addressed by bytes (see
// addressable_box()).
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "spolia/format/source.h"

namespace spolia {

/// One safetensors file.
std::unique_ptr<Source> open_safetensors_file(std::shared_ptr<const Store> store,
                                              const std::filesystem::path& file);

/// The files that an index (`*.safetensors.index.json`) lists, below its folder. Each tensor must be in just
/// the file that the index says, and the index must name all tensors of these files: else a MismatchError
/// naming tensor and file. Other safetensors files beside them, and a wrong total_size, are noted.
std::unique_ptr<Source> open_safetensors_index(std::shared_ptr<const Store> store,
                                               const std::filesystem::path& index);

/// Whether a file's name is that of a safetensors file or of an index of such.
bool is_safetensors_name(std::string_view name);

/// A folder with an index, or else of safetensors files that have no tensor in common, or of the parts of
/// one checkpoint. Of several indices model.safetensors.index.json is taken; UnsupportedError where there is
/// none of that name.
std::unique_ptr<Source> open_safetensors_folder(std::shared_ptr<const Store> store,
                                                const std::filesystem::path& folder);

}  // namespace spolia
