#include "spolia/format/safetensors/hugging_face_folder.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

/// Consecutive tensors that fit a file together.
std::vector<std::vector<SafetensorsSpec>> fill_files(std::span<const SafetensorsSpec> tensors,
                                                     int64_t max_bytes) {
  std::vector<std::vector<SafetensorsSpec>> files;
  int64_t used = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    const int64_t bytes = byte_size(tensor.dtype, tensor.shape);
    if (files.empty() || checked_add(used, bytes) > max_bytes) {
      if (files.empty() || !files.back().empty()) files.emplace_back();
      used = 0;
    }
    files.back().push_back(tensor);
    used += bytes;
  }
  for (auto& file : files) {
    std::ranges::stable_sort(file, std::greater(),
                             [](const SafetensorsSpec& t) { return info(t.dtype).bits; });
  }
  return files;
}

std::string file_name(size_t number, size_t count) {
  return count == 1 ? "model.safetensors"
                    : fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, count);
}

std::string index_text(const Catalog& catalog) {
  int64_t total = 0;
  nlohmann::ordered_json::object_t weight_map;
  weight_map.reserve(catalog.tensors.size());
  for (const TensorEntry& tensor : catalog.tensors) {
    total = checked_add(total, tensor.bytes());
    weight_map.emplace_back(tensor.name, catalog.files[tensor.extents[0].file]);  // [] would search for it
  }
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = std::move(weight_map);
  return index.dump(2) + "\n";
}

}  // namespace

HuggingFaceFolder lay_out_hugging_face_folder(std::span<const SafetensorsSpec> tensors,
                                              int64_t max_shard_bytes) {
  if (max_shard_bytes <= 0) throw InvalidArgumentError("the largest size of a file must be positive");
  const auto files = fill_files(tensors, max_shard_bytes);
  HuggingFaceFolder folder;
  folder.catalog.format = "safetensors";
  std::vector<std::string_view> names_in_order;
  for (size_t f = 0; f < files.size(); ++f) {
    SafetensorsLayout layout = lay_out_safetensors(files[f]);
    folder.catalog.files.push_back(file_name(f, files.size()));
    folder.headers.push_back(std::move(layout.header));
    for (size_t i = 0; i < files[f].size(); ++i) {
      const SafetensorsSpec& spec = files[f][i];
      const Extent extent{static_cast<uint32_t>(f), layout.offsets[i], byte_size(spec.dtype, spec.shape)};
      folder.catalog.tensors.push_back(whole_tensor(std::string(spec.name), spec.dtype, spec.shape, extent));
      names_in_order.push_back(spec.name);
    }
  }
  try {
    sort_entries(folder.catalog);
  } catch (const Error& error) {
    throw InvalidArgumentError("{}", error.what());
  }
  for (std::string_view name : names_in_order) {
    folder.order.push_back(
        static_cast<size_t>(folder.catalog.find_tensor(name) - folder.catalog.tensors.data()));
  }
  folder.index = index_text(folder.catalog);
  return folder;
}

}  // namespace spolia
