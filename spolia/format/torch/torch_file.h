// One torch.save file, read: its tensors with their payloads, and its values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "spolia/format/torch/flatten.h"

namespace spolia {

struct TorchFileTensor {
  KeyPath path;
  PickledTensor tensor;
  Payload payload;  // `stored` is the storage's record, so `offset` is 0
};

struct TorchFile {
  std::vector<TorchFileTensor> tensors;  // in the file's order
  std::vector<FlatValue> values;
  int64_t tensors_in_values = 0;
};

/// Reads `file`, which is file `index` of a catalog. Errors name the file.
TorchFile read_torch_file(const InputFile& file, uint32_t index);

/// Adds to the catalog's notes that the file holds tensors where they cannot be read, if it does.
void note_tensors_in_values(Catalog& catalog, const TorchFile& file, const std::string& name);

}  // namespace spolia
