#include "spolia/format/native/data_header.h"

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/text.h"

namespace spolia {
namespace {

bool can_be_in_header(std::string_view name) { return is_utf8(name) && name != "__metadata__"; }

/// The chunks' names in the header, all different: mostly their tensors' names, which are borrowed.
struct ChunkNames {
  std::vector<std::string_view> names;
  std::deque<std::string> made;  // those that are no tensor's
};

ChunkNames names_of(const Catalog& catalog, std::span<const ChunkRef> chunks) {
  ChunkNames result;
  std::vector<size_t> unnamed;
  std::unordered_map<uint32_t, uint32_t> counts;  // of chunks, for tensors that may have several here
  for (const ChunkRef& ref : chunks) {
    if (catalog.tensors[ref.tensor].chunks() > 1) ++counts[ref.tensor];
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    const std::string& name = catalog.tensors[chunks[i].tensor].name;
    const auto count = counts.find(chunks[i].tensor);
    const bool alone = count == counts.end() || count->second == 1;
    const bool named = alone && can_be_in_header(name);
    result.names.push_back(named ? std::string_view(name) : std::string_view());
    if (!named) unnamed.push_back(i);
  }
  if (unnamed.empty()) return result;

  std::unordered_set<std::string_view> taken(result.names.begin(), result.names.end());
  std::unordered_map<uint32_t, uint32_t> named;  // chunks of each tensor
  for (size_t i : unnamed) {
    const std::string& name = catalog.tensors[chunks[i].tensor].name;
    std::string before = can_be_in_header(name) ? name : fmt::format("tensor {}", chunks[i].tensor);
    const uint32_t number = ++named[chunks[i].tensor];
    std::string made;
    do {
      before += '#';
      made = fmt::format("{}{}", before, number);
    } while (taken.contains(made));
    result.names[i] = result.made.emplace_back(std::move(made));
    taken.insert(result.names[i]);
  }
  return result;
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
  const ChunkNames names = names_of(catalog, chunks);
  std::vector<Form> forms;
  forms.reserve(chunks.size());
  for (const ChunkRef& ref : chunks) forms.push_back(form_of(catalog.tensors[ref.tensor], ref.chunk));
  std::vector<SafetensorsSpec> specs;
  specs.reserve(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i)
    specs.push_back({names.names[i], forms[i].dtype, forms[i].shape});
  return lay_out_safetensors(specs);
}

}  // namespace spolia
