#include "spolia/format/safetensors/safetensors_source.h"

#include <algorithm>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/name_list.h"
#include "spolia/format/open_files.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/format/safetensors/sharding_info.h"
#include "spolia/format/tensor_size.h"
#include "spolia/format/weight_index.h"

namespace spolia {
namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kUsualIndex = "model.safetensors.index.json";

class SafetensorsSource : public Source {
 public:
  SafetensorsSource(Catalog catalog, std::unique_ptr<OpenFiles> files) : files_(std::move(files)) {
    catalog_ = std::move(catalog);
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    const TensorEntry& entry = catalog_.tensors[tensor];
    Payload payload;
    payload.stored = entry.extents[chunk];
    payload.length = payload.stored.length;
    payload.strides = row_major_strides(addressable_box(entry, chunk).sizes);
    return payload;
  }

  Value value(size_t index) const override { return catalog_.values.at(index).value; }

  const InputFile& file(uint32_t index) const override { return files_->get(catalog_, index); }

 private:
  std::unique_ptr<OpenFiles> files_;
};

/// One file's tensor, and where it lies in the checkpoint's.
struct Part {
  std::string name;
  DType dtype;
  Box box;
  Extent extent;
};

/// Gathers files into a source.
class Builder {
 public:
  Builder(std::shared_ptr<const Store> store, std::filesystem::path root)
      : files_(std::make_unique<OpenFiles>(std::move(store))) {
    catalog_.format = "safetensors";
    catalog_.root = std::move(root);
  }

  /// Adds all tensors of a file below the root.
  void add_file(const std::string& name) { add_file(name, files_->store().open_inside(catalog_.root, name)); }

