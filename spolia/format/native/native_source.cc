#include "spolia/format/native/native_source.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/format/file_names.h"
#include "spolia/format/native/box_dealer.h"
#include "spolia/format/native/data_header.h"
#include "spolia/format/native/manifest.h"
#include "spolia/format/native/merged_manifest.h"
#include "spolia/format/open_files.h"
#include "spolia/format/torch/value_pickle.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

using std::filesystem::path;

constexpr size_t kPartsAtOnce = 64;                   // so many are in memory beside the catalog
constexpr int64_t kMostTextBytes = int64_t{1} << 30;  // of a file of JSON: tens of millions of records
constexpr int64_t kMostMeshRanks = int64_t{1} << 24;  // of all layouts together, beyond a rank a byte of text

/// All of a file, as a std::string or a std::vector<std::byte>.
template <class Bytes>
Bytes read_whole(const InputFile& file) {
  Bytes bytes(static_cast<size_t>(file.size()), typename Bytes::value_type{});
  file.read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

void check_credible(const InputFile& file) {
  if (file.size() <= kMostTextBytes) return;
  throw CorruptError("{}: {} of JSON are not credible", quote(file.path().string()),
                     human_bytes(file.size()));
}

Manifest read_manifest_file(const InputFile& file) {
  check_credible(file);
  return read_manifest(read_whole<std::string>(file), file.path().string());
}

/// The manifest, or those of ranks that saved without each other, as one.
MergedManifest open_manifest(const Store& store, const path& folder) {
  if (store.exists(folder / kSpoliaManifest)) {
    MergedManifest whole{read_manifest_file(*store.open_inside(folder, kSpoliaManifest)), {}, {}};
    std::vector<uint32_t> same(whole.manifest.tensors.size());
    std::iota(same.begin(), same.end(), uint32_t{0});
    whole.tensors.assign(1, std::move(same));  // for all parts
    return whole;
  }
  std::vector<Manifest> manifests;
  std::vector<std::string> names;
  for (const FolderEntry& entry : store.list(folder)) {
    if (entry.is_folder || !is_own_manifest_name(entry.name)) continue;
    if (entry.name != own_manifest_name(static_cast<uint32_t>(manifests.size()))) {
      throw CorruptError("{}: {} is missing, while {} is there: a rank has not saved", quote(folder.string()),
                         own_manifest_name(static_cast<uint32_t>(manifests.size())), quote(entry.name));
    }
    manifests.push_back(read_manifest_file(*store.open_inside(folder, entry.name)));
    names.push_back((folder / entry.name).string());
  }
  if (manifests.empty()) {
    throw CorruptError(
        "{} has no {}, which is written last: its save was interrupted. Use an earlier checkpoint",
        quote(folder.string()), kSpoliaManifest);
  }
  MergedManifest merged = merge_manifests(manifests, names);
  merged.notes.push_back(fmt::format(
      "put together from the manifests of {} ranks that saved without each other", manifests.size()));
  return merged;
}

/// The same of a file of the folder, which must be as its hash says.
template <class Bytes>
Bytes read_hashed(const InputFile& file, const HashedFile& due) {
  if (file.size() != due.bytes) {
    throw CorruptError("{}: the file has {} bytes, but {} says {}", quote(file.path().string()), file.size(),
                       kSpoliaManifest, due.bytes);
  }
  Bytes bytes = read_whole<Bytes>(file);
  Sha256 hash;
  hash.update(std::as_bytes(std::span(bytes)));
  if (hash.finish_hex() != due.sha256) {
    throw CorruptError("{}: the file has another SHA-256 than {} says; it was damaged after it was written",
                       quote(file.path().string()), kSpoliaManifest);
  }
  return bytes;
}

/// The layouts of a manifest; those over one mesh share it.
class LayoutList {
 public:
  /// `file`: the manifest's name, for messages.
  LayoutList(const Manifest& manifest, std::string_view file) {
    int64_t ranks = kMostMeshRanks;
    for (const std::string& text : manifest.layouts) ranks += std::ssize(text);
    for (const std::string& text : manifest.layouts) {
      Layout layout = parse(text, file);
      ranks -= std::ssize(layout.mesh().ranks());
      if (ranks < 0) {
        throw UnsupportedError("{}: the layouts speak of too many ranks to be credible", quote(file));
      }
      const DeviceMesh& mesh = meshes_.emplace(layout.mesh().text(), layout.mesh()).first->second;
      std::vector<Placement> placements(layout.placements().begin(), layout.placements().end());
      layouts_.push_back(std::make_shared<const Layout>(mesh, std::move(placements)));
    }
  }

  const std::shared_ptr<const Layout>& operator[](size_t i) const { return layouts_[i]; }

 private:
  static Layout parse(const std::string& text, std::string_view file) {
    std::optional<Layout> layout;
    try {
      layout = parse_layout(text);
    } catch (const Error& error) {
      throw CorruptError("{}: a layout: {}", quote(file), error.what());
    }
    if (!layout->is_partial()) return *std::move(layout);
    throw UnsupportedError("{}: the layout {} holds operands of a reduction", quote(file), quote(text));
  }

  std::map<std::string, DeviceMesh> meshes_;  // by their texts
  std::vector<std::shared_ptr<const Layout>> layouts_;
};

/// The tensors of a manifest, as yet without chunks.
std::vector<TensorEntry> tensors_of(const Manifest& manifest, std::string_view file) {
  const LayoutList layouts(manifest, file);
  std::vector<TensorEntry> tensors;
  tensors.reserve(manifest.tensors.size());
  for (const Manifest::Tensor& from : manifest.tensors) {
    TensorEntry& tensor = tensors.emplace_back();
    tensor.name = from.name;
    tensor.dtype = from.dtype;
    tensor.shape = from.shape;
    tensor.boxes = BoxList(from.shape.size());
    tensor.requires_grad = from.requires_grad;
    tensor.memory_format = from.memory_format;
    tensor.path = from.path;
    tensor.replica = from.replica;
    if (from.layout) tensor.layout = layouts[*from.layout];
  }
  return tensors;
}

/// A data file as its part describes it.
struct DataFile {
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  std::optional<uint32_t> header_crc;
  std::vector<ChunkRef> chunks;  // in the order of their bytes
};

/// What a source knows beside the catalog.
struct Contents {
  Catalog catalog;  // its files: data files, then archives
  int64_t block_bytes = 0;
  std::vector<DataFile> data_files;
  std::vector<uint32_t> crcs;                    // of all blocks
  std::vector<std::vector<uint64_t>> first_crc;  // in `crcs`, of each tensor's chunks
  std::vector<std::string> archive_hashes;       // of the files after the data files
};

/// Puts the parts together, one after the other.
class Assembler {
 public:
  Assembler(const Manifest& manifest, path folder)
      : manifest_(manifest), manifest_name_((folder / kSpoliaManifest).string()) {
    contents_.catalog.format = "spolia";
    contents_.catalog.root = std::move(folder);
    contents_.catalog.tensors = tensors_of(manifest, manifest_name_);
    contents_.block_bytes = manifest.block_bytes;
    contents_.first_crc.resize(manifest.tensors.size());
    dealer_.emplace(contents_.catalog);
  }

  /// `writer`: the part's; it comes after those before it.
  void add(uint32_t writer, PartFile part) {
    if (!data_names_.insert(part.data_file).second) {
      throw CorruptError("its data file {} is another part's too", quote(part.data_file));
    }
    dealer_->start(writer, part.chunks.size());
    DataFile data{part.bytes, part.header_bytes, part.header_crc, {}};
    data.chunks.reserve(part.chunks.size());
    int64_t end = part.header_bytes;
    for (PartFile::Chunk& chunk : part.chunks) {
      try {
        data.chunks.push_back(add_chunk(chunk, end));
      } catch (const Error& error) {
        rethrow_with_context(error, fmt::format("tensor {}", quote(manifest_.tensors[chunk.tensor].name)));
      }
    }
    if (end != part.bytes) {
      throw CorruptError("the chunks end at byte {} of {}, which has {}", end, quote(part.data_file),
                         part.bytes);
    }
    if (auto tensor = dealer_->unfinished()) {
      throw CorruptError("tensor {}: not all the boxes that its layout gives writer {} are here",
                         quote(manifest_.tensors[*tensor].name), writer);
    }
    contents_.catalog.files.push_back(std::move(part.data_file));
    contents_.data_files.push_back(std::move(data));
  }

  Contents finish() {
    Catalog& catalog = contents_.catalog;
    std::map<size_t, std::vector<uint32_t>> renumbered;  // the chunks of tensors that have copies
    for (size_t t = 0; t < catalog.tensors.size(); ++t) {
      TensorEntry& tensor = catalog.tensors[t];
      const std::optional<int64_t> due = manifest_.tensors[t].chunks;
      if (due && std::ssize(tensor.extents) != *due) {
        throw CorruptError("{}: tensor {} should have {} chunks, but the parts have {}",
                           quote(manifest_name_), quote(tensor.name), *due, tensor.extents.size());
      }
      if (has_copies(tensor)) renumbered.emplace(t, drop_copies(t));
      tensor.boxes.shrink_to_fit();
      tensor.extents.shrink_to_fit();
      contents_.first_crc[t].shrink_to_fit();
    }
    if (!renumbered.empty()) {
      for (DataFile& file : contents_.data_files) {
        for (ChunkRef& ref : file.chunks) {
          if (auto at = renumbered.find(ref.tensor); at != renumbered.end())
            ref.chunk = at->second[ref.chunk];
        }
      }
    }
    for (const Manifest::NamedValue& value : manifest_.values) add_value(value);
    try {
      sort_entries(catalog);  // they are in order already, but no name may be both
    } catch (const Error& error) {
      rethrow_with_context(error, quote(manifest_name_));
    }
    return std::move(contents_);
  }

 private:
  /// `end`: of the chunk before it; then of this one.
  ChunkRef add_chunk(PartFile::Chunk& chunk, int64_t& end) {
    TensorEntry& tensor = contents_.catalog.tensors[chunk.tensor];
    const Box box = box_of(tensor, chunk);
    const int64_t length = byte_size(tensor.dtype, box.sizes);
    if (chunk.offset != end) {
      throw CorruptError("a chunk at offset {}, but the bytes before it end at {}", chunk.offset, end);
    }
    end = checked_add(end, length, "the size of a data file");
    const int64_t blocks = contents_.block_bytes > 0 ? ceil_div(length, contents_.block_bytes) : 0;
    if (std::ssize(chunk.crcs) != blocks) {
      throw CorruptError("a chunk of {} bytes should have {} checksums, not {}", length, blocks,
                         chunk.crcs.size());
    }
    const ChunkRef ref{chunk.tensor, checked_cast<uint32_t>(tensor.extents.size(), "a number of chunks")};
    tensor.boxes.add(box);
    tensor.extents.push_back({static_cast<uint32_t>(contents_.catalog.files.size()), chunk.offset, length});
    contents_.first_crc[chunk.tensor].push_back(contents_.crcs.size());
    contents_.crcs.insert(contents_.crcs.end(), chunk.crcs.begin(), chunk.crcs.end());
    return ref;
  }

  /// Whether chunks have more than the tensor.
  static bool has_copies(const TensorEntry& tensor) {
    int64_t left = tensor.bytes();
    for (const Extent& extent : tensor.extents) {
      if (extent.length > left || (left == 0 && tensor.chunks() > 1)) return true;
      left -= extent.length;
    }
    return false;
  }

  /// Forgets chunks that an earlier part has too. Those of one part are left to find_tiling_fault(). Returns
  /// the numbers that the chunks, copies too, go by from now on.
  std::vector<uint32_t> drop_copies(size_t t) {
    TensorEntry& tensor = contents_.catalog.tensors[t];
    std::vector<uint32_t> order(tensor.chunks());
    std::iota(order.begin(), order.end(), uint32_t{0});
    auto compare = [&](uint32_t a, uint32_t b) {
      const auto in_order = [](std::span<const int64_t> x, std::span<const int64_t> y) {
        return std::lexicographical_compare_three_way(x.begin(), x.end(), y.begin(), y.end());
      };
      const auto offsets = in_order(tensor.boxes.offsets(a), tensor.boxes.offsets(b));
      return offsets != 0 ? offsets : in_order(tensor.boxes.sizes(a), tensor.boxes.sizes(b));
    };
    std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) { return compare(a, b) < 0; });
    std::vector<uint32_t> first(order.size());  // of each chunk, the one that counts, itself or earlier
    for (size_t i = 0; i < order.size(); ++i) {
      first[order[i]] = order[i];
      if (i == 0 || compare(order[i - 1], order[i]) != 0) continue;
      if (tensor.extents[order[i - 1]].file != tensor.extents[order[i]].file)
        first[order[i]] = first[order[i - 1]];
    }

    BoxList boxes(tensor.shape.size());
    std::vector<Extent> extents;
    std::vector<uint64_t> first_crc;
    std::vector<uint32_t> numbers(first.size());
    for (size_t c = 0; c < first.size(); ++c) {
      numbers[c] = first[c] == c ? static_cast<uint32_t>(extents.size()) : numbers[first[c]];
      if (first[c] != c) continue;
      boxes.add(tensor.boxes.offsets(c), tensor.boxes.sizes(c));
      extents.push_back(tensor.extents[c]);
      first_crc.push_back(contents_.first_crc[t][c]);
    }
    tensor.boxes = std::move(boxes);
    tensor.extents = std::move(extents);
    contents_.first_crc[t] = std::move(first_crc);
    return numbers;
  }

  Box box_of(const TensorEntry& tensor, PartFile::Chunk& chunk) {
    if (dealer_->deals(chunk.tensor)) {
      if (chunk.box) throw CorruptError("a chunk has a box, though it follows from its tensor's layout");
      const Box* box = nullptr;
      try {
        box = dealer_->next(chunk.tensor);
      } catch (const InvalidArgumentError& error) {
        throw CorruptError("its layout does not suit it: {}", error.what());
      }
      if (box == nullptr) throw CorruptError("its layout gives this writer another number of boxes");
      return *box;
    }
    if (!chunk.box) return whole(tensor.shape);
    if (fits(chunk.box->offsets, chunk.box->sizes, tensor.shape)) return *std::move(chunk.box);
    throw CorruptError("the box {} leaves the shape {}", box_text(*chunk.box), list_text(tensor.shape));
  }

  void add_value(const Manifest::NamedValue& from) {
    Catalog& catalog = contents_.catalog;
    ValueEntry value{from.name, std::nullopt, Value(), from.path};
    if (const auto* file = std::get_if<HashedFile>(&from.content)) {
      value.extent = {checked_cast<uint32_t>(catalog.files.size(), "the number of files"), 0, file->bytes};
      catalog.files.push_back(file->name);
      contents_.archive_hashes.push_back(file->sha256);
    } else {
      value.value = std::get<Value>(from.content);
    }
    catalog.values.push_back(std::move(value));
  }

  const Manifest& manifest_;
  std::string manifest_name_;
  Contents contents_;
  std::optional<BoxDealer> dealer_;
  std::set<std::string> data_names_;
};

