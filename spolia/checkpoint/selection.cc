#include "spolia/checkpoint/selection.h"

#include <algorithm>
#include <map>
#include <optional>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

/// The name below `root`, or nothing where the tensor does not lie there. A key may have dots of its own, so
/// the recorded path decides where there is one.
std::optional<std::string> below_root(const TensorEntry& tensor, const std::string& root) {
  if (root.empty()) return tensor.name;
  if (tensor.path.empty()) {
    if (!tensor.name.starts_with(root + ".")) return std::nullopt;
    return tensor.name.substr(root.size() + 1);
  }
  for (size_t keys = 1; keys < tensor.path.size(); ++keys) {
    const auto split = tensor.path.begin() + static_cast<ptrdiff_t>(keys);
    if (joined(KeyPath(tensor.path.begin(), split)) == root) return joined(KeyPath(split, tensor.path.end()));
  }
  return std::nullopt;
}

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

std::vector<SelectedTensor> select_tensors(const Catalog& catalog, const Selection& selection) {
  Patterns select(selection.select, "--select"), drop(selection.drop, "--drop");
  std::vector<SelectedTensor> selected;
  bool root_found = false, prefix_found = false;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry& tensor = catalog.tensors[t];
    // Each pattern sees each name, so that one that is mistyped shows whatever the others do.
    const bool chosen = select.match(tensor.name) || selection.select.empty();
    const bool dropped = drop.match(tensor.name);
    std::optional<std::string> name = below_root(tensor, selection.root);
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
