// Small safetensors files for tests.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/base/hash.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/store/store.h"

namespace spolia {

struct TestTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  char fill = 'x';  // every byte of it
};

inline std::string safetensors_bytes(const std::vector<TestTensor>& tensors,
                                     const SafetensorsMetadata& metadata = {{"format", "pt"}}) {
  std::vector<SafetensorsSpec> specs;
  for (const TestTensor& tensor : tensors) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  std::string bytes = lay_out_safetensors(specs, metadata).header;
  for (const TestTensor& t : tensors) bytes.append(static_cast<size_t>(byte_size(t.dtype, t.shape)), t.fill);
  return bytes;
}

/// Writes a file, and first its folder where there is none.
inline void put(Store& store, const std::filesystem::path& path, std::string_view bytes) {
  if (!store.exists(path.parent_path())) store.create_folder(path.parent_path());
  store.create(path)->write(0, bytes_of(bytes));
}

}  // namespace spolia