/// Gives the part's tensors the numbers that they have among all.
void renumber(PartFile& part, std::span<const uint32_t> numbers) {
  for (PartFile::Chunk& chunk : part.chunks) {
    if (chunk.tensor >= numbers.size()) {
      throw CorruptError("a chunk of tensor {}, but there are {}", chunk.tensor, numbers.size());
    }
    chunk.tensor = numbers[chunk.tensor];
  }
}

/// Reads all parts, some at a time in parallel, and puts them together in their order.
Contents read_parts(const Store& store, const MergedManifest& merged, const path& folder) {
  const Manifest& manifest = merged.manifest;
  Assembler assembler(manifest, folder);
  std::vector<PartFile> parts;
  for (size_t begin = 0; begin < manifest.parts.size(); begin += kPartsAtOnce) {
    parts.assign(std::min(kPartsAtOnce, manifest.parts.size() - begin), {});
    parallel_for(std::min(hardware_threads(), parts.size()), parts.size(), [&](size_t, size_t i) {
      const HashedFile& due = manifest.parts[begin + i].file;
      const auto file = store.open_inside(folder, due.name);
      check_credible(*file);
      parts[i] = read_part(read_hashed<std::string>(*file, due), file->path().string());
    });
    for (size_t i = 0; i < parts.size(); ++i) {
      const Manifest::Part& part = manifest.parts[begin + i];
      try {
        renumber(parts[i], merged.tensors[std::min(begin + i, merged.tensors.size() - 1)]);
        assembler.add(part.writer, std::move(parts[i]));
      } catch (const Error& error) {
        rethrow_with_context(error, quote((folder / part.file.name).string()));
      }
    }
  }
  return assembler.finish();
}