  void add_file(const std::string& name, std::unique_ptr<InputFile> opened) {
    uint32_t index = checked_cast<uint32_t>(catalog_.files.size(), "the number of files");
    catalog_.files.push_back(name);
    const InputFile& file = files_->keep(index, std::move(opened));
    SafetensorsHeader header = read_safetensors_header(file);
    ShardingInfo sharding;  // of the tensors that are still to come
    if (auto text = header.metadata.find(kShardingInfoKey); text != header.metadata.end()) {
      sharding = parse_sharding_info(text->second, file.path().string());
      sharded_ = true;
    }
    for (SafetensorsTensor& tensor : header.tensors) {
      Part part{
          std::move(tensor.name), tensor.dtype, whole(tensor.shape), {index, tensor.offset, tensor.length}};
      if (auto at = sharding.find(part.name); at != sharding.end()) {
        place(part, at->second);
        sharding.erase(at);
      }
      parts_.push_back(std::move(part));
    }
    if (!sharding.empty()) {
      throw MismatchError("{}: {} names the tensor {}, which is not in the file", quote(file.path().string()),
                          kShardingInfoKey, quote(sharding.begin()->first));
    }
    for (const auto& [key, value] : header.metadata) {
      if (key != "format" && key != "DCP_VERSION" && key != kShardingInfoKey) metadata_keys_.insert(key);
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  const Catalog& catalog() const { return catalog_; }
  /// Whether a file's tensors are parts of larger ones.
  bool sharded() const { return sharded_; }
  void note(std::string text) { catalog_.notes.push_back(std::move(text)); }

  /// Makes the parts of each name one tensor.
  void assemble() {
    auto order = [](const Part& p) { return std::tie(p.name, p.box.offsets, p.box.sizes, p.extent.file); };
    std::ranges::sort(parts_, {}, order);
    for (size_t begin = 0, end = 0; begin < parts_.size(); begin = end) {
      while (end < parts_.size() && parts_[end].name == parts_[begin].name) ++end;
      catalog_.tensors.push_back(assemble_tensor({parts_.data() + begin, end - begin}));
    }
    sort_entries(catalog_);
    if (sharded_) catalog_.format = "dcp safetensors";
    if (replicas_ > 0) {
      note(fmt::format("parts that several files hold, and of which the first is read: {}", replicas_));
    }
    if (!metadata_keys_.empty()) {
      note("__metadata__ also holds " + name_list({metadata_keys_.begin(), metadata_keys_.end()}));
    }
  }

  std::unique_ptr<Source> finish() {
    return std::make_unique<SafetensorsSource>(std::move(catalog_), std::move(files_));
  }

 private:
  std::filesystem::path path_of(const Part& part) const { return catalog_.path_of(part.extent.file); }

  /// "FILE: tensor NAME", for messages.
  std::string where(const Part& part) const {
    return fmt::format("{}: tensor {}", quote(path_of(part).string()), quote(part.name));
  }

  void place(Part& part, const Dims& offsets) const {
    if (offsets.size() != part.box.ndim()) {
      throw CorruptError("{}: saved_offsets {} do not fit its shape {}", where(part), list_text(offsets),
                         list_text(part.box.sizes));
    }
    part.box.offsets = offsets;
  }

  /// `parts` have one name, are in the order of their boxes, and of equal boxes in the order of files.
  TensorEntry assemble_tensor(std::span<const Part> parts) {
    const Part& first = parts.front();
    if (!sharded_ && parts.size() > 1) {
      throw MismatchError("tensor {} is in both {} and {}, and no index says which is meant: name one file",
                          quote(first.name), quote(path_of(first).string()),
                          quote(path_of(parts[1]).string()));
    }
    TensorEntry tensor;
    tensor.name = first.name;
    tensor.dtype = first.dtype;
    tensor.shape = Dims(first.box.ndim(), 0);
    tensor.boxes = BoxList(first.box.ndim());
    const Part* last = nullptr;
    for (const Part& part : parts) {
      check_alike(first, part);
      grow_to_hold(tensor.shape, part);
      if (last != nullptr && last->box == part.box) {
        ++replicas_;
        continue;
      }
      last = &part;
      tensor.boxes.add(part.box);
      tensor.extents.push_back(part.extent);
    }
    check_size(tensor, first);
    return tensor;
  }

  void check_alike(const Part& first, const Part& part) const {
    if (part.dtype == first.dtype && part.box.ndim() == first.box.ndim()) return;
    throw MismatchError("tensor {} has dtype {} and {} dims in {}, but {} and {} in {}", quote(part.name),
                        name_of(first.dtype), first.box.ndim(), quote(path_of(first).string()),
                        name_of(part.dtype), part.box.ndim(), quote(path_of(part).string()));
  }

  void grow_to_hold(Dims& shape, const Part& part) const {
    for (size_t d = 0; d < shape.size(); ++d) {
      auto end = try_add(part.box.offsets[d], part.box.sizes[d]);
      if (!end) {
        throw CorruptError("{}: the part {} reaches beyond 64 bits", where(part), box_text(part.box));
      }
      shape[d] = std::max(shape[d], *end);
    }
  }

  /// The whole may overflow where no part does.
  void check_size(const TensorEntry& tensor, const Part& part) const {
    try {
      checked_tensor_size(tensor.dtype, tensor.shape);
    } catch (const Error& error) {
      rethrow_with_context(error, where(part));
    }
  }

  Catalog catalog_;
  std::unique_ptr<OpenFiles> files_;
  std::vector<Part> parts_;
  std::set<std::string> metadata_keys_;
  bool sharded_ = false;  // whether any file has DCP_SHARDING_INFO
  size_t replicas_ = 0;
};

std::filesystem::path folder_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : ".";
}

std::vector<std::string> files_ending_in(const Store& store, const std::filesystem::path& folder,
                                         std::string_view suffix) {
  std::vector<std::string> names;
  for (const FolderEntry& entry : store.list(folder)) {
    if (!entry.is_folder && entry.name.ends_with(suffix)) names.push_back(entry.name);
  }
  return names;
}

/// Every part stands where the index says. That every tensor of the index is there remains to be seen.
void check_parts(const Builder& builder, const WeightIndex& index, const std::string& index_name) {
  for (const Part& part : builder.parts()) {
    const std::string& file = builder.catalog().files[part.extent.file];
    const std::string* due = index.find(part.name);
    if (due == nullptr) {
      throw MismatchError("{}: tensor {} is in {}, but not in the weight_map", quote(index_name),
                          quote(part.name), quote(file));
    }
    if (*due != file) {
      throw MismatchError("{}: tensor {} is in {}, but the weight_map says {}", quote(index_name),
                          quote(part.name), quote(file), quote(*due));
    }
  }
}

void check_complete(const Catalog& catalog, const WeightIndex& index, const std::string& index_name) {
  for (const auto& [tensor, file] : index.weight_map) {
    if (catalog.find_tensor(tensor) != nullptr) continue;
    throw MismatchError("{}: the weight_map says that tensor {} is in {}, but it is not", quote(index_name),
                        quote(tensor), quote(file));
  }
}

void note_wrong_total(Builder& builder, const WeightIndex& index) {
  if (!index.total_size) return;
  int64_t total = 0;
  for (const TensorEntry& tensor : builder.catalog().tensors) total = checked_add(total, tensor.bytes());
  if (*index.total_size == static_cast<double>(total)) return;
  builder.note(
      fmt::format("the index gives total_size {:.0f}; the tensors have {} bytes", *index.total_size, total));
}

void note_unlisted_files(Builder& builder, const Store& store) {
  const Catalog& catalog = builder.catalog();
  std::vector<std::string> unlisted;
  for (std::string& name : files_ending_in(store, catalog.root, kFileSuffix)) {
    if (!std::ranges::binary_search(catalog.files, name)) unlisted.push_back(std::move(name));
  }
  if (unlisted.empty()) return;
  builder.note("not listed by the index, and left alone: " + name_list(unlisted));
}

/// One of the folder's indices (there are some).
std::string choose_index(const std::vector<std::string>& indices, const std::filesystem::path& folder) {
  if (indices.size() == 1) return indices.front();
  if (std::ranges::binary_search(indices, kUsualIndex)) return std::string(kUsualIndex);
  throw UnsupportedError("{} has several indices: name one of {}", quote(folder.string()),
                         name_list(indices));
}

std::unique_ptr<Source> open_index(const std::shared_ptr<const Store>& store,
                                   const std::filesystem::path& folder, const InputFile& index_file) {
  WeightIndex index = read_weight_index(index_file);
  std::string index_name = index_file.path().string();
  const std::vector<std::string> files = index.files();
  Builder builder(store, folder);
  for (const std::string& file : files) {
    std::unique_ptr<InputFile> opened;
    try {
      opened = store->open_inside(folder, file);
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("{}: the file {}", quote(index_name), quote(file)));
    }
    builder.add_file(file, std::move(opened));
  }
  check_parts(builder, index, index_name);
  builder.assemble();
  check_complete(builder.catalog(), index, index_name);
  note_wrong_total(builder, index);
  note_unlisted_files(builder, *store);
  return builder.finish();
}

}  // namespace

