// Whether a tensor's chunks hold each of its elements exactly once.
#pragma once

#include <optional>
#include <string>

#include "spolia/state/catalog.h"

namespace spolia {

/// What is wrong with the tensor's chunks, as a sentence that names the tensor, the chunks and the box;
/// nothing where they tile it exactly.
std::optional<std::string> find_tiling_fault(const TensorEntry& tensor);

/// CorruptError with that sentence, where there is one.
void require_tiled(const TensorEntry& tensor);

}  // namespace spolia
