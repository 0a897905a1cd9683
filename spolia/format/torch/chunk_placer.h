// Gives each chunk and value of a catalog the item that holds it, as a metadata file lists them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

/// Joins chunks with items by their offset. PyTorch's key is (name, offset), so of chunks that share an
/// offset (empty shards, replicas) one has an item and the others none; other writers may tell them apart by
/// the index, the chunk's number in the tensor's list. Most indices are right, and then joining costs one
/// comparison; else the tensor's chunks are sorted by offset once.
///
/// CorruptErrors name the tensor or value, not the metadata file.
class ChunkPlacer {
 public:
  /// The extent of chunks that have no item yet: what the tensors are to come with.
  static constexpr Extent kNowhere{std::numeric_limits<uint32_t>::max(), 0, 0};

  explicit ChunkPlacer(Catalog& catalog) : catalog_(catalog) {}

  /// `index`: the chunk's likely number, or anything where that is not known. CorruptError where no chunk
  /// starts there, or where those that do have their items already.
  void place_chunk(size_t tensor, std::span<const int64_t> offset, int64_t index, const Extent& extent);
  void place_value(size_t value, const Extent& extent);

  /// Leaves out empty chunks and replicas that have no item. CorruptError where a chunk or value lacks one
  /// otherwise.
  void finish();

 private:
  /// A tensor's chunks in the order of their offsets; of those with one offset empty ones last, then by
  /// sizes.
  struct ByOffset {
    std::vector<uint32_t> chunks;
    std::vector<uint32_t> taken;  // at a group's first place: how many of the group are known to be taken
  };

  ByOffset sorted_chunks(const TensorEntry& tensor) const;
  size_t group_end(const TensorEntry& tensor, const ByOffset& order, size_t begin) const;
  void complete(TensorEntry& tensor) const;
  void complete_group(TensorEntry& tensor, std::span<const uint32_t> group) const;

  Catalog& catalog_;
  std::unordered_map<size_t, ByOffset> orders_;  // by tensor, where an index was wrong
};

}  // namespace spolia
