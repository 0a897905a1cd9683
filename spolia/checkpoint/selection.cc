#include "spolia/checkpoint/selection.h"

#include <algorithm>
#include <map>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

/// Patterns that remember which of them ever matched.
class Patterns {
 public:
  Patterns(const std::vector<std::string>& patterns, const char* option)
      : patterns_(patterns), used_(patterns.size()), option_(option) {}

  bool match(const std::string& name) {
    bool any = false;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (!glob_match(patterns_[i], name)) continue;
      used_[i] = true;
      any = true;
    }
    return any;
  }

  void require_all_used() const {
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (!used_[i]) throw InvalidArgumentError("{} {} matches no tensor", option_, quote(patterns_[i]));
    }
  }

 private:
  const std::vector<std::string>& patterns_;
  std::vector<bool> used_;
  const char* option_;
};

void require_distinct(const Catalog& catalog, const std::vector<SelectedTensor>& selected) {
  std::map<std::string_view, size_t> seen;
  for (const SelectedTensor& s : selected) {
    auto [at, fresh] = seen.emplace(s.name, s.tensor);
    if (!fresh) {
      throw InvalidArgumentError("tensors {} and {} would both be called {}",
                                 quote(catalog.tensors[at->second].name),
                                 quote(catalog.tensors[s.tensor].name), quote(s.name));
    }
  }
}

}  // namespace

std::optional<std::string> name_below(const std::string& root, const std::string& name, const KeyPath& path) {
  if (root.empty()) return name;
  if (path.empty()) {
    if (!name.starts_with(root + ".")) return std::nullopt;
    return name.substr(root.size() + 1);
  }
  for (size_t keys = 1; keys < path.size(); ++keys) {
    const auto split = path.begin() + static_cast<ptrdiff_t>(keys);
    if (joined(KeyPath(path.begin(), split)) == root) return joined(KeyPath(split, path.end()));
  }
  return std::nullopt;
}

std::vector<SelectedTensor> select_tensors(const Catalog& catalog, const Selection& selection) {
  Patterns select(selection.select, "--select"), drop(selection.drop, "--drop");
  std::vector<SelectedTensor> selected;
  bool root_found = false, prefix_found = false;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry& tensor = catalog.tensors[t];
    // Each pattern sees each name, so that one that is mistyped shows whatever the others do.
    const bool chosen = select.match(tensor.name) || selection.select.empty();
    const bool dropped = drop.match(tensor.name);
    std::optional<std::string> name = name_below(selection.root, tensor.name, tensor.path);
    root_found = root_found || name;
    if (!name || !chosen || dropped) continue;
    if (!selection.strip_prefix.empty() && name->starts_with(selection.strip_prefix)) {
      prefix_found = true;
      name->erase(0, selection.strip_prefix.size());
    }
    selected.push_back({t, selection.add_prefix + *name});
  }
  if (!selection.root.empty() && !root_found) {
    throw InvalidArgumentError("--root {}: no tensor lies below that key", quote(selection.root));
  }
  select.require_all_used();
  drop.require_all_used();
  if (!selection.strip_prefix.empty() && !prefix_found) {
    throw InvalidArgumentError("--strip-prefix {}: no selected tensor's name starts with it",
                               quote(selection.strip_prefix));
  }
  if (selected.empty()) throw InvalidArgumentError("no tensor is selected: nothing would be left");
  require_distinct(catalog, selected);
  return selected;
}

}  // namespace spolia
