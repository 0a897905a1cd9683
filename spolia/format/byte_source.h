// Bytes to read at random, whatever lies between them and their file: nothing, or a compressed stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spolia/format/source.h"
#include "spolia/store/store.h"

namespace spolia {

/// A run of bytes. One object, one thread; several objects may share a file.
class ByteSource {
 public:
  virtual ~ByteSource() = default;

  /// The number of bytes. A compressed stream is decoded to its end to know it, once.
  virtual int64_t size() = 0;
  /// Fills `out` from `offset`. CorruptError where the range is not inside, or the stream is damaged.
  virtual void read(int64_t offset, std::span<std::byte> out) = 0;
  /// Where the bytes come from, for messages: "/a/__0_0.distcp", from byte 4096.
  virtual std::string where() const = 0;
};

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// `length` bytes of `file` from `offset`, decoded. `file` must outlive the result. CorruptError where the
/// range is not inside the file.
///
/// Compressed streams are decoded forward in constant memory: reading in rising order decodes once, a step
/// back starts over. size() keeps the first and the last bytes (all, up to 1 MiB), so that looking into a
/// small item costs one decoding. CorruptError where the stream is damaged, ends early, has bytes after its
/// end or decodes to more than `limit` bytes; UnsupportedError for a zstd frame whose window is over 128 MiB.
std::unique_ptr<ByteSource> open_bytes(const InputFile& file, int64_t offset, int64_t length, Codec codec,
                                       int64_t limit = kNoLimit);

/// The same over `length` bytes of another source, which must outlive the result.
std::unique_ptr<ByteSource> open_bytes(ByteSource& outer, int64_t offset, int64_t length, Codec codec,
                                       int64_t limit = kNoLimit);

/// `bytes` (a plain one) with its first and last `ends` bytes read at once and kept; all of it where it is
/// no longer than 8 * `ends`. For containers that keep their tables at both ends.
std::unique_ptr<ByteSource> keep_ends(std::unique_ptr<ByteSource> bytes, int64_t ends);

/// Bytes in memory.
std::unique_ptr<ByteSource> bytes_in_memory(std::vector<std::byte> bytes, std::string where);

/// All bytes of `source`. Precondition: the caller has bounded its size.
std::vector<std::byte> read_all(ByteSource& source);

}  // namespace spolia
