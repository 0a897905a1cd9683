#include "spolia/engine/file_sink.h"

#include <utility>

#include "spolia/base/hash.h"

namespace spolia {
namespace {

constexpr size_t kStagingBytes = size_t{1} << 20;
constexpr int64_t kWritebackBytes = int64_t{64} << 10;

/// Calls `use(offset in the chunk, offset in the region, length)`, in bytes, for each run of the region that
/// is contiguous in the chunk. Both boxes are row-major where they lie; the region is inside the chunk.
template <class Use>
void for_each_run(const Box& region, const Box& chunk, int64_t width, const Use& use) {
  const Dims strides = row_major_strides(chunk.sizes);
  size_t outer = region.ndim();  // the dims before this one are walked, the rest is one run
  int64_t run = width;
  while (outer > 0) {
    --outer;
    run *= region.sizes[outer];
    if (region.sizes[outer] != chunk.sizes[outer]) break;
  }
  Dims index(outer);
  const int64_t runs = numel(std::span<const int64_t>(region.sizes).first(outer));
  for (int64_t r = 0; r < runs; ++r) {
    int64_t first = 0;
    for (size_t d = 0; d < region.ndim(); ++d) {
      first += (region.offsets[d] - chunk.offsets[d] + (d < outer ? index[d] : 0)) * strides[d];
    }
    use(first * width, r * run, run);
    for (size_t d = outer; d-- > 0;) {
      if (++index[d] < region.sizes[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

/// Writes runs of bytes; those that follow each other in a file go out together.
class FileSink::Writer {
 public:
  Writer(std::span<OutputFile* const> files, std::vector<std::byte>& staging)
      : files_(files), staging_(staging) {}

  /// `bytes` stay as they are until flush().
  void write(uint32_t file, int64_t offset, std::span<const std::byte> bytes) {
    if (bytes.empty()) return;
    const bool follows = !run_.empty() && file == file_ && offset == offset_ + std::ssize(run_);
    if (follows && run_.data() + run_.size() == bytes.data()) {
      run_ = {run_.data(), run_.size() + bytes.size()};
    } else if (follows && run_.size() + bytes.size() <= kStagingBytes) {
      stage();
      append(bytes);
    } else {
      flush();
      file_ = file;
      offset_ = offset;
      run_ = bytes;
    }
  }

  /// The same for bytes that go away at once.
  void write_copy(uint32_t file, int64_t offset, std::string_view text) {
    if (text.empty()) return;
    write(file, offset, bytes_of(text));
    stage();
  }

  void flush() {
    if (run_.empty()) return;
    OutputFile& file = *files_[file_];
    file.write(offset_, run_);
    // The disk starts now, not at the final sync: writing overlaps with what is still to be read. Not for
    // short runs: their pages get more from the tiles beside, which would have to wait until the disk has
    // them. Their chunk goes as a whole, once it is complete.
    if (std::ssize(run_) >= kWritebackBytes) file.start_writeback(offset_, std::ssize(run_));
    run_ = {};
  }

 private:
  void stage() {
    if (run_.empty() || run_.data() == staging_.data()) return;
    staging_.clear();
    append(std::exchange(run_, {}));
  }
  void append(std::span<const std::byte> bytes) {
    staging_.reserve(kStagingBytes);
    staging_.insert(staging_.end(), bytes.begin(), bytes.end());
    run_ = staging_;
  }

  std::span<OutputFile* const> files_;
  std::vector<std::byte>& staging_;
  uint32_t file_ = 0;
  int64_t offset_ = 0;
  std::span<const std::byte> run_;  // what is to be written: in the tile, or in staging_
};

FileSink::FileSink(const Target& target, std::span<OutputFile* const> files, BlockChecksums& checksums,
                   size_t workers)
    : target_(target),
      files_(files),
      checksums_(checksums),
      progress_(target.catalog(), checksums),
      staging_(workers) {}

void FileSink::put(size_t worker, std::span<const TileRegion> regions, std::span<std::byte> bytes) {
  Writer writer(files_, staging_[worker]);
  for (const TileRegion& region : regions) {
    put_region(writer, region, bytes.subspan(static_cast<size_t>(region.offset)));
  }
  writer.flush();
}

std::optional<TileSink::Place> FileSink::place_of(const TileRegion& region) const {
  if (checksums_.block_bytes() != 0) return std::nullopt;
  const TensorEntry& tensor = target_.catalog().tensors[region.target];
  const Extent& extent = tensor.extents[region.chunk];
  const int64_t width = element_bytes(tensor.dtype);
  std::optional<Place> place;
  for_each_run(region.box, addressable_box(tensor, region.chunk), width,
               [&](int64_t in_chunk, int64_t, int64_t length) {
                 if (length == region.box.numel() * width) {
                   place = Place{files_[extent.file], extent.offset + in_chunk};
                 }
               });
  return place;
}

void FileSink::put_copied(size_t worker, std::span<const TileRegion> regions) {
  Writer writer(files_, staging_[worker]);
  for (const TileRegion& region : regions) put_region(writer, region, {});
  writer.flush();
}

/// Writes the region's bytes, unless there are none because they were copied, and the frame of a chunk that
/// is complete with them.
void FileSink::put_region(Writer& writer, const TileRegion& region, std::span<const std::byte> bytes) {
  const TensorEntry& tensor = target_.catalog().tensors[region.target];
  const Extent& extent = tensor.extents[region.chunk];
  const Box chunk = addressable_box(tensor, region.chunk);
  bool scattered = false;  // complete now, from short runs
  for_each_run(region.box, chunk, element_bytes(tensor.dtype),
               [&](int64_t in_chunk, int64_t in_region, int64_t length) {
                 std::span<const std::byte> run;
                 if (!bytes.empty()) {
                   run = bytes.subspan(static_cast<size_t>(in_region), static_cast<size_t>(length));
                 }
                 Target::Frame frame;
                 const bool complete = progress_.add(region.target, region.chunk, in_chunk, length, run);
                 if (complete) {
                   frame = target_.frame(region.target, region.chunk,
                                         std::as_const(checksums_).of(region.target, region.chunk));
                 }
                 writer.write_copy(extent.file, extent.offset - std::ssize(frame.before), frame.before);
                 writer.write(extent.file, extent.offset + in_chunk, run);
                 writer.write_copy(extent.file, extent.offset + extent.length, frame.after);
                 if (complete && length < kWritebackBytes) scattered = extent.length >= kWritebackBytes;
               });
  if (!scattered) return;
  writer.flush();
  files_[extent.file]->start_writeback(extent.offset, extent.length);
}

void FileSink::finish() {
  const Catalog& catalog = target_.catalog();
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const std::vector<Extent>& extents = catalog.tensors[t].extents;
    for (size_t c = 0; c < extents.size(); ++c) {
      if (extents[c].length > 0) continue;
      const Target::Frame frame = target_.frame(t, c, {});
      const std::string text = frame.before + frame.after;
      if (text.empty()) continue;
      files_[extents[c].file]->write(extents[c].offset - std::ssize(frame.before), bytes_of(text));
    }
  }
}

}  // namespace spolia