std::unique_ptr<Source> open_safetensors_file(std::shared_ptr<const Store> store,
                                              const std::filesystem::path& file) {
  auto opened = store->open(file);
  Builder builder(std::move(store), folder_of(file));
  builder.add_file(file.filename().string(), std::move(opened));
  builder.assemble();
  if (builder.sharded())
    builder.note("the file may be one of several of a checkpoint; its folder is the whole");
  return builder.finish();
}

std::unique_ptr<Source> open_safetensors_index(std::shared_ptr<const Store> store,
                                               const std::filesystem::path& index) {
  auto opened = store->open(index);
  return open_index(store, folder_of(index), *opened);
}

bool is_safetensors_name(std::string_view name) {
  return name.ends_with(kFileSuffix) || name.ends_with(kIndexSuffix);
}

std::unique_ptr<Source> open_safetensors_folder(std::shared_ptr<const Store> store,
                                                const std::filesystem::path& folder) {
  std::vector<std::string> indices = files_ending_in(*store, folder, kIndexSuffix);
  if (!indices.empty()) {
    auto index = store->open_inside(folder, choose_index(indices, folder));
    return open_index(store, folder, *index);
  }
  std::vector<std::string> files = files_ending_in(*store, folder, kFileSuffix);
  if (files.empty()) throw UnsupportedError("{} has no safetensors files", quote(folder.string()));
  Builder builder(std::move(store), folder);
  for (const std::string& file : files) builder.add_file(file);
  builder.assemble();
  return builder.finish();
}

}  // namespace spolia
