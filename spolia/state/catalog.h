// The catalog: what a checkpoint holds and where every byte of it lies, whatever its format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spolia/layout/box.h"
#include "spolia/layout/layout.h"
#include "spolia/state/value.h"
#include "spolia/tensor/dtype.h"

namespace spolia {

/// A range of bytes in one of the catalog's files.
struct Extent {
  uint32_t file = 0;  // an index into Catalog::files
  int64_t offset = 0;
  int64_t length = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// One step from a nested state dict to a value: a dict's key or a list's index.
using PathKey = std::variant<std::string, int64_t>;
using KeyPath = std::vector<PathKey>;

enum class MemoryFormat : uint8_t { kContiguous, kChannelsLast, kPreserve };

/// A tensor, whole or in chunks. Chunks tile the shape exactly in a sound checkpoint (`verify` proves it);
/// empty shards may be recorded as empty boxes; of a replica that was saved twice, one is recorded.
struct TensorEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  BoxList boxes;                // a chunk's place in the global shape
  std::vector<Extent> extents;  // where that chunk is stored; for items in a container, the container's item
  bool requires_grad = false;
  MemoryFormat memory_format = MemoryFormat::kContiguous;
  KeyPath path;  // where the format records it; else empty
  /// How ranks share the tensor, where that is known.
  std::shared_ptr<const Layout> layout;
  /// Where it is set, there is a layout and the chunks follow from it: every shard whole, in its boxes,
  /// written by number `replica` of the ranks that hold it (Layout::replicas()). Else the boxes are just as
  /// listed.
  std::optional<uint32_t> replica;

  size_t chunks() const { return extents.size(); }
  int64_t bytes() const { return byte_size(dtype, shape); }
};

/// A tensor that is one chunk, stored at `extent`.
TensorEntry whole_tensor(std::string name, DType dtype, std::span<const int64_t> shape, const Extent& extent);

/// The shape by which a tensor's bytes are addressed: its own, or, where elements are finer than a byte, the
/// number of its bytes.
Dims addressable_shape(DType dtype, std::span<const int64_t> shape);

/// The same for a chunk's box. A sub-byte tensor has one chunk, the whole.
Box addressable_box(const TensorEntry& tensor, size_t chunk);

/// A value that is not a tensor. Where `extent` is set the value lies in a file and Source::value() reads it.
struct ValueEntry {
  std::string name;
  std::optional<Extent> extent;
  Value value;
  KeyPath path;
};

struct Catalog {
  std::string format;          // "dcp", "torch.save", "rank files", "safetensors", "dcp safetensors", ...
  std::filesystem::path root;  // the folder that `files` are relative to
  std::vector<std::string> files;
  std::vector<TensorEntry> tensors;  // sorted by name (bytes), names unique
  std::vector<ValueEntry> values;    // likewise; no name is both
  /// Files of the checkpoint's own kind in its folder that nothing refers to: left by another save, or lost.
  std::vector<std::string> unknown_files;
  std::vector<std::string> notes;  // oddities that do not hinder: unknown classes, versions

  const TensorEntry* find_tensor(std::string_view name) const;
  const ValueEntry* find_value(std::string_view name) const;
  /// A file's path for messages and opening.
  std::filesystem::path path_of(uint32_t file) const { return root / files[file]; }
};

/// Puts tensors and values in order of their names. CorruptError where a name occurs twice, naming it.
void sort_entries(Catalog& catalog);

/// A catalog of the same tensors (name, dtype, shape), each of them one chunk, that is stored nowhere.
Catalog whole_tensors(const Catalog& catalog);

/// "model.layers.0" for ("model", "layers", 0).
std::string joined(const KeyPath& path);

}  // namespace spolia
