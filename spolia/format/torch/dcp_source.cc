#include "spolia/format/torch/dcp_source.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/open_files.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/format/safetensors/sharding_info.h"
#include "spolia/format/torch/dcp_metadata.h"
#include "spolia/format/torch/payload_table.h"
#include "spolia/format/torch/tensor_pickle.h"

namespace spolia {
namespace {

constexpr const char* kMetadata = ".metadata";
constexpr const char* kUnfinishedMetadata = ".metadata.tmp";
constexpr int64_t kEndBytes = int64_t{8} << 10;       // an archive's tables lie in this much of its ends
constexpr int64_t kItemOverhead = int64_t{16} << 20;  // what a compressed item may hold besides its tensor
constexpr int64_t kMostExpansion = 64;  // beyond that, a byte of a compressed value unpacks to no more

std::vector<std::byte> read_whole(const Store& store, const std::filesystem::path& folder,
                                  const std::string& name) {
  auto file = store.open_inside(folder, name);
  std::vector<std::byte> bytes(static_cast<size_t>(file->size()));
  file->read(0, bytes);
  return bytes;
}

/// R of `__R.metadata`.
std::optional<int64_t> rank_of_metadata(std::string_view name) {
  constexpr std::string_view kBefore = "__";
  if (!name.starts_with(kBefore) || !name.ends_with(kMetadata)) return std::nullopt;
  name.remove_prefix(kBefore.size());
  name.remove_suffix(std::string_view(kMetadata).size());
  int64_t rank = 0;
  auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), rank);
  bool all_read = error == std::errc() && end == name.data() + name.size() && rank >= 0;
  return all_read ? std::optional(rank) : std::nullopt;
}

[[noreturn]] void throw_no_metadata(std::span<const FolderEntry> entries,
                                    const std::filesystem::path& folder) {
  bool interrupted = std::ranges::any_of(entries, [](const FolderEntry& entry) {
    return entry.name.ends_with(".distcp") || entry.name == kUnfinishedMetadata;
  });
  if (interrupted) {
    throw CorruptError(
        "{} has files of a checkpoint, but no {}: its save was interrupted. Use an earlier checkpoint",
        quote(folder.string()), kMetadata);
  }
  throw NotFoundError("{} has no {}", quote(folder.string()), kMetadata);
}

/// The catalog of what the ranks wrote each for itself.
Catalog read_rank_metadata(const Store& store, std::span<const FolderEntry> entries,
                           const std::filesystem::path& folder) {
  std::map<int64_t, std::string> names;
  for (const FolderEntry& entry : entries) {
    if (auto rank = rank_of_metadata(entry.name)) names.emplace(*rank, entry.name);
  }
  if (names.empty()) throw_no_metadata(entries, folder);
  std::vector<Catalog> parts;
  std::vector<std::filesystem::path> paths;
  for (const auto& [rank, name] : names) {
    if (rank != std::ssize(parts)) {
      throw CorruptError("{}: the metadata of rank {} is missing, while that of rank {} is there",
                         quote(folder.string()), parts.size(), rank);
    }
    paths.push_back(folder / name);
    parts.push_back(read_dcp_metadata(read_whole(store, folder, name), paths.back()));
  }
  return merge_dcp_metadata(std::move(parts), paths);
}

/// Data files with something in them that the catalog does not name. (Ranks with nothing to write leave empty
/// ones.)
std::vector<std::string> unknown_files(std::span<const FolderEntry> entries, const Catalog& catalog) {
  const std::set<std::string_view> known(catalog.files.begin(), catalog.files.end());
  std::vector<std::string> unknown;
  for (const FolderEntry& entry : entries) {
    const bool data = !entry.is_folder && entry.size > 0 && entry.name.ends_with(".distcp");
    if (data && !known.contains(entry.name)) unknown.push_back(entry.name);
  }
  return unknown;
}

Catalog read_catalog(const Store& store, const std::filesystem::path& folder) {
  std::vector<FolderEntry> entries = store.list(folder);
  auto has = [&](std::string_view name) {
    return std::ranges::find(entries, name, &FolderEntry::name) != entries.end();
  };
  const bool one = has(kMetadata);
  Catalog catalog = one ? read_dcp_metadata(read_whole(store, folder, kMetadata), folder / kMetadata)
                        : read_rank_metadata(store, entries, folder);
  catalog.unknown_files = unknown_files(entries, catalog);
  if (!one) return catalog;
  if (has(kUnfinishedMetadata)) {
    catalog.notes.push_back(
        fmt::format("there is a {} too: a later save into this folder was interrupted and may "
                    "have overwritten data",
                    kUnfinishedMetadata));
  }
  return catalog;
}

