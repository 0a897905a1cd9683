#include "spolia/format/torch/dcp_target.h"

#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/format/torch/tensor_pickle_writer.h"
#include "spolia/format/torch/torch_zip_writer.h"
#include "spolia/format/torch/value_pickle.h"

namespace spolia {
namespace {

ArchiveFrame frame_of(DType dtype, std::span<const int64_t> sizes, int64_t length, uint32_t crc32) {
  // As in PyTorch's own items, whether a gradient is required stands in the metadata alone.
  return frame_torch_archive(write_tensor_pickle(dtype, sizes), length, crc32);
}

struct FrameLengths {
  int64_t before = 0;
  int64_t after = 0;
};

/// The lengths of frames. Those of one tensor's chunks are mostly the same, so the last are kept.
class FrameRuler {
 public:
  FrameLengths measure(const TensorEntry& tensor, size_t chunk) {
    const Dims sizes(tensor.boxes.sizes(chunk));
    if (!known_ || dtype_ != tensor.dtype || sizes_ != sizes) {
      const ArchiveFrame frame = frame_of(tensor.dtype, sizes, tensor.extents[chunk].length, 0);
      known_ = {std::ssize(frame.before), std::ssize(frame.after)};
      dtype_ = tensor.dtype;
      sizes_ = sizes;
    }
    return *known_;
  }

 private:
  std::optional<FrameLengths> known_;
  DType dtype_ = DType::kFloat32;
  Dims sizes_;
};

/// The extent of a chunk's item from that of its elements.
Extent with_frame(const Extent& payload, const FrameLengths& lengths) {
  return {payload.file, payload.offset - lengths.before, lengths.before + payload.length + lengths.after};
}

/// Writes a value's archive, verbatim where the source has one; gives its length. Nothing where it cannot be
/// written.
std::optional<int64_t> write_value(const Source& source, size_t value, OutputFile& file, int64_t offset) {
  auto write = [&](std::span<const std::byte> archive) {
    file.write(offset, archive);
    return std::ssize(archive);
  };
  if (auto stored = source.value_archive(value)) return write(*stored);
  const Value read = source.value(value);
  if (!can_pickle(read)) return std::nullopt;
  return write(bytes_of(write_value_archive(read)));
}

class DcpTarget final : public Target {
 public:
  explicit DcpTarget(TargetContents contents)
      : values_(std::move(contents.values)),
        has_checksums_(contents.checksums),
        metadata_(contents.alone ? fmt::format("__{}.metadata", *contents.alone) : ".metadata") {
    catalog_ = std::move(contents.catalog);
    catalog_.format = "dcp";
    order_ = std::move(contents.order);
    name_files(contents.writers, contents.alone.value_or(0));
    place_chunks();
  }

  int64_t checksum_block() const override { return has_checksums_ ? BlockChecksums::kWholeChunk : 0; }

  Frame frame(size_t tensor, size_t chunk, std::span<const uint32_t> checksums) const override {
    const TensorEntry& entry = catalog_.tensors[tensor];
    ArchiveFrame frame = frame_of(entry.dtype, entry.boxes.sizes(chunk), entry.extents[chunk].length,
                                  checksums.empty() ? 0 : checksums[0]);
    return {std::move(frame.before), std::move(frame.after)};
  }

  std::vector<std::string> finish(const Source& source, std::span<const std::string> /*finished*/,
                                  OutputFile* first, OutputFolder& folder) const override {
    std::vector<DcpValueItem> items;
    std::vector<std::string> left_out;
    int64_t end = values_begin_;
    for (const TargetValue& value : values_) {
      if (auto length = write_value(source, value.source, *first, end)) {
        items.push_back({value.name, &value.path, {.file = 0, .offset = end, .length = *length}});
        end = checked_add(end, *length);
      } else {
        left_out.push_back(value.name);
      }
    }
    write_metadata(items, folder.create(metadata_));
    return left_out;
  }

 private:
  /// Names the files of writers that have something, and makes the extents' writers files. That of the one
  /// that writes values, where it is there, is the first.
  void name_files(size_t writers, size_t of_values) {
    if (writers == 0) throw InvalidArgumentError("a checkpoint needs a writer");
    std::vector<bool> has_something(writers);
    for (const TensorEntry& tensor : catalog_.tensors) {
      for (const Extent& extent : tensor.extents) {
        if (extent.file >= writers) {
          throw InvalidArgumentError("tensor {} has a chunk of writer {}, but there are only {}",
                                     quote(tensor.name), extent.file, writers);
        }
        has_something[extent.file] = true;
      }
    }
    if (!values_.empty()) has_something[of_values] = true;
    std::vector<uint32_t> file_of(writers);
    for (size_t writer = 0; writer < writers; ++writer) {
      if (!has_something[writer]) continue;
      file_of[writer] = static_cast<uint32_t>(catalog_.files.size());
      catalog_.files.push_back(fmt::format("__{}_0.distcp", writer));
    }
    for (TensorEntry& tensor : catalog_.tensors) {
      for (Extent& extent : tensor.extents) extent.file = file_of[extent.file];
    }
  }

  void place_chunks() {
    std::vector<int64_t> ends(catalog_.files.size());
    FrameRuler ruler;
    for (size_t t : order_) {
      TensorEntry& tensor = catalog_.tensors[t];
      try {
        for (size_t c = 0; c < tensor.chunks(); ++c) {
          const FrameLengths lengths = ruler.measure(tensor, c);
          Extent& extent = tensor.extents[c];
          int64_t& end = ends[extent.file];
          extent.offset = checked_add(end, lengths.before);
          end = checked_add(checked_add(extent.offset, extent.length), lengths.after);
        }
      } catch (const Error& error) {
        rethrow_with_context(error, fmt::format("tensor {}", quote(tensor.name)));
      }
    }
    if (!values_.empty()) values_begin_ = ends[0];
  }

  void write_metadata(std::span<const DcpValueItem> values, OutputFile& file) const {
    FrameRuler ruler;
    auto item_of = [&](size_t t, size_t c) {
      const TensorEntry& tensor = catalog_.tensors[t];
      return with_frame(tensor.extents[c], ruler.measure(tensor, c));
    };
    int64_t written = 0;
    write_dcp_metadata(catalog_, values, {.item_of = item_of}, [&](std::string_view piece) {
      file.write(written, bytes_of(piece));
      written += std::ssize(piece);
    });
  }

  std::vector<TargetValue> values_;
  bool has_checksums_;
  std::string metadata_;      // its file
  int64_t values_begin_ = 0;  // in the first file
};

}  // namespace

std::unique_ptr<Target> make_dcp_target(TargetContents contents) {
  return std::make_unique<DcpTarget>(std::move(contents));
}

}  // namespace spolia
