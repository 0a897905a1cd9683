#include "spolia/format/native/native_target.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/format/native/box_dealer.h"
#include "spolia/format/native/data_header.h"
#include "spolia/format/native/manifest.h"
#include "spolia/format/native/merged_manifest.h"
#include "spolia/format/native/tagged_json.h"
#include "spolia/format/torch/value_pickle.h"

namespace spolia {
namespace {

constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr size_t kMostArchives = 1'000'000;  // of one writer, where each names its own

std::string sha256_of(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish_hex();
}

HashedFile write_file(OutputFolder& folder, std::string name, std::span<const std::byte> bytes) {
  folder.create(name).write(0, bytes);
  return {std::move(name), std::ssize(bytes), sha256_of(bytes)};
}

/// Wider elements first, so that each chunk is aligned to its elements; otherwise the order they have.
void sort_by_width(const Catalog& catalog, std::vector<ChunkRef>& chunks) {
  std::ranges::stable_sort(chunks, std::greater(),
                           [&](const ChunkRef& ref) { return info(catalog.tensors[ref.tensor].dtype).bits; });
}

/// Every tensor's chunks are the boxes that the reader will derive or, of finer elements, the whole.
void check_tensors(const Catalog& catalog) {
  for (const TensorEntry& tensor : catalog.tensors) {
    if (tensor.layout != nullptr && tensor.layout->is_partial()) {
      throw UnsupportedError(
          "tensor {}: its layout {} holds operands of a sum or the like; reduce them first",
          quote(tensor.name), tensor.layout->text());
    }
    if (is_sub_byte(tensor.dtype) && tensor.chunks() > 0) addressable_box(tensor, 0);
  }
}

class SpoliaTarget final : public Target {
 public:
  explicit SpoliaTarget(TargetContents contents)
      : checksums_(contents.checksums), alone_(contents.alone), values_(std::move(contents.values)) {
    catalog_ = std::move(contents.catalog);
    order_ = std::move(contents.order);
    catalog_.format = "spolia";
    check_tensors(catalog_);
    std::vector<std::vector<ChunkRef>> by_writer(contents.writers);
    for (size_t t : order_) {
      for (size_t c = 0; c < catalog_.tensors[t].chunks(); ++c) {
        by_writer_of(t, c, by_writer).push_back({static_cast<uint32_t>(t), static_cast<uint32_t>(c)});
      }
    }
    check_layouts(by_writer);
    for (size_t writer = 0; writer < by_writer.size(); ++writer) {
      if (!by_writer[writer].empty()) add_file(writer, std::move(by_writer[writer]));
    }
  }

  int64_t checksum_block() const override { return checksums_ ? kBlockBytes : 0; }

  /// A manifest of this one part.
  std::string finish_file(uint32_t file, const BlockChecksums& checksums, OutputFile& open_file,
                          OutputFolder& folder) const override {
    Manifest manifest;
    manifest.parts = {{data_files_[file].writer, write_part_of(file, checksums, open_file, folder)}};
    return write_manifest(manifest);
  }

  std::vector<std::string> finish(const Source& source, std::span<const std::string> finished,
                                  OutputFile* /*first*/, OutputFolder& folder) const override {
    Manifest manifest = describe_tensors();
    for (const std::string& part : finished) {
      manifest.parts.push_back(read_manifest(part, kSpoliaManifest).parts.front());
    }
    std::ranges::sort(manifest.parts, {}, [](const auto& part) { return part.writer; });
    if (alone_ || finished.size() != data_files_.size()) {  // others' chunks are not in this catalog
      for (Manifest::Tensor& tensor : manifest.tensors) tensor.chunks.reset();
    }
    std::vector<std::string> left_out;
    // Names that no other writer gives.
    size_t archives = alone_ ? size_t{*alone_} * kMostArchives : 0;
    for (const TargetValue& value : values_) {
      if (auto content = write_value(source, value, archives, folder)) {
        manifest.values.push_back({value.name, *std::move(content), value.path});
      } else {
        left_out.push_back(value.name);
      }
    }
    OutputFile& file = folder.create(alone_ ? own_manifest_name(*alone_) : kSpoliaManifest);
    int64_t written = 0;
    write_manifest(manifest, [&](std::string_view piece) {
      file.write(written, bytes_of(piece));
      written += std::ssize(piece);
    });
    return left_out;
  }

 private:
  struct DataFile {
    uint32_t writer;
    int64_t bytes;
    std::vector<ChunkRef> chunks;  // in the order of their bytes
  };

  std::vector<ChunkRef>& by_writer_of(size_t tensor, size_t chunk,
                                      std::vector<std::vector<ChunkRef>>& by_writer) const {
    const TensorEntry& entry = catalog_.tensors[tensor];
    const uint32_t writer = entry.extents[chunk].file;
    if (writer < by_writer.size()) return by_writer[writer];
    throw InvalidArgumentError("tensor {}: a chunk for writer {}, but there are {}", quote(entry.name),
                               writer, by_writer.size());
  }

