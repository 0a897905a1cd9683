#include "spolia/format/native/data_header.h"

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/text.h"

namespace spolia {
namespace {

bool can_be_in_header(std::string_view name) { return is_utf8(name) && name != "__metadata__"; }

/// The chunks' names in the header, all different.
std::vector<std::string> names_of(const Catalog& catalog, std::span<const ChunkRef> chunks) {
  struct Met {
    uint32_t chunks = 0;
    uint32_t named = 0;
  };
  std::unordered_map<uint32_t, Met> tensors;
  for (const ChunkRef& ref : chunks) ++tensors[ref.tensor].chunks;

  std::vector<std::string> names(chunks.size());
  std::unordered_set<std::string> taken;
  std::vector<bool> named(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const std::string& name = catalog.tensors[chunks[i].tensor].name;
    named[i] = tensors[chunks[i].tensor].chunks == 1 && can_be_in_header(name);
    if (named[i]) taken.insert(names[i] = name);
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (named[i]) continue;
    const std::string& name = catalog.tensors[chunks[i].tensor].name;
    std::string before = can_be_in_header(name) ? name : fmt::format("tensor {}", chunks[i].tensor);
    const uint32_t number = ++tensors[chunks[i].tensor].named;
    do {
      before += '#';
      names[i] = fmt::format("{}{}", before, number);
    } while (!taken.insert(names[i]).second);
  }
  return names;
}

/// How a chunk is called in safetensors.
struct Form {
  DType dtype;
  Dims shape;
};

/// Where safetensors lacks the dtype, bytes, with a dim more where an element has several.
Form form_of(const TensorEntry& tensor, size_t chunk) {
  Form form{tensor.dtype, Dims(tensor.boxes.sizes(chunk))};
  const bool pairs_of_nothing = tensor.dtype == DType::kFloat4E2M1FNx2 && form.shape.empty();
  if (info(tensor.dtype).safetensors.empty() || pairs_of_nothing) {
    form.dtype = DType::kUInt8;
    if (int64_t width = element_bytes(tensor.dtype); width > 1) form.shape.push_back(width);
  }
  return form;
}

}  // namespace

SafetensorsLayout lay_out_data_file(const Catalog& catalog, std::span<const ChunkRef> chunks) {
  const std::vector<std::string> names = names_of(catalog, chunks);
  std::vector<Form> forms;
  forms.reserve(chunks.size());
  for (const ChunkRef& ref : chunks) forms.push_back(form_of(catalog.tensors[ref.tensor], ref.chunk));
  std::vector<SafetensorsSpec> specs;
  specs.reserve(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) specs.push_back({names[i], forms[i].dtype, forms[i].shape});
  return lay_out_safetensors(specs);
}

}  // namespace spolia
