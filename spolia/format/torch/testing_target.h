// For tests of targets: what the executor does with one, done naively, and contents to give it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "spolia/base/checked.h"
#include "spolia/format/target.h"
#include "spolia/format/torch/testing.h"

namespace spolia::testing {

/// A tensor's whole bytes, row-major.
using BytesOfTensor = std::function<std::vector<std::byte>(size_t tensor)>;

/// The elements of a box of a tensor with the bytes `whole`.
inline std::vector<std::byte> cut_out(const TensorEntry& entry, const Box& box,
                                      std::span<const std::byte> whole) {
  const auto width = static_cast<size_t>(element_bytes(entry.dtype));
  const Dims strides = row_major_strides(addressable_shape(entry.dtype, entry.shape));
  std::vector<std::byte> out;
  Dims index(box.ndim());
  for (int64_t i = 0; i < box.numel(); ++i) {
    size_t from = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      from += static_cast<size_t>((box.offsets[d] + index[d]) * strides[d]);
    }
    const auto element = whole.subspan(from * width, width);
    out.insert(out.end(), element.begin(), element.end());
    for (size_t d = index.size(); d-- > 0 && ++index[d] == box.sizes[d];) index[d] = 0;
  }
  return out;
}

/// Writes the target into the new folder `path`; gives the names of the values that were left out.
inline std::vector<std::string> write_target(const Target& target, const Source& source,
                                             const BytesOfTensor& bytes_of_tensor, Store& store,
                                             const std::filesystem::path& path) {
  store.create_folder(path);
  OutputFolder folder(store, path);
  const Catalog& catalog = target.catalog();
  std::vector<OutputFile*> files;
  for (const std::string& name : catalog.files) files.push_back(&folder.create(name));
  BlockChecksums checksums(catalog, target.checksum_block());
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const std::vector<std::byte> whole = bytes_of_tensor(t);
    for (size_t c = 0; c < catalog.tensors[t].chunks(); ++c) {
      const Extent& extent = catalog.tensors[t].extents[c];
      const auto bytes = cut_out(catalog.tensors[t], addressable_box(catalog.tensors[t], c), whole);
      EXPECT_EQ(std::ssize(bytes), extent.length);
      std::span<uint32_t> crcs = checksums.of(t, c);
      for (size_t b = 0; b < crcs.size(); ++b) {
        const auto begin = static_cast<size_t>(static_cast<int64_t>(b) * target.checksum_block());
        const auto length = std::min(bytes.size() - begin, static_cast<size_t>(target.checksum_block()));
        crcs[b] = crc32(0, std::span(bytes).subspan(begin, length));
      }
      const Target::Frame frame = target.frame(t, c, crcs);
      files[extent.file]->write(extent.offset - std::ssize(frame.before), bytes_of(frame.before));
      files[extent.file]->write(extent.offset, bytes);
      files[extent.file]->write(extent.offset + extent.length, bytes_of(frame.after));
    }
  }
  std::vector<std::string> left_out = finish_all(target, source, checksums, files, folder);
  folder.sync(1);
  return left_out;
}

/// All of a source, each tensor cut along dim 0 into at most `pieces`, which go to one writer after the
/// other.
inline TargetContents contents_of(const Catalog& catalog, size_t writers, int64_t pieces) {
  TargetContents contents;
  contents.writers = writers;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    TensorEntry entry = catalog.tensors[t];
    std::vector<Box> boxes{whole(entry.shape)};
    if (!boxes[0].empty() && !entry.shape.empty()) {
      boxes = split(boxes[0], 0, ceil_div(entry.shape[0], pieces));
    }
    entry.boxes = BoxList(entry.shape.size());
    entry.extents.clear();
    for (const Box& box : boxes) {
      const auto writer = static_cast<uint32_t>((t + entry.extents.size()) % writers);
      entry.extents.push_back({writer, 0, byte_size(entry.dtype, box.sizes)});
      entry.boxes.add(box);
    }
    contents.order.push_back(t);
    contents.catalog.tensors.push_back(std::move(entry));
  }
  for (size_t v = 0; v < catalog.values.size(); ++v) {
    contents.values.push_back({catalog.values[v].name, catalog.values[v].path, v});
  }
  return contents;
}

}  // namespace spolia::testing
