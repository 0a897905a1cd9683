// The layout of a Hugging Face folder: which safetensors file holds which tensor where, and the index that
// says so.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

struct HuggingFaceFolder {
  Catalog catalog;            // files relative to the folder; each tensor one chunk, its bytes at its extent
  std::vector<size_t> order;  // the catalog's tensors, in the order of their bytes
  std::vector<std::string> headers;  // of each file: its first bytes
};

/// Lays out the tensors of `catalog`, in `order`, over files of at most `max_shard_bytes` of tensors each; a
/// larger tensor has a file of its own. Of each tensor its name, dtype and shape are kept. One file is
/// `model.safetensors`, several are `model-00001-of-0000N.safetensors`. In a file tensors of wider elements
/// come first, so that each is aligned to its elements: readers map them in place. Pure: equal arguments,
/// equal bytes.
///
/// UnsupportedError for a dtype that safetensors lacks, InvalidArgumentError for a limit that is not
/// positive.
HuggingFaceFolder lay_out_hugging_face_folder(Catalog catalog, std::span<const size_t> order,
                                              int64_t max_shard_bytes);

inline constexpr const char* kHuggingFaceIndex = "model.safetensors.index.json";

/// Hands on, in pieces, what that file holds: which file each tensor is in.
void write_hugging_face_index(const Catalog& catalog, const std::function<void(std::string_view)>& write);

}  // namespace spolia
