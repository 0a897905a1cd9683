#include "spolia/state/state_dict.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

void check_shape(const View& memory, std::span<const int64_t> due, std::string_view what) {
  if (std::ranges::equal(memory.shape, due)) return;
  throw InvalidArgumentError("its memory has the shape {}, but {} has {}", list_text(memory.shape), what,
                             list_text(due));
}

/// The view of a shard's box in memory that has the shard's local shape.
View view_of(const View& memory, const LocalBox& box) {
  const int64_t width = element_bytes(memory.dtype);
  View view{memory.data, memory.dtype, box.global.sizes, {}, memory.device};
  if (memory.is_dense()) {
    view.data += box.local_offset * width;
    for (int64_t stride : box.local_strides) view.strides.push_back(stride * width);
    return view;
  }
  if (memory.shape.size() != box.global.ndim()) {
    throw InvalidArgumentError("its shard is ragged, and so flat: its memory has to be dense");
  }
  int64_t rest = box.local_offset;
  const Dims row_major = row_major_strides(memory.shape);
  for (size_t d = 0; d < row_major.size(); ++d) {
    view.data += rest / row_major[d] * memory.strides[d];
    rest %= row_major[d];
  }
  view.strides = memory.strides;
  return view;
}

/// Whether a list becomes entries of its own: PyTorch's rule.
bool descends(const List& list) {
  return std::ranges::any_of(list.items, [](const Value& item) {
    const List* nested = item.get_if<List>();
    return item.get_if<Dict>() != nullptr || (nested != nullptr && descends(*nested));
  });
}

std::string key_text(const Value& key) {
  const std::string* text = key.get_if<std::string>();
  return text != nullptr ? *text : key.text();
}

KeyPath below(KeyPath path, PathKey key) {
  path.push_back(std::move(key));
  return path;
}

}  // namespace

std::vector<LocalTensor::Piece> LocalTensor::pieces(int64_t rank) const {
  std::vector<Piece> pieces;
  if (layout == nullptr) {
    const Box all = box ? *box : whole(shape);
    check_shape(memory, all.sizes, box ? "its box" : "the tensor");
    if (!fits(all.offsets, all.sizes, shape)) {
      throw InvalidArgumentError("its box {} leaves the shape {}", box_text(all), list_text(shape));
    }
    if (!all.empty()) pieces.push_back({all, memory});
    return pieces;
  }
  const RankShard shard = layout->shard(shape, rank);
  if (layout->mesh().coordinates_of(rank)) check_shape(memory, shard.local_shape, "its shard");
  for (const LocalBox& local : shard.boxes) pieces.push_back({local.global, view_of(memory, local)});
  return pieces;
}

LocalTensor plain_tensor(const View& memory) { return {memory, memory.shape, nullptr, std::nullopt, false}; }

LocalTensor sharded_tensor(const View& memory, std::span<const int64_t> shape,
                           std::shared_ptr<const Layout> layout) {
  return {memory, Dims(shape), std::move(layout), std::nullopt, false};
}

LocalTensor tensor_part(const View& memory, std::span<const int64_t> shape, Box box) {
  return {memory, Dims(shape), nullptr, std::move(box), false};
}

void StateDict::add(KeyPath path, LocalTensor tensor) { add_at(std::move(path), std::move(tensor)); }

void StateDict::add(KeyPath path, Value value) {
  if (flatten_ == Flatten::kYes) {
    if (const Dict* dict = value.get_if<Dict>(); dict != nullptr && !dict->items.empty()) {
      for (const auto& [key, item] : dict->items) add(below(path, key_text(key)), item);
      return;
    }
    if (const List* list = value.get_if<List>(); list != nullptr && descends(*list)) {
      for (size_t i = 0; i < list->items.size(); ++i) {
        add(below(path, static_cast<int64_t>(i)), list->items[i]);
      }
      return;
    }
  }
  add_at(std::move(path), std::move(value));
}

void StateDict::add(std::string_view key, const StateDict& nested) {
  for (const Entry& entry : nested.entries_) {
    KeyPath path{std::string(key)};
    path.insert(path.end(), entry.path.begin(), entry.path.end());
    add_at(std::move(path), entry.content);
  }
}

void StateDict::add_at(KeyPath path, std::variant<LocalTensor, Value> content) {
  std::string name = joined(path);
  if (path.empty()) throw InvalidArgumentError("an entry of a state dict needs a key");
  if (flatten_ == Flatten::kNo && path.size() > 1) {
    throw InvalidArgumentError(
        "{} lies below a key of a state dict that is not flattened; add all of {} as one value, or flatten",
        quote(name), quote(joined({path.front()})));
  }
  add({std::move(name), std::move(path), std::move(content)});
}

void StateDict::add(Entry entry) {
  const auto [at, fresh] = by_name_.try_emplace(entry.name, entries_.size());
  if (!fresh)
    throw InvalidArgumentError("the state dict has two entries with the name {}", quote(entry.name));
  entries_.push_back(std::move(entry));
}

StateDict::Entry* StateDict::find(std::string_view name) {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : &entries_[at->second];
}

const StateDict::Entry* StateDict::find(std::string_view name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : &entries_[at->second];
}

}  // namespace spolia
