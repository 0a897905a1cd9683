#include "spolia/checkpoint/pieces.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

class MemoryFile final : public InputFile {
 public:
  MemoryFile(std::string name, std::span<const std::byte> bytes, Device device)
      : path_(std::move(name)), bytes_(bytes), device_(device) {}

  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes_); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (out.empty()) return;
    if (device_ == Device{}) {
      std::memcpy(out.data(), bytes_.data() + offset, out.size());
    } else {
      backend_of(device_).copy_to_host(out.data(), bytes_.data() + offset, std::ssize(out));
    }
  }

 private:
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
  Device device_;
};

/// The bytes from the first element to the last.
std::span<const std::byte> span_of(const View& view) {
  if (view.bytes() == 0 || is_sub_byte(view.dtype)) return {view.data, static_cast<size_t>(view.bytes())};
  int64_t last = 0;
  for (size_t d = 0; d < view.shape.size(); ++d) last += (view.shape[d] - 1) * view.strides[d];
  return {view.data, static_cast<size_t>(last + element_bytes(view.dtype))};
}

class MemorySource final : public Source {
 public:
  MemorySource(std::vector<MemoryTensor> tensors, std::vector<ValueEntry> values)
      : tensors_(std::move(tensors)) {
    catalog_.format = "memory";
    for (const MemoryTensor& tensor : tensors_) {
      const auto file = static_cast<uint32_t>(files_.size());
      check_strides(tensor);
      files_.emplace_back(fmt::format("the memory of tensor {}", quote(tensor.name)), span_of(tensor.memory),
                          tensor.memory.device);
      catalog_.files.push_back(tensor.name);
      catalog_.tensors.push_back(whole_tensor(tensor.name, tensor.memory.dtype, tensor.memory.shape,
                                              {file, 0, files_.back().size()}));
    }
    catalog_.values = std::move(values);
  }

  Payload payload(size_t tensor, size_t) const override {
    const View& memory = tensors_[tensor].memory;
    Payload payload;
    payload.stored = catalog_.tensors[tensor].extents[0];
    payload.length = payload.stored.length;
    if (is_sub_byte(memory.dtype)) {
      payload.strides = {1};
    } else {
      for (int64_t stride : memory.strides) payload.strides.push_back(stride / element_bytes(memory.dtype));
    }
    return payload;
  }
  Value value(size_t index) const override { return catalog_.values[index].value; }
  const InputFile& file(uint32_t index) const override { return files_[index]; }

 private:
  static void check_strides(const MemoryTensor& tensor) {
    const View& memory = tensor.memory;
    const int64_t width = element_bytes(memory.dtype);
    const bool plain = std::ranges::all_of(
        memory.strides, [&](int64_t stride) { return stride >= 0 && stride % width == 0; });
    if (plain && (memory.is_dense() || !is_sub_byte(memory.dtype))) return;
    throw InvalidArgumentError(
        "tensor {}: memory with the strides {} (in bytes) cannot be saved; make it dense", quote(tensor.name),
        list_text(memory.strides));
  }

  std::vector<MemoryTensor> tensors_;
  std::vector<MemoryFile> files_;
};

}  // namespace

PieceTarget::PieceTarget(const Target& whole, std::vector<Piece> pieces)
    : whole_(whole), pieces_(std::move(pieces)) {
  const Catalog& catalog = whole.catalog();
  catalog_.format = catalog.format;
  catalog_.root = catalog.root;
  catalog_.files = catalog.files;
  for (const Piece& piece : pieces_) {
    const TensorEntry& tensor = catalog.tensors[piece.tensor];
    catalog_.tensors.push_back(whole_tensor(tensor.name, tensor.dtype, tensor.boxes.sizes(piece.chunk),
                                            tensor.extents[piece.chunk]));
  }
  order_.resize(pieces_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::ranges::stable_sort(order_, {}, [&](size_t p) {
    const Extent& extent = catalog_.tensors[p].extents[0];
    return std::pair(extent.file, extent.offset);
  });
}

void PieceTarget::put_checksums(const BlockChecksums& of_pieces, BlockChecksums& of_target) const {
  for (size_t p = 0; p < pieces_.size(); ++p) {
    std::ranges::copy(of_pieces.of(p, 0), of_target.of(pieces_[p].tensor, pieces_[p].chunk).begin());
  }
}

Target::Frame PieceTarget::frame(size_t tensor, size_t, std::span<const uint32_t> checksums) const {
  return whole_.frame(pieces_[tensor].tensor, pieces_[tensor].chunk, checksums);
}

std::string PieceTarget::finish_file(uint32_t file, const BlockChecksums& checksums, OutputFile& open_file,
                                     OutputFolder& folder) const {
  return whole_.finish_file(file, checksums, open_file, folder);
}

std::vector<std::string> PieceTarget::finish(const Source& source, std::span<const std::string> finished,
                                             OutputFile* first, OutputFolder& folder) const {
  return whole_.finish(source, finished, first, folder);
}

std::unique_ptr<Source> source_in_memory(std::vector<MemoryTensor> tensors, std::vector<ValueEntry> values) {
  return std::make_unique<MemorySource>(std::move(tensors), std::move(values));
}

View view_of_box(const View& memory, const Box& all, const Box& box) {
  View view = memory;
  for (size_t d = 0; d < box.ndim(); ++d) {
    view.data += (box.offsets[d] - all.offsets[d]) * memory.strides[d];
  }
  view.shape = box.sizes;
  return view;
}

}  // namespace spolia
