// A source: a checkpoint opened for reading, in whatever format. open_source() finds out which.
//
// The catalog tells what is there and which item of which file holds it. What lies deeper - where in an item
// the elements start, their strides, how they are packed - costs a read of the item, so it is resolved at
// first use and cached.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "spolia/state/catalog.h"
#include "spolia/store/store.h"

namespace spolia {

enum class Codec : uint8_t {
  kNone,     // `stored` is the bytes themselves
  kZstd,     // `stored` is one zstd frame
  kDeflate,  // `stored` is one raw deflate stream
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

  /// One of the catalog's files, opened once and kept. Thread-safe.
  virtual const InputFile& file(uint32_t index) const = 0;

 protected:
  Catalog catalog_;
};

/// Opens a DCP folder, a torch.save file, a folder of per-rank torch.save files, a safetensors file, a
/// Hugging Face folder (safetensors or pytorch_model*.bin) or DCP's sharded safetensors. UnsupportedError,
/// saying what was looked for, where it is none of them.
std::unique_ptr<Source> open_source(std::shared_ptr<const Store> store, const std::filesystem::path& path);

}  // namespace spolia