  /// Whether the reader will find the boxes that are written. Each rank's come in one order.
  void check_layouts(const std::vector<std::vector<ChunkRef>>& by_writer) const {
    BoxDealer dealer(catalog_);
    auto refuse = [&](size_t tensor, size_t writer) {
      const TensorEntry& entry = catalog_.tensors[tensor];
      throw InvalidArgumentError(
          "tensor {}: the chunks for writer {} are not what its layout {} gives that rank", quote(entry.name),
          writer, entry.layout->text());
    };
    for (size_t writer = 0; writer < by_writer.size(); ++writer) {
      dealer.start(static_cast<int64_t>(writer), by_writer[writer].size());
      for (const auto& [tensor, chunk] : by_writer[writer]) {
        if (!dealer.deals(tensor)) continue;
        const Box* due = dealer.next(tensor);
        if (due == nullptr || *due != catalog_.tensors[tensor].boxes[chunk]) refuse(tensor, writer);
      }
      if (auto tensor = dealer.unfinished()) refuse(*tensor, writer);
    }
  }

  void add_file(size_t writer, std::vector<ChunkRef> chunks) {
    sort_by_width(catalog_, chunks);
    const SafetensorsLayout layout = lay_out_data_file(catalog_, chunks);
    const uint32_t file = checked_cast<uint32_t>(catalog_.files.size(), "the number of files");
    for (size_t i = 0; i < chunks.size(); ++i) {
      TensorEntry& tensor = catalog_.tensors[chunks[i].tensor];
      Extent& extent = tensor.extents[chunks[i].chunk];
      extent = {file, layout.offsets[i], byte_size(tensor.dtype, tensor.boxes.sizes(chunks[i].chunk))};
    }
    catalog_.files.push_back(fmt::format("data-{:05}.safetensors", writer));
    data_files_.push_back({static_cast<uint32_t>(writer), layout.file_size, std::move(chunks)});
  }

  Manifest describe_tensors() const {
    Manifest manifest;
    manifest.block_bytes = checksum_block();
    manifest.tensors.reserve(catalog_.tensors.size());
    std::map<const Layout*, std::string> texts;
    std::map<std::string_view, uint32_t> numbers;  // of the texts
    for (const TensorEntry& entry : catalog_.tensors) {
      Manifest::Tensor tensor{entry.name,   entry.dtype,  entry.shape,         std::ssize(entry.extents),
                              std::nullopt, std::nullopt, entry.requires_grad, entry.memory_format,
                              entry.path};
      if (const Layout* layout = entry.layout.get()) {
        const auto [text, unknown] = texts.try_emplace(layout);
        if (unknown) text->second = layout->text();
        const auto [number, fresh] =
            numbers.try_emplace(text->second, static_cast<uint32_t>(manifest.layouts.size()));
        if (fresh) manifest.layouts.push_back(text->second);
        tensor.layout = number->second;
        tensor.replica = entry.replica;
      }
      manifest.tensors.push_back(std::move(tensor));
    }
    return manifest;
  }

  /// Writes a data file's header, and the file that describes its chunks.
  HashedFile write_part_of(size_t f, const BlockChecksums& checksums, OutputFile& file,
                           OutputFolder& folder) const {
    const DataFile& data = data_files_[f];
    PartFile part{catalog_.files[f], data.bytes, 0, std::nullopt, {}};
    {
      // Made a second time: kept, the headers of all files would take as much memory as the catalog.
      const std::string header = lay_out_data_file(catalog_, data.chunks).header;
      file.write(0, bytes_of(header));
      part.header_bytes = std::ssize(header);
      if (checksums_) part.header_crc = crc32(0, bytes_of(header));
    }
    part.chunks.reserve(data.chunks.size());
    for (const ChunkRef& ref : data.chunks) part.chunks.push_back(describe(ref, checksums));
    return write_file(folder, fmt::format("part-{:05}.json", data.writer), bytes_of(write_part(part)));
  }

  PartFile::Chunk describe(const ChunkRef& ref, const BlockChecksums& checksums) const {
    const TensorEntry& tensor = catalog_.tensors[ref.tensor];
    PartFile::Chunk chunk{ref.tensor, tensor.extents[ref.chunk].offset, std::nullopt, {}};
    const bool derived = tensor.layout != nullptr && tensor.replica && numel(tensor.shape) > 0;
    const Box box = tensor.boxes[ref.chunk];
    if (!derived && box != whole(tensor.shape)) chunk.box = box;
    const std::span<const uint32_t> crcs = checksums.of(ref.tensor, ref.chunk);
    chunk.crcs.assign(crcs.begin(), crcs.end());
    return chunk;
  }

  /// Nothing where the value can be written in neither way.
  static std::optional<std::variant<Value, HashedFile>> write_value(const Source& source,
                                                                    const TargetValue& value,
                                                                    size_t& archives, OutputFolder& folder) {
    Value tree = source.value(value.source);
    if (can_tag(tree)) return tree;
    const auto name = [&] { return fmt::format("value-{:05}.pt", archives++); };
    if (auto archive = source.value_archive(value.source)) return write_file(folder, name(), *archive);
    if (can_pickle(tree)) return write_file(folder, name(), bytes_of(write_value_archive(tree)));
    return std::nullopt;
  }

  bool checksums_;
  std::optional<uint32_t> alone_;
  std::vector<TargetValue> values_;
  std::vector<DataFile> data_files_;  // as the catalog's files
};

}  // namespace

std::unique_ptr<Target> make_spolia_target(TargetContents contents) {
  return std::make_unique<SpoliaTarget>(std::move(contents));
}

}  // namespace spolia
