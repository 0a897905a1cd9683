// A source: a checkpoint opened for reading, in whatever format. open_source() finds out which.
//
// The catalog tells what is there and which item of which file holds it. What lies deeper - where in an item
// the elements start, their strides, how they are packed - costs a read of the item, so it is resolved at
// first use and cached.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spolia/state/catalog.h"
#include "spolia/store/store.h"

namespace spolia {

enum class Codec : uint8_t {
  kNone,     // `stored` is the bytes themselves
  kZstd,     // `stored` is one zstd frame
  kDeflate,  // `stored` is one raw deflate stream
};

/// A run of a payload's bytes that has a checksum of its own.
struct ChecksumBlock {
  int64_t offset = 0;  // from the payload's start
  int64_t length = 0;
  uint32_t crc32 = 0;
};

/// Where the elements of one chunk lie.
///
/// The chunk's payload is a run of `length` bytes that starts `offset` bytes into the decoded form of
/// `stored` (for Codec::kNone: into the extent itself). Element (i0, i1, ...) of the chunk lies at byte
/// (first + sum of i_d * strides[d]) * element size of the payload.
struct Payload {
  Extent stored;
  Codec codec = Codec::kNone;
  int64_t offset = 0;
  int64_t length = 0;
  int64_t first = 0;              // in elements
  Dims strides;                   // in elements, one a dim of the chunk, >= 0
  std::optional<uint32_t> crc32;  // of the payload's `length` bytes; nothing where the file has none

  /// Where block_bytes > 0: a CRC-32 of each block of so many bytes, counted from the payload's start, the
  /// last one shorter; `crc32` is then not set. `blocks` is the source's and lives as long as that.
  int64_t block_bytes = 0;
  std::span<const uint32_t> blocks;

  bool has_checksums() const { return crc32.has_value() || block_bytes > 0; }
  /// The blocks that the payload's checksums cut it into, whichever way they are kept. Precondition of both:
  /// has_checksums().
  size_t checksum_blocks() const { return crc32 ? 1 : blocks.size(); }
  ChecksumBlock checksum_block(size_t i) const {
    if (crc32) return {0, length, *crc32};
    const int64_t begin = static_cast<int64_t>(i) * block_bytes;
    return {begin, std::min(block_bytes, length - begin), blocks[i]};
  }
};

class Source {
 public:
  virtual ~Source() = default;

  const Catalog& catalog() const { return catalog_; }

  /// The payload of a chunk, checked against the catalog: dtype, the chunk's shape, and that every element
  /// lies inside the payload and the payload inside its file. Thread-safe. CorruptError or MismatchError
  /// naming file, offset and tensor where it is not so.
  virtual Payload payload(size_t tensor, size_t chunk) const = 0;

  /// A value, read from its file where it lies in one. Thread-safe.
  virtual Value value(size_t index) const = 0;

  /// The bytes of a value that is stored as a torch.save archive of its own, unpacked where they are
  /// compressed. Nothing where the format keeps it in another way. Thread-safe.
  virtual std::optional<std::vector<std::byte>> value_archive(size_t /*index*/) const { return std::nullopt; }

  /// One of the catalog's files, opened once and kept. Thread-safe.
  virtual const InputFile& file(uint32_t index) const = 0;

  /// Compares what one of the catalog's files says of itself with the catalog, in a format where reading
  /// needs no such look; for verify(). CorruptError or MismatchError. Thread-safe.
  virtual void check_file(uint32_t /*index*/) const {}

 protected:
  Catalog catalog_;
};

/// Opens a DCP folder, a torch.save file, a folder of per-rank torch.save files, a safetensors file, a
/// Hugging Face folder (safetensors or pytorch_model*.bin), DCP's sharded safetensors or Spolia's own folder.
/// UnsupportedError, saying what was looked for, where it is none of them.
std::unique_ptr<Source> open_source(std::shared_ptr<const Store> store, const std::filesystem::path& path);

}  // namespace spolia
