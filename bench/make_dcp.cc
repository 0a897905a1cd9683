#include "bench/make_dcp.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/format/torch/pickle_writer.h"
#include "spolia/store/store.h"

namespace spolia::bench {
namespace {

constexpr DType kDType = DType::kFloat32;
constexpr int64_t kPiece = int64_t{1} << 20;

/// Writes a file front to back.
class Appender {
 public:
  explicit Appender(std::unique_ptr<OutputFile> file) : file_(std::move(file)) {}

  int64_t offset() const { return written_ + static_cast<int64_t>(held_.size()); }
  void append(std::string_view bytes) {
    held_ += bytes;
    if (held_.size() >= static_cast<size_t>(kPiece)) flush();
  }
  void finish() {
    flush();
    file_->sync();
  }

 private:
  void flush() {
    file_->write(written_, bytes_of(held_));
    written_ += static_cast<int64_t>(held_.size());
    held_.clear();
  }

  std::unique_ptr<OutputFile> file_;
  std::string held_;
  int64_t written_ = 0;
};

/// Random bits that are the same for the same seed (Vigna's splitmix64).
class RandomBits {
 public:
  explicit RandomBits(uint64_t seed) : state_(seed) {}
  void fill(std::span<uint64_t> words) {
    for (uint64_t& word : words) {
      uint64_t z = state_ += 0x9E3779B97F4A7C15;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
      word = z ^ (z >> 31);
    }
  }

