#include "spolia/engine/file_sink.h"

namespace spolia {
namespace {

/// Where a region, contiguous in its tensor's row-major order, starts in the tensor's file.
int64_t file_offset(const TensorEntry& tensor, const Box& box) {
  const Dims strides = row_major_strides(addressable_shape(tensor.dtype, tensor.shape));
  int64_t first = 0;
  for (size_t d = 0; d < strides.size(); ++d) first += box.offsets[d] * strides[d];
  return tensor.extents[0].offset + first * element_bytes(tensor.dtype);
}

}  // namespace

void FileSink::put(std::span<const TileRegion> regions, std::span<std::byte> bytes) {
  struct Run {
    uint32_t file = 0;
    int64_t offset = 0;  // in the file
    int64_t begin = 0;   // in the tile
    int64_t length = 0;
  } run;
  auto write_run = [&] {
    if (run.length == 0) return;
    OutputFile& file = *files_[run.file];
    file.write(run.offset, bytes.subspan(static_cast<size_t>(run.begin), static_cast<size_t>(run.length)));
    // The disk starts now, not at the final sync: writing overlaps with what is still to be read.
    file.start_writeback(run.offset, run.length);
  };
  for (const TileRegion& region : regions) {
    const TensorEntry& tensor = target_.tensors[region.target];
    const uint32_t file = tensor.extents[0].file;
    const int64_t offset = file_offset(tensor, region.box);
    const int64_t length = region.box.numel() * element_bytes(tensor.dtype);
    if (run.file == file && run.offset + run.length == offset && run.begin + run.length == region.offset) {
      run.length += length;
    } else {
      write_run();
      run = {file, offset, region.offset, length};
    }
  }
  write_run();
}

}  // namespace spolia