class SpoliaSource final : public Source {
 public:
  SpoliaSource(std::shared_ptr<const Store> store, Contents contents)
      : files_(std::move(store)), contents_(std::move(contents)) {
    catalog_ = std::exchange(contents_.catalog, {});
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    const TensorEntry& entry = catalog_.tensors[tensor];
    Payload payload;
    payload.stored = entry.extents[chunk];
    try {
      data_file(payload.stored.file);
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("tensor {}, chunk at {}", quote(entry.name),
                                              list_text(entry.boxes.offsets(chunk))));
    }
    payload.length = payload.stored.length;
    payload.strides = row_major_strides(addressable_box(entry, chunk).sizes);
    payload.block_bytes = contents_.block_bytes;
    if (contents_.block_bytes > 0) {
      payload.blocks = std::span(contents_.crcs)
                           .subspan(contents_.first_crc[tensor][chunk],
                                    static_cast<size_t>(ceil_div(payload.length, contents_.block_bytes)));
    }
    return payload;
  }

  Value value(size_t index) const override {
    const ValueEntry& entry = catalog_.values[index];
    if (!entry.extent) return entry.value;
    try {
      return read_value_archive(read_archive(*entry.extent),
                                quote(catalog_.path_of(entry.extent->file).string()));
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("value {}", quote(entry.name)));
    }
  }

  std::optional<std::vector<std::byte>> value_archive(size_t index) const override {
    const ValueEntry& entry = catalog_.values[index];
    if (!entry.extent) return std::nullopt;
    return read_archive(*entry.extent);
  }

  const InputFile& file(uint32_t index) const override { return files_.get(catalog_, index); }

  void check_file(uint32_t index) const override {
    if (index >= contents_.data_files.size()) return;  // an archive: it has a hash
    const InputFile& file = data_file(index);
    const DataFile& data = contents_.data_files[index];
    std::string header(static_cast<size_t>(std::min(data.header_bytes, kMaxSafetensorsHeaderBytes + 8)),
                       '\0');
    file.read(0, std::as_writable_bytes(std::span(header)));
    if (data.header_crc && crc32(0, bytes_of(header)) != *data.header_crc) {
      throw CorruptError(
          "{}: its header has another CRC-32 than its part says; it was damaged after it was written",
          quote(file.path().string()));
    }
    const std::string due = lay_out_data_file(catalog_, data.chunks).header;
    if (header != due) check_same(read_safetensors_header(file), due, data.bytes, file.path().string());
  }

 private:
  /// A data file, which has the size that its part says.
  const InputFile& data_file(uint32_t index) const {
    const InputFile& opened = file(index);
    const int64_t due = contents_.data_files[index].bytes;
    if (opened.size() == due) return opened;
    throw CorruptError("{}: the file has {} bytes, but its part says {}", quote(opened.path().string()),
                       opened.size(), due);
  }

  /// Other writers may spell a header in another way.
  static void check_same(const SafetensorsHeader& found, std::string_view due_header, int64_t file_bytes,
                         const std::string& name) {
    const SafetensorsHeader due = parse_safetensors_header(due_header.substr(8), file_bytes, name);
    for (size_t i = 0; i < std::min(found.tensors.size(), due.tensors.size()); ++i) {
      const SafetensorsTensor &a = found.tensors[i], &b = due.tensors[i];
      if (a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.length == b.length) continue;
      throw MismatchError("{}: its header has {} {} {} where its part has {} {} {}", quote(name),
                          quote(a.name), name_of(a.dtype), list_text(a.shape), quote(b.name),
                          name_of(b.dtype), list_text(b.shape));
    }
    if (found.tensors.size() != due.tensors.size()) {
      throw MismatchError("{}: its header has {} tensors, its part {} chunks", quote(name),
                          found.tensors.size(), due.tensors.size());
    }
  }

  std::vector<std::byte> read_archive(const Extent& extent) const {
    const std::string& hash = contents_.archive_hashes[extent.file - contents_.data_files.size()];
    return read_hashed<std::vector<std::byte>>(file(extent.file), {"", extent.length, hash});
  }

  OpenFiles files_;
  Contents contents_;  // without the catalog
};

