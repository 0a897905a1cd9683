// State dicts: what one rank has of a model's state, in memory that belongs to somebody else.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spolia/layout/layout.h"
#include "spolia/state/catalog.h"
#include "spolia/state/value.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// A tensor of which this rank holds all, a shard, or a box. The memory is borrowed.
struct LocalTensor {
  View memory;  // what this rank holds, at any strides
  Dims shape;   // of the whole tensor
  /// How ranks share it; `memory` has then the shape that Layout::shard() calls local.
  std::shared_ptr<const Layout> layout;
  std::optional<Box> box;  // without a layout: which box of the whole it is; nothing: all of it
  bool requires_grad = false;

  struct Piece {
    Box global;
    View view;  // of the box's sizes, in `memory`
  };
  /// The boxes that `rank` holds, none of them empty, in the order of the shard's buffer; a tensor without
  /// elements has none. InvalidArgumentError where `memory` has not the shape that box or layout say for this
  /// rank, and where a ragged shard, which is flat, is to be kept at strides.
  std::vector<Piece> pieces(int64_t rank) const;
};

/// A tensor that is whole on this rank.
LocalTensor plain_tensor(const View& memory);
/// This rank's shard of a tensor of `shape`.
LocalTensor sharded_tensor(const View& memory, std::span<const int64_t> shape,
                           std::shared_ptr<const Layout> layout);
/// One box of a tensor of `shape`.
LocalTensor tensor_part(const View& memory, std::span<const int64_t> shape, Box box);

/// How nested dicts and lists become entries.
enum class Flatten : uint8_t {
  kYes,  // each leaf is an entry, and its name the keys on the way to it, joined by dots
  kNo,   // each top-level key is an entry; what is nested below it is one value, and holds no tensor
};

/// Tensors and values by name, in the order in which they were added. A plain value: copies share memory.
///
/// Paths are steps through nested dicts and lists: add({"optimizer", "param_groups", 0, "lr"}, ...).
class StateDict {
 public:
  struct Entry {
    std::string name;
    KeyPath path;
    std::variant<LocalTensor, Value> content;

    LocalTensor* tensor() { return std::get_if<LocalTensor>(&content); }
    const LocalTensor* tensor() const { return std::get_if<LocalTensor>(&content); }
    Value* value() { return std::get_if<Value>(&content); }
    const Value* value() const { return std::get_if<Value>(&content); }
  };

  explicit StateDict(Flatten flatten = Flatten::kYes) : flatten_(flatten) {}

  /// InvalidArgumentError where the name is there already, by this path or another, or where a tensor lies
  /// below a key that is not to be flattened. With Flatten::kYes a dict descends into its items, and so does
  /// a list that has a dict or such a list directly in it: PyTorch's rule. What is empty stays a value.
  void add(KeyPath path, LocalTensor tensor);
  void add(KeyPath path, Value value);
  /// A name that is one key.
  void add(std::string_view key, LocalTensor tensor) { add(KeyPath{std::string(key)}, std::move(tensor)); }
  void add(std::string_view key, Value value) { add(KeyPath{std::string(key)}, std::move(value)); }
  /// All of another one, below a key.
  void add(std::string_view key, const StateDict& nested);
  /// An entry of a state dict, with the name that it has.
  void add(Entry entry);

  std::span<Entry> entries() { return entries_; }
  std::span<const Entry> entries() const { return entries_; }
  size_t size() const { return entries_.size(); }
  /// nullptr where there is none of that name.
  Entry* find(std::string_view name);
  const Entry* find(std::string_view name) const;

 private:
  void add_at(KeyPath path, std::variant<LocalTensor, Value> content);

  Flatten flatten_;
  std::vector<Entry> entries_;
  std::map<std::string, size_t, std::less<>> by_name_;
};

}  // namespace spolia
