// Hugging Face's index of a model that is split over files: `model.safetensors.index.json`,
// `pytorch_model.bin.index.json`.
//
//   {"metadata": {"total_size": 578}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors",
//   ...}}
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/store/store.h"

namespace spolia {

struct WeightIndex {
  std::vector<std::pair<std::string, std::string>> weight_map;  // tensor -> file; by tensor, each there once
  std::optional<double> total_size;  // in bytes, as the writer believed; several get it wrong

  /// The files, by name, each once.
  std::vector<std::string> files() const;
  /// The file that should hold the tensor, or nullptr.
  const std::string* find(std::string_view tensor) const;
};

/// Reads and checks an index. CorruptError naming the file and what is wrong: text that is not JSON, larger
/// than 100 MB, no weight_map, a tensor named twice, a file that is not a string.
WeightIndex read_weight_index(const InputFile& file);

/// The same from the text itself; `name` is the file's, for messages.
WeightIndex parse_weight_index(std::string_view text, std::string_view name);

}  // namespace spolia
