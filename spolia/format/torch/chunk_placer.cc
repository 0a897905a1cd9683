#include "spolia/format/torch/chunk_placer.h"

#include <algorithm>
#include <numeric>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

bool is_placed(const Extent& extent) { return extent.file != ChunkPlacer::kNowhere.file; }

bool same(std::span<const int64_t> a, std::span<const int64_t> b) { return std::ranges::equal(a, b); }

bool is_empty(std::span<const int64_t> sizes) { return std::ranges::find(sizes, 0) != sizes.end(); }

auto compare(std::span<const int64_t> a, std::span<const int64_t> b) {
  return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

ChunkPlacer::ByOffset ChunkPlacer::sorted_chunks(const TensorEntry& tensor) const {
  const BoxList& boxes = tensor.boxes;
  ByOffset order;
  order.chunks.resize(checked_cast<uint32_t>(boxes.size(), "the number of chunks"));
  order.taken.resize(boxes.size());
  std::iota(order.chunks.begin(), order.chunks.end(), uint32_t{0});
  std::ranges::sort(order.chunks, [&](uint32_t a, uint32_t b) {
    if (auto c = compare(boxes.offsets(a), boxes.offsets(b)); c != 0) return c < 0;
    bool a_empty = is_empty(boxes.sizes(a)), b_empty = is_empty(boxes.sizes(b));
    if (a_empty != b_empty) return b_empty;
    if (auto c = compare(boxes.sizes(a), boxes.sizes(b)); c != 0) return c < 0;
    return a < b;
  });
  return order;
}

/// Where the chunks end that have the offset of the one at place `begin`.
size_t ChunkPlacer::group_end(const TensorEntry& tensor, const ByOffset& order, size_t begin) const {
  size_t end = begin;
  std::span<const int64_t> offset = tensor.boxes.offsets(order.chunks[begin]);
  while (end < order.chunks.size() && same(tensor.boxes.offsets(order.chunks[end]), offset)) ++end;
  return end;
}

void ChunkPlacer::place_chunk(size_t tensor_index, std::span<const int64_t> offset, int64_t index,
                              const Extent& extent) {
  TensorEntry& tensor = catalog_.tensors[tensor_index];
  const BoxList& boxes = tensor.boxes;
  if (index >= 0 && std::cmp_less(index, boxes.size())) {
    size_t chunk = static_cast<size_t>(index);
    if (same(boxes.offsets(chunk), offset) && !is_placed(tensor.extents[chunk])) {
      tensor.extents[chunk] = extent;
      return;
    }
  }

  auto [at, is_new] = orders_.try_emplace(tensor_index);
  ByOffset& order = at->second;
  if (is_new) order = sorted_chunks(tensor);
  auto first = std::ranges::lower_bound(
      order.chunks, offset, [](auto a, auto b) { return compare(a, b) < 0; },
      [&](uint32_t chunk) { return boxes.offsets(chunk); });
  size_t begin = static_cast<size_t>(first - order.chunks.begin());
  auto starts_here = [&](size_t place) {
    return place < order.chunks.size() && same(boxes.offsets(order.chunks[place]), offset);
  };
  if (!starts_here(begin)) {
    throw CorruptError("storage_data has an item for tensor {} at {}, where it has no chunk",
                       quote(tensor.name), list_text(offset));
  }
  uint32_t& taken = order.taken[begin];
  while (starts_here(begin + taken) && is_placed(tensor.extents[order.chunks[begin + taken]])) ++taken;
  if (!starts_here(begin + taken)) {
    throw CorruptError("storage_data has two items for the chunk at {} of tensor {}", list_text(offset),
                       quote(tensor.name));
  }
  tensor.extents[order.chunks[begin + taken]] = extent;
}

void ChunkPlacer::place_value(size_t value_index, const Extent& extent) {
  ValueEntry& value = catalog_.values[value_index];
  if (value.extent) throw CorruptError("storage_data has two items for the value {}", quote(value.name));
  value.extent = extent;
}

void ChunkPlacer::finish() {
  for (TensorEntry& tensor : catalog_.tensors) {
    if (!std::ranges::all_of(tensor.extents, is_placed)) complete(tensor);
  }
  for (const ValueEntry& value : catalog_.values) {
    if (!value.extent) throw CorruptError("the value {} has no item in storage_data", quote(value.name));
  }
}

void ChunkPlacer::complete(TensorEntry& tensor) const {
  ByOffset order = sorted_chunks(tensor);
  for (size_t begin = 0; begin < order.chunks.size();) {
    size_t end = group_end(tensor, order, begin);
    complete_group(tensor, std::span(order.chunks).subspan(begin, end - begin));
    begin = end;
  }
  BoxList boxes(tensor.boxes.ndim());
  std::vector<Extent> extents;
  for (size_t chunk = 0; chunk < tensor.extents.size(); ++chunk) {
    if (!is_placed(tensor.extents[chunk])) continue;
    boxes.add(tensor.boxes.offsets(chunk), tensor.boxes.sizes(chunk));
    extents.push_back(tensor.extents[chunk]);
  }
  tensor.boxes = std::move(boxes);
  tensor.extents = std::move(extents);
}

/// For chunks that share an offset: each distinct box that is not empty needs an item. If it has none, the
/// item that an empty chunk got is really its own, since the key does not tell them apart.
void ChunkPlacer::complete_group(TensorEntry& tensor, std::span<const uint32_t> group) const {
  const BoxList& boxes = tensor.boxes;
  std::vector<uint32_t> spare;
  for (uint32_t chunk : group) {
    if (is_empty(boxes.sizes(chunk)) && is_placed(tensor.extents[chunk])) spare.push_back(chunk);
  }
  for (size_t i = 0; i < group.size() && !is_empty(boxes.sizes(group[i]));) {
    size_t first = i;
    bool has_item = false;
    for (; i < group.size() && same(boxes.sizes(group[i]), boxes.sizes(group[first])); ++i) {
      has_item = has_item || is_placed(tensor.extents[group[i]]);
    }
    if (has_item) continue;
    if (spare.empty()) {
      throw CorruptError("the chunk {} of tensor {} has no item in storage_data",
                         box_text(boxes[group[first]]), quote(tensor.name));
    }
    tensor.extents[group[first]] = std::exchange(tensor.extents[spare.back()], kNowhere);
    spare.pop_back();
  }
}

}  // namespace spolia
