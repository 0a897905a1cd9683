// The safetensors header of a data file: what it says of the chunks to tools that know nothing of Spolia.
#pragma once

#include <cstdint>
#include <span>

#include "spolia/format/safetensors/header.h"
#include "spolia/state/catalog.h"

namespace spolia {

/// Chunk `chunk` of tensor `tensor` of a catalog.
struct ChunkRef {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
};

/// Lays out the file that holds `chunks` in that order, under names that are unique in it: that of the tensor
/// for its only chunk in the file, else with #1, #2, ... after it. Pure: equal arguments, equal bytes.
/// UnsupportedError where the header would be larger than safetensors allows.
SafetensorsLayout lay_out_data_file(const Catalog& catalog, std::span<const ChunkRef> chunks);

}  // namespace spolia
