#include "spolia/plan/distribution.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/plan/ownership.h"

namespace spolia {
namespace {

/// A rank for each shard of a layout.
std::vector<int64_t> holders_of(const Layout& layout) {
  std::vector<int64_t> holders;
  std::set<int64_t> shards;
  for (int64_t rank : layout.mesh().ranks()) {
    if (shards.insert(*layout.shard_id(rank)).second) holders.push_back(rank);
  }
  return holders;
}

/// Throws where the layouts do not suit the tensors, saying which rule does not. Each shape is cut by each
/// layout once: a model has many tensors, but few shapes.
void check_suits(const Catalog& catalog, const LayoutRules& rules) {
  std::map<const Layout*, std::vector<int64_t>> holders;
  std::map<std::pair<const Layout*, std::vector<int64_t>>, size_t> boxes;  // of all shards
  for (const TensorEntry& tensor : catalog.tensors) {
    const Layout* layout = tensor.layout.get();
    try {
      const auto [known, is_new] =
          boxes.try_emplace({layout, {tensor.shape.begin(), tensor.shape.end()}}, size_t{0});
      if (is_new) {
        auto [ranks, met] = holders.try_emplace(layout);
        if (met) ranks->second = holders_of(*layout);
        for (int64_t rank : ranks->second) known->second += layout->shard(tensor.shape, rank).boxes.size();
      }
      if (is_sub_byte(tensor.dtype) && known->second > 1) {
        throw UnsupportedError(
            "elements of {} are finer than a byte; only a whole tensor can be written: replicate it",
            name_of(tensor.dtype));
      }
    } catch (const Error& error) {
      rethrow_with_context(error, rules.context(tensor.name, tensor.shape));
    }
  }
}

/// The replica number that all owners of a tensor have, if they own whole shards.
std::optional<uint32_t> common_replica(const Layout& layout, std::span<const OwnedPart> parts) {
  std::optional<int64_t> common;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::optional<int64_t> number = replica_number(layout, parts[i].owner);
    if (i > 0 && number != common) return std::nullopt;  // a shard that was cut has several, too
    common = number;
  }
  return common ? std::optional(static_cast<uint32_t>(*common)) : std::nullopt;
}

/// Lists the parts as the tensor's chunks, by their owners.
void set_chunks(TensorEntry& tensor, std::span<OwnedPart> parts) {
  tensor.replica.reset();
  if (numel(tensor.shape) > 0) tensor.replica = common_replica(*tensor.layout, parts);
  std::ranges::stable_sort(parts, {}, &OwnedPart::owner);
  tensor.boxes = BoxList(tensor.shape.size());
  tensor.extents.clear();
  tensor.boxes.reserve(parts.size());
  tensor.extents.reserve(parts.size());
  for (const OwnedPart& part : parts) {
    tensor.boxes.add(part.box);
    tensor.extents.push_back({static_cast<uint32_t>(part.owner), 0, byte_size(tensor.dtype, part.box.sizes)});
  }
}

}  // namespace

size_t distribute(Catalog& catalog, const LayoutRules& rules) {
  std::vector<std::string_view> names;
  for (const TensorEntry& tensor : catalog.tensors) names.push_back(tensor.name);
  rules.check_patterns(names);

  std::vector<SharedTensor> shared;
  for (TensorEntry& tensor : catalog.tensors) {
    tensor.layout = rules.layout_of(tensor.name, tensor.shape);
    shared.push_back({tensor.dtype, tensor.shape, tensor.layout, {}});
  }
  check_suits(catalog, rules);
  std::vector<OwnedPart> parts = assign_owners(shared, rules.ranks());
  for (auto first = parts.begin(); first != parts.end();) {
    const auto last =
        std::find_if(first, parts.end(), [&](const OwnedPart& p) { return p.tensor != first->tensor; });
    set_chunks(catalog.tensors[first->tensor], {first, last});
    first = last;
  }
  return static_cast<size_t>(rules.ranks());
}

size_t pack(Catalog& catalog, std::span<const size_t> order, int64_t max_bytes) {
  size_t writers = 0;
  int64_t used = 0;
  for (size_t t : order) {
    TensorEntry& tensor = catalog.tensors[t];
    const int64_t bytes = tensor.bytes();
    used = checked_add(used, bytes);
    if (writers == 0 || used > max_bytes) {
      used = bytes;
      ++writers;
    }
    tensor.boxes = BoxList(tensor.shape.size());
    tensor.boxes.add(whole(tensor.shape));
    tensor.extents = {{static_cast<uint32_t>(writers - 1), 0, bytes}};
    tensor.layout = nullptr;
    tensor.replica = std::nullopt;
  }
  return writers;
}

}  // namespace spolia