 private:
  uint64_t state_;
};

/// Appends numbers of one type, little-endian.
template <class T>
void put(std::string& out, std::initializer_list<T> values) {
  for (T value : values) out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// A zip as torch.save writes it: sizes and CRC after the data, data at multiples of 64 bytes.
class TorchZip {
 public:
  explicit TorchZip(Appender& out) : out_(out), start_(out.offset()) {}

  void record(const std::string& name, std::string_view data) {
    begin(name);
    add(data);
    end();
  }

  /// The data of one record in pieces.
  void begin(const std::string& name) {
    Record record{.name = "archive/" + name, .header = checked_cast<uint32_t>(out_.offset() - start_)};
    std::string header = "PK\3\4";
    put<uint16_t>(header, {0, kFlags, 0, 0, 0});
    put<uint32_t>(header, {0, 0, 0});
    const size_t unpadded = record.header + 30 + record.name.size() + 4;
    const auto padding = static_cast<uint16_t>((64 - unpadded % 64) % 64);
    put<uint16_t>(header, {static_cast<uint16_t>(record.name.size()), static_cast<uint16_t>(4 + padding)});
    header += record.name + "FB";
    put<uint16_t>(header, {padding});
    header.append(padding, 'Z');
    out_.append(header);
    records_.push_back(std::move(record));
  }
  void add(std::string_view data) {
    Record& record = records_.back();
    record.crc = crc32(record.crc, bytes_of(data));
    record.size += data.size();
    out_.append(data);
  }
  void end() {
    const Record& record = records_.back();
    const auto size = checked_cast<uint32_t>(record.size, "the size of a record");
    std::string descriptor = "PK\7\10";
    put<uint32_t>(descriptor, {record.crc, size, size});
    out_.append(descriptor);
  }

  void finish() {
    std::string directory;
    for (const Record& record : records_) {
      directory += "PK\1\2";
      put<uint16_t>(directory, {0, 0, kFlags, 0, 0, 0});
      const auto size = static_cast<uint32_t>(record.size);
      put<uint32_t>(directory, {record.crc, size, size});
      put<uint16_t>(directory, {static_cast<uint16_t>(record.name.size()), 0, 0, 0, 0});
      put<uint32_t>(directory, {0, record.header});
      directory += record.name;
    }
    const auto begin = checked_cast<uint32_t>(out_.offset() - start_);
    const auto size = static_cast<uint32_t>(directory.size());
    const auto count = static_cast<uint16_t>(records_.size());
    std::string ends = "PK\6\6";
    put<uint64_t>(ends, {44});
    put<uint16_t>(ends, {0x031E, 0x2D});
    put<uint32_t>(ends, {0, 0});
    put<uint64_t>(ends, {count, count, size, begin});
    ends += "PK\6\7";
    put<uint32_t>(ends, {0});
    put<uint64_t>(ends, {uint64_t{begin} + size});
    put<uint32_t>(ends, {1});
    ends += "PK\5\6";
    put<uint16_t>(ends, {0, 0, count, count});
    put<uint32_t>(ends, {size, begin});
    put<uint16_t>(ends, {0});
    out_.append(directory + ends);
  }

 private:
  static constexpr uint16_t kFlags = 0x0808;  // a descriptor follows the data; names are UTF-8

  struct Record {
    std::string name;
    uint32_t header = 0;
    uint32_t crc = 0;
    size_t size = 0;
  };
  Appender& out_;
  int64_t start_;
  std::vector<Record> records_;
};

/// The pickle of a float32 tensor that is dense and has storage 0 to itself.
std::string tensor_pickle(const Dims& shape) {
  pickle::Writer out;
  out.global("torch._utils", "_rebuild_tensor_v2");
  out.mark();
  out.mark();
  out.string("storage");
  out.global("torch", "FloatStorage");
  out.string("0");
  out.string("cpu");
  out.integer(numel(shape));
  out.tuple_from_mark();
  out.persistent();
  out.integer(0);
  out.tuple(shape);
  out.tuple(row_major_strides(shape));
  out.boolean(false);
  out.global("collections", "OrderedDict");
  out.empty_tuple();
  out.reduce();
  out.tuple_from_mark();
  out.reduce();
  return out.finish();
}

/// Appends the item of a chunk of that shape.
Extent append_item(Appender& out, uint32_t file, const Dims& shape, uint64_t seed) {
  const int64_t begin = out.offset();
  TorchZip zip(out);
  zip.record("data.pkl", tensor_pickle(shape));
  zip.record(".format_version", "1");
  zip.record(".storage_alignment", "64");
  zip.record("byteorder", "little");
  zip.begin("data/0");
  RandomBits random(seed);
  std::vector<uint64_t> words(kPiece / 8);
  for (int64_t rest = byte_size(kDType, shape); rest > 0; rest -= kPiece) {
    const auto bytes = static_cast<size_t>(std::min(rest, kPiece));
    random.fill(std::span(words).first((bytes + 7) / 8));
    zip.add({reinterpret_cast<const char*>(words.data()), bytes});
  }
  zip.end();
  zip.record("version", "3\n");
  zip.record(".data/serialization_id", fmt::format("{:040}", seed));
  zip.finish();
  return {file, begin, out.offset() - begin};
}

/// The part of a tensor that a rank stores; nothing where it stores none.
std::optional<Box> part_of(const Dims& shape, size_t tensor, Sharding sharding, int64_t rank, int64_t ranks) {
  Box box = whole(shape);
  if (sharding == Sharding::kWhole) {
    return static_cast<int64_t>(tensor) % ranks == rank ? std::optional(box) : std::nullopt;
  }
  const size_t dim = sharding == Sharding::kColumns && shape.size() > 1 ? 1 : 0;
  const int64_t most = ceil_div(shape[dim], ranks);
  box.offsets[dim] = std::min(shape[dim], rank * most);
  box.sizes[dim] = std::min(most, shape[dim] - box.offsets[dim]);
  return box;
}

}  // namespace

std::vector<NamedShape> llama_like_shapes(int64_t bytes) {
  constexpr int64_t kLayers = 8;
  const double squares = static_cast<double>(bytes) / 4 / kLayers / 12;  // a layer has 12 hidden x hidden
  const int64_t hidden = std::max<int64_t>(64, static_cast<int64_t>(std::sqrt(squares)) / 64 * 64);
  std::vector<NamedShape> shapes;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    auto add = [&](std::string_view name, Dims shape) {
      shapes.push_back({fmt::format("model.layers.{}.{}.weight", layer, name), std::move(shape)});
    };
    for (std::string_view name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      add(fmt::format("self_attn.{}", name), {hidden, hidden});
    }
    add("mlp.up_proj", {4 * hidden, hidden});
    add("mlp.down_proj", {hidden, 4 * hidden});
    add("input_layernorm", {hidden});
    add("post_attention_layernorm", {hidden});
  }
  return shapes;
}

std::vector<NamedShape> small_shapes(int64_t count, int64_t bytes) {
  std::vector<NamedShape> shapes;
  for (int64_t i = 0; i < count; ++i) shapes.push_back({fmt::format("model.bias.{:06}", i), {bytes / 4}});
  return shapes;
}

int64_t make_dcp(const std::filesystem::path& folder, const std::vector<NamedShape>& tensors,
                 Sharding sharding, int64_t ranks) {
  const auto store = posix_store();
  store->create_folder(folder);
  Catalog catalog;
  int64_t bytes = 0;
  for (const NamedShape& tensor : tensors) {
    TensorEntry entry;
    entry.name = tensor.name;
    entry.dtype = kDType;
    entry.shape = tensor.shape;
    entry.boxes = BoxList(tensor.shape.size());
    bytes += entry.bytes();
    catalog.tensors.push_back(std::move(entry));
  }
  uint64_t seed = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    catalog.files.push_back(fmt::format("__{}_0.distcp", rank));
    Appender file(store->create(folder / catalog.files.back()));
    for (size_t t = 0; t < tensors.size(); ++t) {
      const std::optional<Box> part = part_of(tensors[t].shape, t, sharding, rank, ranks);
      if (!part || part->empty()) continue;
      catalog.tensors[t].boxes.add(*part);
      catalog.tensors[t].extents.push_back(
          append_item(file, static_cast<uint32_t>(rank), part->sizes, ++seed << 32));
    }
    file.finish();
  }
  sort_entries(catalog);
  Appender metadata(store->create(folder / ".metadata"));
  metadata.append(write_dcp_metadata(catalog, pickle::Writer::Protocol::k4));
  metadata.finish();
  return bytes;
}

}  // namespace spolia::bench
