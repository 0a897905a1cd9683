#include "bench/make_dcp.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/dcp_target.h"
#include "spolia/format/torch/resolved_source.h"

namespace spolia::bench {
namespace {

constexpr DType kDType = DType::kFloat32;
constexpr int64_t kPiece = int64_t{1} << 20;

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

/// Writes the elements of a chunk, random bits; gives their CRC-32.
uint32_t write_random(OutputFile& file, const Extent& extent, uint64_t seed) {
  RandomBits random(seed);
  std::vector<uint64_t> words(kPiece / 8);
  uint32_t crc = 0;
  for (int64_t done = 0; done < extent.length; done += kPiece) {
    const auto bytes = static_cast<size_t>(std::min(extent.length - done, kPiece));
    random.fill(std::span(words).first((bytes + 7) / 8));
    const auto piece = std::as_bytes(std::span(words)).first(bytes);
    crc = crc32(crc, piece);
    file.write(extent.offset + done, piece);
  }
  return crc;
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

int64_t make_dcp(const std::filesystem::path& path, const std::vector<NamedShape>& tensors, Sharding sharding,
                 int64_t ranks) {
  TargetContents contents;
  contents.writers = static_cast<size_t>(ranks);
  int64_t bytes = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    TensorEntry entry;
    entry.name = tensors[t].name;
    entry.dtype = kDType;
    entry.shape = tensors[t].shape;
    entry.boxes = BoxList(entry.shape.size());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const std::optional<Box> part = part_of(entry.shape, t, sharding, rank, ranks);
      if (!part || part->empty()) continue;
      entry.boxes.add(*part);
      entry.extents.push_back({static_cast<uint32_t>(rank), 0, byte_size(kDType, part->sizes)});
    }
    bytes += entry.bytes();
    contents.catalog.tensors.push_back(std::move(entry));
  }
  sort_entries(contents.catalog);
  contents.order.resize(tensors.size());
  std::iota(contents.order.begin(), contents.order.end(), size_t{0});

  const auto store = posix_store();
  store->create_folder(path);
  const auto target = make_dcp_target(std::move(contents));
  const Catalog& catalog = target->catalog();
  OutputFolder folder(*store, path);
  std::vector<OutputFile*> files;
  for (const std::string& name : catalog.files) files.push_back(&folder.create(name));
  uint64_t seed = 0;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    for (size_t c = 0; c < catalog.tensors[t].chunks(); ++c) {
      const Extent& extent = catalog.tensors[t].extents[c];
      OutputFile& file = *files[extent.file];
      const uint32_t crc = write_random(file, extent, ++seed << 32);
      const Target::Frame frame = target->frame(t, c, {&crc, 1});
      file.write(extent.offset - std::ssize(frame.before), bytes_of(frame.before));
      file.write(extent.offset + extent.length, bytes_of(frame.after));
    }
  }
  const auto no_values = make_resolved_source({}, {}, nullptr);
  finish_all(*target, *no_values, BlockChecksums(catalog, 0), files, folder);
  folder.sync(1);
  return bytes;
}

}  // namespace spolia::bench