/// What the first bytes of an item say that it is.
enum class ItemForm { kZip, kZstd, kOther };

ItemForm form_of(ByteSource& item) {
  std::array<std::byte, 16> room;
  auto first = std::span(room).first(static_cast<size_t>(std::min<int64_t>(item.size(), room.size())));
  item.read(0, first);
  constexpr std::array kZstdMagic{std::byte{0x28}, std::byte{0xB5}, std::byte{0x2F}, std::byte{0xFD}};
  if (starts_like_zip(first)) return ItemForm::kZip;
  if (first.size() >= 4 && std::ranges::equal(first.first(4), kZstdMagic)) return ItemForm::kZstd;
  return ItemForm::kOther;
}

/// Whether the whole file is a safetensors blob.
bool is_blob(const InputFile& file) {
  std::array<std::byte, 16> room;
  auto first = std::span(room).first(static_cast<size_t>(std::min<int64_t>(file.size(), room.size())));
  file.read(0, first);
  return looks_like_safetensors(first);
}

/// A data file that is one safetensors blob.
struct Blob {
  std::map<std::string, SafetensorsTensor, std::less<>> tensors;
  ShardingInfo places;
};

class DcpSource final : public Source {
 public:
  DcpSource(std::shared_ptr<const Store> store, Catalog catalog) : files_(std::move(store)) {
    catalog_ = std::move(catalog);
    payloads_ = std::make_unique<PayloadTable>(catalog_);
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    if (auto known = payloads_->find(tensor, chunk)) return *known;
    try {
      Payload found = resolve(tensor, chunk);
      payloads_->set(tensor, chunk, found);
      return found;
    } catch (const Error& error) {
      const TensorEntry& entry = catalog_.tensors[tensor];
      rethrow_with_context(error, fmt::format("tensor {}, chunk at {}", quote(entry.name),
                                              list_text(entry.boxes.offsets(chunk))));
    }
  }