bool is_numbered(std::string_view before, std::string_view name, std::string_view after) {
  if (!name.starts_with(before) || !name.ends_with(after)) return false;
  name.remove_prefix(before.size());
  return name.size() > after.size() && is_number(name.substr(0, name.size() - after.size()));
}

/// Files that are called as those of a checkpoint are, but are not of this one.
std::vector<std::string> unknown_files(const Store& store, const Manifest& manifest, const Catalog& catalog) {
  std::set<std::string_view> known(catalog.files.begin(), catalog.files.end());
  for (const Manifest::Part& part : manifest.parts) known.insert(part.file.name);
  std::vector<std::string> unknown;
  for (const FolderEntry& entry : store.list(catalog.root)) {
    const bool ours = is_numbered("data-", entry.name, ".safetensors") ||
                      is_numbered("part-", entry.name, ".json") || is_spolia_value_name(entry.name);
    if (ours && !entry.is_folder && !known.contains(entry.name)) unknown.push_back(entry.name);
  }
  return unknown;
}

}  // namespace

std::unique_ptr<Source> open_spolia(std::shared_ptr<const Store> store, const path& folder) {
  MergedManifest merged = open_manifest(*store, folder);
  Contents contents = read_parts(*store, merged, folder);
  contents.catalog.unknown_files = unknown_files(*store, merged.manifest, contents.catalog);
  contents.catalog.notes = std::move(merged.notes);
  return std::make_unique<SpoliaSource>(std::move(store), std::move(contents));
}

bool is_spolia_name(std::string_view name) {
  return name == kSpoliaManifest || is_own_manifest_name(name) || is_numbered("part-", name, ".json");
}

bool is_spolia_value_name(std::string_view name) { return is_numbered("value-", name, ".pt"); }

}  // namespace spolia
