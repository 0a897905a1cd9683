#include "spolia/mapping/tensor_list.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {

NameList::NameList(std::vector<std::string_view> names) : names_(std::move(names)) {
  std::ranges::sort(names_);
  names_.erase(std::ranges::unique(names_).begin(), names_.end());
}

bool NameList::has(std::string_view name) const { return std::ranges::binary_search(names_, name); }

std::span<const std::string_view> NameList::with_prefix(std::string_view prefix) const {
  const auto begin = std::ranges::lower_bound(names_, prefix);
  const auto end = std::partition_point(begin, names_.end(),
                                        [&](std::string_view name) { return name.starts_with(prefix); });
  return {begin, end};
}

std::vector<TensorDescription> describe_tensors(const Catalog& catalog) {
  std::vector<TensorDescription> tensors;
  tensors.reserve(catalog.tensors.size());
  for (const TensorEntry& tensor : catalog.tensors) {
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape, 1});
  }
  return tensors;
}

std::vector<TensorDescription> sorted_by_name(std::span<const TensorDescription> tensors) {
  std::vector<TensorDescription> sorted(tensors.begin(), tensors.end());
  std::ranges::stable_sort(sorted, {}, &TensorDescription::name);
  if (auto twin = std::ranges::adjacent_find(sorted, {}, &TensorDescription::name); twin != sorted.end()) {
    throw InvalidArgumentError("the tensor {} is there twice", quote(twin->name));
  }
  return sorted;
}

std::optional<size_t> find_tensor(std::span<const TensorDescription> tensors, std::string_view name) {
  const auto found = std::ranges::lower_bound(
      tensors, name, {}, [](const TensorDescription& t) { return std::string_view(t.name); });
  if (found == tensors.end() || found->name != name) return std::nullopt;
  return static_cast<size_t>(found - tensors.begin());
}

}  // namespace spolia
