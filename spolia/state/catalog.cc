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
  std::ranges::sort(entries, {}, &Entry::name);
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
