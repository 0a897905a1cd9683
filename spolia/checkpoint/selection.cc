#include "spolia/checkpoint/selection.h"

#include <algorithm>
#include <map>
#include <optional>

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
      if (!used_[i])
        throw InvalidArgumentError("{} {} matches no tensor or value", option_, quote(patterns_[i]));
    }
  }

 private:
  const std::vector<std::string>& patterns_;
  std::vector<bool> used_;
  const char* option_;
};

/// What an entry is called below the key `root`; nothing where it does not lie there.
std::optional<SelectedEntry> below(const std::string& root, size_t index, const std::string& name,
                                   const KeyPath& path) {
  if (root.empty()) return SelectedEntry{index, name, path};
  if (path.empty()) {
    if (!name.starts_with(root + ".")) return std::nullopt;
    return SelectedEntry{index, name.substr(root.size() + 1), {}};
  }
  for (size_t keys = 1; keys < path.size(); ++keys) {
    const auto split = path.begin() + static_cast<ptrdiff_t>(keys);
    if (joined(KeyPath(path.begin(), split)) != root) continue;
    KeyPath rest(split, path.end());
    std::string rest_name = joined(rest);
    return SelectedEntry{index, std::move(rest_name), std::move(rest)};
  }
  return std::nullopt;
}

class Selector {
 public:
  explicit Selector(const Selection& selection)
      : selection_(selection), select_(selection.select, "--select"), drop_(selection.drop, "--drop") {}

  template <class Entry>
  std::vector<SelectedEntry> select(const std::vector<Entry>& entries) {
    std::vector<SelectedEntry> selected;
    for (size_t i = 0; i < entries.size(); ++i) {
      const std::string& name = entries[i].name;
      // Each pattern sees each name, so that one that is mistyped shows whatever the others do.
      const bool chosen = select_.match(name) || selection_.select.empty();
      const bool dropped = drop_.match(name);
      std::optional<SelectedEntry> entry = below(selection_.root, i, name, entries[i].path);
      root_found_ = root_found_ || entry;
      if (!entry || !chosen || dropped) continue;
      rename(*entry);
      selected.push_back(std::move(*entry));
    }
    return selected;
  }

  void require_all_used() const {
    if (!selection_.root.empty() && !root_found_) {
      throw InvalidArgumentError("--root {}: no tensor or value lies below that key", quote(selection_.root));
    }
    select_.require_all_used();
    drop_.require_all_used();
    if (!selection_.strip_prefix.empty() && !prefix_found_) {
      throw InvalidArgumentError("--strip-prefix {}: no selected name starts with it",
                                 quote(selection_.strip_prefix));
    }
  }

 private:
  void rename(SelectedEntry& entry) {
    const std::string& strip = selection_.strip_prefix;
    const bool strips = !strip.empty() && entry.name.starts_with(strip);
    prefix_found_ = prefix_found_ || strips;
    if (!strips && selection_.add_prefix.empty()) return;
    entry.name = selection_.add_prefix + entry.name.substr(strips ? strip.size() : 0);
    entry.path.clear();
  }

  const Selection& selection_;
  Patterns select_, drop_;
  bool root_found_ = false;
  bool prefix_found_ = false;
};

void require_distinct(const Catalog& catalog, const SelectedEntries& selected) {
  std::map<std::string_view, std::string_view> seen;  // new names, and the old ones
  auto add = [&](const std::string& name, const std::string& old_name) {
    auto [at, fresh] = seen.emplace(name, old_name);
    if (!fresh) {
      throw InvalidArgumentError("{} and {} would both be called {}", quote(at->second), quote(old_name),
                                 quote(name));
    }
  };
  for (const SelectedEntry& s : selected.tensors) add(s.name, catalog.tensors[s.index].name);
  for (const SelectedEntry& s : selected.values) add(s.name, catalog.values[s.index].name);
}

}  // namespace

SelectedEntries select_entries(const Catalog& catalog, const Selection& selection) {
  Selector selector(selection);
  SelectedEntries selected;
  selected.tensors = selector.select(catalog.tensors);
  selected.values = selector.select(catalog.values);
  selector.require_all_used();
  if (selected.tensors.empty()) throw InvalidArgumentError("no tensor is selected: nothing would be left");
  require_distinct(catalog, selected);
  return selected;
}

}  // namespace spolia