  Value value(size_t index) const override {
    const ValueEntry& entry = catalog_.values[index];
    if (!entry.extent) return entry.value;
    try {
      return read_value(*entry.extent);
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("value {}", quote(entry.name)));
    }
  }

  std::optional<std::vector<std::byte>> value_archive(size_t index) const override {
    const ValueEntry& entry = catalog_.values[index];
    if (!entry.extent) return std::nullopt;
    try {
      return read_archive(*entry.extent);
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("value {}", quote(entry.name)));
    }
  }

  const InputFile& file(uint32_t index) const override { return files_.get(catalog_, index); }

 private:
  std::unique_ptr<ByteSource> open_item(const Extent& item, Codec codec, int64_t limit) const {
    auto bytes = open_bytes(file(item.file), item.offset, item.length, codec, limit);
    return codec == Codec::kNone ? keep_ends(std::move(bytes), kEndBytes) : std::move(bytes);
  }

  Payload resolve(size_t tensor, size_t chunk) const {
    const TensorEntry& entry = catalog_.tensors[tensor];
    const Extent& extent = entry.extents[chunk];
    auto item = open_item(extent, Codec::kNone, kNoLimit);
    switch (form_of(*item)) {
      case ItemForm::kZstd: {
        int64_t bytes = byte_size(entry.dtype, entry.boxes.sizes(chunk));
        item = open_item(extent, Codec::kZstd, checked_add(bytes, std::max(bytes, kItemOverhead)));
        return resolve_archive(entry, chunk, *item, Codec::kZstd);
      }
      case ItemForm::kOther:
        if (is_blob(file(extent.file))) return resolve_blob(entry, chunk);
        [[fallthrough]];  // where it is said what is wrong
      case ItemForm::kZip:
        break;
    }
    return resolve_archive(entry, chunk, *item, Codec::kNone);
  }

  Payload resolve_archive(const TensorEntry& entry, size_t chunk, ByteSource& item, Codec codec) const {
    TorchArchive archive(item, entry.extents[chunk].length);
    TensorPickle pickle(archive);
    const PickledTensor* tensor = pickle.tensor(pickle.root());
    if (tensor == nullptr) throw CorruptError("{}: the item is not a tensor", item.where());
    check_same(entry, chunk, tensor->dtype, tensor->shape, item.where());
    return payload_of(archive, pickle.storage_of(*tensor), *tensor, entry.extents[chunk], codec);
  }

  Payload resolve_blob(const TensorEntry& entry, size_t chunk) const {
    uint32_t index = entry.extents[chunk].file;
    std::string where = quote(file(index).path().string());
    std::shared_ptr<const Blob> blob = blob_of(index);
    auto found = blob->tensors.find(entry.name);
    if (found == blob->tensors.end()) throw CorruptError("{}: the tensor is not in this file", where);
    const SafetensorsTensor& tensor = found->second;
    check_same(entry, chunk, tensor.dtype, tensor.shape, where);
    auto place = blob->places.find(entry.name);
    if (place != blob->places.end() && place->second != Dims(entry.boxes.offsets(chunk))) {
      throw MismatchError("{}: the file holds the chunk at {} instead", where, list_text(place->second));
    }
    Payload payload;
    payload.stored = {index, tensor.offset, tensor.length};
    payload.length = tensor.length;
    payload.strides = row_major_strides(tensor.shape);
    return payload;
  }

  static void check_same(const TensorEntry& entry, size_t chunk, DType dtype, const Dims& shape,
                         const std::string& where) {
    if (dtype == entry.dtype && shape == Dims(entry.boxes.sizes(chunk))) return;
    throw MismatchError("{}: the item holds {} {}, but the metadata says {} {}", where, name_of(dtype),
                        list_text(shape), name_of(entry.dtype), list_text(entry.boxes.sizes(chunk)));
  }

  std::shared_ptr<const Blob> blob_of(uint32_t index) const {
    {
      std::lock_guard lock(blobs_mutex_);
      auto known = blobs_.find(index);
      if (known != blobs_.end()) return known->second;
    }
    SafetensorsHeader header = read_safetensors_header(file(index));
    auto blob = std::make_shared<Blob>();
    auto places = header.metadata.find(kShardingInfoKey);
    if (places != header.metadata.end()) {
      blob->places = parse_sharding_info(places->second, file(index).path().string());
    }
    for (SafetensorsTensor& tensor : header.tensors) {
      std::string name = tensor.name;
      blob->tensors.emplace(std::move(name), std::move(tensor));
    }
    std::lock_guard lock(blobs_mutex_);
    return blobs_.emplace(index, std::move(blob)).first->second;
  }

  /// A value's item, decoded.
  std::unique_ptr<ByteSource> open_value(const Extent& extent) const {
    auto item = open_item(extent, Codec::kNone, kNoLimit);
    if (form_of(*item) != ItemForm::kZstd) return item;
    return open_item(extent, Codec::kZstd,
                     checked_add(kItemOverhead, checked_mul(kMostExpansion, extent.length)));
  }

  Value read_value(const Extent& extent) const {
    auto item = open_value(extent);
    TorchArchive archive(*item, extent.length);
    TensorPickle pickle(archive);
    return pickle.value(pickle.root());
  }

  /// The archive of a value, each of its records checked.
  std::optional<std::vector<std::byte>> read_archive(const Extent& extent) const {
    auto item = open_value(extent);
    if (form_of(*item) != ItemForm::kZip) return std::nullopt;
    TorchArchive archive(*item, extent.length);
    const int64_t most = std::max(kItemOverhead, item->size());
    for (const ZipRecord& record : archive.zip().records()) archive.zip().read(record, most);
    return read_all(*item);
  }

  OpenFiles files_;
  std::unique_ptr<PayloadTable> payloads_;
  mutable std::mutex blobs_mutex_;
  mutable std::map<uint32_t, std::shared_ptr<const Blob>> blobs_;  // by file; under blobs_mutex_
};

}  // namespace

std::unique_ptr<Source> open_dcp(std::shared_ptr<const Store> store, const std::filesystem::path& folder) {
  Catalog catalog = read_catalog(*store, folder);
  return std::make_unique<DcpSource>(std::move(store), std::move(catalog));
}

}  // namespace spolia
