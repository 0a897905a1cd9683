#include "spolia/format/safetensors/hugging_face_folder.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/format/json_text.h"
#include "spolia/format/safetensors/header.h"

namespace spolia {
namespace {

/// Consecutive tensors that fit a file together.
std::vector<std::vector<size_t>> fill_files(const Catalog& catalog, std::span<const size_t> order,
                                            int64_t max_bytes) {
  std::vector<std::vector<size_t>> files;
  int64_t used = 0;
  for (size_t t : order) {
    const int64_t bytes = catalog.tensors[t].bytes();
    if (files.empty() || checked_add(used, bytes) > max_bytes) {
      if (files.empty() || !files.back().empty()) files.emplace_back();
      used = 0;
    }
    files.back().push_back(t);
    used += bytes;
  }
  for (auto& file : files) {
    std::ranges::stable_sort(file, std::greater(),
                             [&](size_t t) { return info(catalog.tensors[t].dtype).bits; });
  }
  return files;
}

std::string file_name(size_t number, size_t count) {
  return count == 1 ? "model.safetensors"
                    : fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, count);
}

SafetensorsLayout lay_out_file(const Catalog& catalog, std::span<const size_t> tensors) {
  std::vector<SafetensorsSpec> specs;
  specs.reserve(tensors.size());
  for (size_t t : tensors) {
    const TensorEntry& tensor = catalog.tensors[t];
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return lay_out_safetensors(specs);
}

}  // namespace

HuggingFaceFolder lay_out_hugging_face_folder(Catalog catalog, std::span<const size_t> order,
                                              int64_t max_shard_bytes) {
  if (max_shard_bytes <= 0) throw InvalidArgumentError("the largest size of a file must be positive");
  const auto files = fill_files(catalog, order, max_shard_bytes);
  HuggingFaceFolder folder;
  for (size_t f = 0; f < files.size(); ++f) {
    SafetensorsLayout layout = lay_out_file(catalog, files[f]);
    catalog.files.push_back(file_name(f, files.size()));
    folder.headers.push_back(std::move(layout.header));
    for (size_t i = 0; i < files[f].size(); ++i) {
      TensorEntry& tensor = catalog.tensors[files[f][i]];
      const Extent extent{static_cast<uint32_t>(f), layout.offsets[i], tensor.bytes()};
      tensor = whole_tensor(std::move(tensor.name), tensor.dtype, Dims(tensor.shape), extent);
    }
    folder.order.insert(folder.order.end(), files[f].begin(), files[f].end());
  }
  catalog.format = "safetensors";
  folder.catalog = std::move(catalog);
  return folder;
}

void write_hugging_face_index(const Catalog& catalog, const std::function<void(std::string_view)>& write) {
  constexpr size_t kPieceBytes = size_t{1} << 20;
  int64_t total = 0;
  for (const TensorEntry& tensor : catalog.tensors) total = checked_add(total, tensor.bytes());
  std::string text = fmt::format(R"({{
  "metadata": {{
    "total_size": {}
  }},
  "weight_map": {{)",
                                 total);
  std::string_view separator = "\n";
  for (const TensorEntry& tensor : catalog.tensors) {
    fmt::format_to(std::back_inserter(text), "{}    {}: {}", separator, json_string(tensor.name),
                   json_string(catalog.files[tensor.extents[0].file]));
    separator = ",\n";
    if (text.size() < kPieceBytes) continue;
    write(text);
    text.clear();
  }
  write(text + "\n  }\n}\n");
}

}  // namespace spolia
