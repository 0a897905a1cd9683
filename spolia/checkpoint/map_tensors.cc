#include "spolia/checkpoint/map_tensors.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/joined_source.h"

namespace spolia {
namespace {

std::string text_of(const PathKey& key) { return joined(KeyPath{key}); }

/// Where in a nested state dict a tensor of the new name belongs that is made of one at `path`: below the
/// same keys and with the same last ones, as far as the name has them.
KeyPath path_like(const KeyPath& path, const std::string& name) {
  size_t front = 0, begin = 0, back = 0, end = name.size();
  const std::string_view all = name;
  while (front + 1 < path.size()) {
    const std::string key = text_of(path[front]) + ".";
    if (!all.substr(begin).starts_with(key) || begin + key.size() >= end) break;
    begin += key.size();
    ++front;
  }
  while (front + back + 1 < path.size()) {
    const std::string key = "." + text_of(path[path.size() - 1 - back]);
    if (!all.substr(begin, end - begin).ends_with(key) || begin + key.size() >= end) break;
    end -= key.size();
    ++back;
  }
  if (front + back == 0) return {};
  KeyPath made(path.begin(), path.begin() + static_cast<ptrdiff_t>(front));
  made.push_back(name.substr(begin, end - begin));
  made.insert(made.end(), path.end() - static_cast<ptrdiff_t>(back), path.end());
  return made;
}

/// The tensor without chunks. Of what it is made of, the first tensor tells what else there is to a tensor.
TensorEntry entry_of(const MappedTensor& tensor, std::span<const RegionCopy> copies, const Catalog& source,
                     std::span<const SelectedEntry> selected) {
  TensorEntry entry;
  entry.name = tensor.name;
  entry.dtype = tensor.dtype;
  entry.shape = tensor.shape;
  entry.boxes = BoxList(tensor.shape.size());
  if (copies.empty()) return entry;
  const SelectedEntry& from = selected[copies.front().source];
  const TensorEntry& like = source.tensors[from.index];
  entry.path = from.name == tensor.name ? from.path : path_like(from.path, tensor.name);
  entry.requires_grad = like.requires_grad && info(tensor.dtype).kind == info(like.dtype).kind;
  if (copies.front().region == nullptr) entry.memory_format = like.memory_format;
  return entry;
}

std::vector<std::string> names_of(const SelectedMapping& mapping, const std::vector<size_t>& tensors) {
  std::vector<std::string> names;
  for (size_t t : tensors) names.push_back(mapping.tensors[t].name);
  return names;
}

}  // namespace

SelectedMapping compile_selected(const Catalog& source, std::span<const SelectedEntry> selected,
                                 const MappingChoice& choice, const Catalog* base, const Catalog* target) {
  SelectedMapping mapping;
  mapping.tensors.reserve(selected.size());
  for (const SelectedEntry& entry : selected) {
    const TensorEntry& tensor = source.tensors[entry.index];
    mapping.tensors.push_back({entry.name, tensor.dtype, tensor.shape, 1});
  }
  std::vector<TensorDescription> bases, targets;
  MappingSides sides{mapping.tensors, std::nullopt, {}};
  if (base != nullptr) sides.base = bases = describe_tensors(*base);
  if (target != nullptr) sides.target = targets = describe_tensors(*target);
  MappingOptions options;
  options.reverse = choice.reverse;
  options.prefix = choice.root.empty() ? "" : choice.root + ".";
  options.allow_missing = target != nullptr;
  mapping.compiled = compile_mapping(choice.mapping, sides, options);
  return mapping;
}

void require_effect(const SelectedMapping& mapping, const MappingChoice& choice) {
  const CompiledMapping& made = mapping.compiled;
  const bool does_something =
      !made.dropped.empty() ||
      std::ranges::any_of(made.targets, [](const MappedTensor& t) { return t.at.line > 0; });
  if (does_something || choice.mapping.statements.empty()) return;
  throw InvalidArgumentError(
      "no statement of the mapping finds anything among the tensors, the first of which is {}; if they lie "
      "below a key that the mapping does not name, say which: --map-root KEY",
      quote(mapping.tensors.empty() ? "" : mapping.tensors.front().name));
}

MappingReport report_of(const SelectedMapping& mapping) {
  return {names_of(mapping, mapping.compiled.unused), names_of(mapping, mapping.compiled.dropped),
          mapping.compiled.notes};
}

MappedTensors map_tensors(const Source& source, std::span<const SelectedEntry> selected,
                          const MappingChoice& choice, const Source* base) {
  const Catalog* bases = base != nullptr ? &base->catalog() : nullptr;
  SelectedMapping mapping = compile_selected(source.catalog(), selected, choice, bases);
  require_effect(mapping, choice);
  CompiledMapping& made = mapping.compiled;

  std::vector<size_t> from_base;  // tensors of the base
  std::vector<FilledTensor> filled;
  for (const MappedTensor& tensor : made.targets) {
    if (tensor.origin == Origin::kFill) {
      if (!element_of(tensor.dtype, tensor.fill)) {
        fail_at(tensor.at, "{} is {}, which {} is none of", quote(tensor.name), name_of(tensor.dtype),
                tensor.fill);
      }
      filled.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.fill});
    } else if (tensor.origin == Origin::kInitial) {
      from_base.push_back(static_cast<size_t>(bases->find_tensor(tensor.name) - bases->tensors.data()));
    }
  }

  MappedTensors result;
  result.report = report_of(mapping);
  size_t next_base = source.catalog().tensors.size(), next_filled = next_base + from_base.size();
  for (size_t t = 0; t < made.targets.size(); ++t) {
    const MappedTensor& tensor = made.targets[t];
    result.tensors.push_back(entry_of(tensor, made.copies_of(t), source.catalog(), selected));
    result.positions.push_back(tensor.at);
    if (tensor.origin == Origin::kFill) {
      result.copies.push_back(copy_whole(next_filled++, t));
    } else if (tensor.origin == Origin::kInitial) {
      result.copies.push_back(copy_whole(next_base++, t));
    }
    for (size_t c = made.first_copy[t]; c < made.first_copy[t + 1]; ++c) {
      result.copies.push_back(std::move(made.copies[c]));
      result.copies.back().source = selected[result.copies.back().source].index;
    }
  }
  if (!from_base.empty() || !filled.empty()) result.joined = join_sources(source, base, from_base, filled);
  return result;
}

}  // namespace spolia
