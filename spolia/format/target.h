// A target: a checkpoint folder to be written, in whatever format.
//
// A format gives every chunk its place before a byte of a tensor is read, so that a plan can say what goes
// where and threads may write in any order. What depends on the bytes themselves, their checksums, is written
// beside a chunk when it is complete (frames), when its file is (finish_file()), and at the very end
// (finish()). Ranks that write together each make the target as far as their own files go; the one that
// finishes it for all knows of the others' what finish_file() said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/format/source.h"
#include "spolia/state/catalog.h"
#include "spolia/store/output_folder.h"

namespace spolia {

/// A value to be written: value `source` of the source's catalog, under a name and path of its own.
struct TargetValue {
  std::string name;
  KeyPath path;
  size_t source = 0;
};

/// What is to be written, before a format gives it places.
struct TargetContents {
  /// The tensors, with their chunks: boxes that tile them. An extent's `file` is the number of the writer
  /// whose file gets the chunk, its `length` the chunk's bytes. No box is empty, but that of a tensor without
  /// elements, which has one. No files and no values.
  Catalog catalog;
  /// All tensors, in the order in which they lie in files.
  std::vector<size_t> order;
  std::vector<TargetValue> values;  // sorted by name; no name is a tensor's
  /// How many writers there are: ranks, or files to be filled. Some may have nothing to write.
  size_t writers = 1;
  /// Whether the format's checksums are computed and written.
  bool checksums = true;
  /// A writer that writes without the others, its own chunks and metadata alone: the folder is whole when all
  /// have.
  std::optional<uint32_t> alone;
};

/// The CRC-32s of a target's chunks: one for each block of `block_bytes` of a chunk's bytes, counted from its
/// start, the last block shorter. A chunk without bytes has none. A plain table: different entries may be
/// written by different threads.
class BlockChecksums {
 public:
  static constexpr int64_t kWholeChunk = std::numeric_limits<int64_t>::max();

  /// For the catalog's chunks, by the lengths of their extents; all 0 at first. `block_bytes` of 0: none.
  BlockChecksums(const Catalog& catalog, int64_t block_bytes);

  int64_t block_bytes() const { return block_bytes_; }
  std::span<const uint32_t> of(size_t tensor, size_t chunk) const;
  std::span<uint32_t> of(size_t tensor, size_t chunk);

 private:
  int64_t block_bytes_;
  std::vector<size_t> first_chunk_;  // of each tensor, among all chunks; one more at the end
  std::vector<size_t> first_block_;  // of each chunk, in crcs_; one more at the end
  std::vector<uint32_t> crcs_;
};

/// Immutable; every method may be called by any thread.
class Target {
 public:
  virtual ~Target() = default;

  /// What will be there: the files, and for each chunk the extent of its elements' bytes, row-major. Extents
  /// do not overlap. A file may have more than its chunks: their frames, a header.
  const Catalog& catalog() const { return catalog_; }
  /// All tensors, in the order in which they lie in files.
  std::span<const size_t> order() const { return order_; }

  /// How many bytes of a chunk have a checksum of their own; BlockChecksums::kWholeChunk; 0 for none.
  virtual int64_t checksum_block() const { return 0; }

  /// What stands directly before and after a chunk's bytes in its file. `checksums`: those of the chunk, as
  /// BlockChecksums has them; empty where checksum_block() is 0.
  struct Frame {
    std::string before;
    std::string after;
  };
  virtual Frame frame(size_t /*tensor*/, size_t /*chunk*/, std::span<const uint32_t> /*checksums*/) const {
    return {};
  }

  /// The names of values that the format cannot hold, as far as that is known without reading them.
  virtual std::vector<std::string> left_out() const { return {}; }

  /// Writes what else belongs to one of the catalog's files, in it and beside it: its header, what describes
  /// its chunks. Returns what finish() has to know of it.
  virtual std::string finish_file(uint32_t /*file*/, const BlockChecksums& /*checksums*/,
                                  OutputFile& /*open_file*/, OutputFolder& /*folder*/) const {
    return {};
  }

  /// Writes whatever else belongs there: values, indices, and last of all the file without which the folder
  /// is no checkpoint. `finished`: what finish_file() said of all files of all writers, in any order.
  /// `first`: the catalog's first file, open; nullptr where it has none. `folder`: where further files are
  /// made. Returns the names of all values that the format cannot hold, which are left out.
  virtual std::vector<std::string> finish(const Source& source, std::span<const std::string> finished,
                                          OutputFile* first, OutputFolder& folder) const = 0;

 protected:
  Catalog catalog_;
  std::vector<size_t> order_;
};

/// Finishes every file, then the target, where one writes everything. `files`: the catalog's, open.
std::vector<std::string> finish_all(const Target& target, const Source& source,
                                    const BlockChecksums& checksums, std::span<OutputFile* const> files,
                                    OutputFolder& folder);

}  // namespace spolia
