// The layout of a Hugging Face folder: which safetensors file holds which tensor where, and the index that
// says so.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "spolia/format/safetensors/header.h"
#include "spolia/state/catalog.h"

namespace spolia {

struct HuggingFaceFolder {
  Catalog catalog;            // files relative to the folder; each tensor one chunk, its bytes at its extent
  std::vector<size_t> order;  // the catalog's tensors, in the order of their bytes
  std::vector<std::string> headers;  // of each file: its first bytes
  std::string index;                 // what model.safetensors.index.json holds
};

inline constexpr const char* kHuggingFaceIndex = "model.safetensors.index.json";

/// Lays out `tensors`, in their order, over files of at most `max_shard_bytes` of tensors each; a larger
/// tensor has a file of its own. One file is `model.safetensors`, several are
/// `model-00001-of-0000N.safetensors`. In a file tensors of wider elements come first, so that each is
/// aligned to its elements: readers map them in place. Pure: equal arguments, equal bytes.
///
/// UnsupportedError for a dtype that safetensors lacks, InvalidArgumentError for a name given twice or a
/// limit that is not positive.
HuggingFaceFolder lay_out_hugging_face_folder(std::span<const SafetensorsSpec> tensors,
                                              int64_t max_shard_bytes);

}  // namespace spolia
