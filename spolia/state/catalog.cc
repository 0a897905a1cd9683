#include "spolia/state/catalog.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

template <class Entry>
const Entry* find(const std::vector<Entry>& entries, std::string_view name) {
  auto at =
      std::ranges::lower_bound(entries, name, {}, [](const Entry& e) { return std::string_view(e.name); });
  return at != entries.end() && at->name == name ? &*at : nullptr;
}

template <class Entry>
void sort_by_name(std::vector<Entry>& entries, std::string_view what) {
  if (!std::ranges::is_sorted(entries, {}, &Entry::name)) std::ranges::sort(entries, {}, &Entry::name);
  auto twice = std::ranges::adjacent_find(entries, {}, &Entry::name);
  if (twice != entries.end()) throw CorruptError("the {} {} is there twice", what, quote(twice->name));
}

}  // namespace

const TensorEntry* Catalog::find_tensor(std::string_view name) const { return find(tensors, name); }
const ValueEntry* Catalog::find_value(std::string_view name) const { return find(values, name); }

void sort_entries(Catalog& catalog) {
  sort_by_name(catalog.tensors, "tensor");
  sort_by_name(catalog.values, "value");
  for (const ValueEntry& value : catalog.values) {
    if (catalog.find_tensor(value.name) != nullptr) {
      throw CorruptError("{} is both a tensor and a value", quote(value.name));
    }
  }
}

TensorEntry whole_tensor(std::string name, DType dtype, std::span<const int64_t> shape,
                         const Extent& extent) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = Dims(shape);
  tensor.boxes = BoxList(shape.size());
  tensor.boxes.add(whole(shape));
  tensor.extents = {extent};
  return tensor;
}

Dims addressable_shape(DType dtype, std::span<const int64_t> shape) {
  return is_sub_byte(dtype) ? Dims{byte_size(dtype, shape)} : Dims(shape);
}

Box addressable_box(const TensorEntry& tensor, size_t chunk) {
  if (!is_sub_byte(tensor.dtype)) return tensor.boxes[chunk];
  if (tensor.chunks() != 1 || tensor.boxes[0] != whole(tensor.shape)) {
    throw UnsupportedError(
        "tensor {} is cut into chunks, but elements of {} are finer than a byte; only whole ones can be read",
        quote(tensor.name), name_of(tensor.dtype));
  }
  return whole(addressable_shape(tensor.dtype, tensor.shape));
}

Catalog whole_tensors(const Catalog& catalog) {
  Catalog all;
  all.format = catalog.format;
  all.tensors.reserve(catalog.tensors.size());
  for (const TensorEntry& tensor : catalog.tensors) {
    all.tensors.push_back(whole_tensor(tensor.name, tensor.dtype, tensor.shape, {0, 0, tensor.bytes()}));
  }
  return all;
}

std::string joined(const KeyPath& path) {
  std::string out;
  for (const PathKey& key : path) {
    if (!out.empty()) out += '.';
    if (const auto* text = std::get_if<std::string>(&key)) {
      out += *text;
    } else {
      out += std::to_string(std::get<int64_t>(key));
    }
  }
  return out;
}

}  // namespace spolia
