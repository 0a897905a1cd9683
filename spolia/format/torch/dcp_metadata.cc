#include "spolia/format/torch/dcp_metadata.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/tensor_size.h"
#include "spolia/format/torch/chunk_placer.h"
#include "spolia/format/torch/pickle.h"

namespace spolia {
namespace {

using pickle::Kind;
using pickle::Ref;

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

enum Tag : uint32_t {
  kChunk = 1,   // ChunkStorageMetadata: offsets, sizes
  kIndex,       // MetadataIndex of a chunk: name, index (-1 for None), offsets
  kBytesIndex,  // MetadataIndex of a value: name
  kInfo,        // _StorageInfo: file, offset, length
  kTensor,      // TensorStorageMetadata: dtype, requires_grad, memory format, chunks; sizes; chunk handles
};
constexpr size_t kTensorSizes = 4;  // where the sizes start in a tensor's run

/// "torch.float32": a global's name for messages.
std::string full_name(const Ref& ref) {
  if (!ref.is(Kind::kGlobal)) return std::string(pickle::name_of(ref.kind()));
  return quote(fmt::format("{}.{}", ref.global().module, ref.global().name));
}

/// What an object's class or a called function is named; empty for anything else.
std::string_view class_name(const Ref* ref) {
  if (ref == nullptr || !ref->is(Kind::kObject) || !ref->callable().is(Kind::kGlobal)) return {};
  return ref->callable().global().name;
}

/// The one argument of an object made by a call, or nullptr.
const Ref* only_argument(const Ref& object) {
  bool has_one = object.args().is(Kind::kTuple) && object.args().items().size() == 1;
  return has_one ? &object.args().items()[0] : nullptr;
}

Dims dims_of(const Ref* tuple, std::string_view what) {
  Dims dims;
  if (tuple == nullptr || !tuple->is(Kind::kTuple)) throw CorruptError("has no {}", what);
  if (tuple->items().size() > kMaxDims) throw UnsupportedError("has more than {} dims", kMaxDims);
  for (const Ref& item : tuple->items()) {
    if (!item.is(Kind::kInt)) throw CorruptError("has {} in its {}", pickle::name_of(item.kind()), what);
    dims.push_back(item.as_int());
  }
  return dims;
}

DType dtype_of(const Ref& ref) {
  std::optional<DType> dtype;
  if (ref.is(Kind::kGlobal) && ref.global().module == "torch") dtype = dtype_from_name(ref.global().name);
  if (!dtype) throw UnsupportedError("has the dtype {}, which is unknown", full_name(ref));
  return *dtype;
}

/// torch.serialization._get_layout("torch.strided") or the global torch.strided.
void check_is_strided(const Ref& layout) {
  if (layout.is_global("torch", "strided")) return;
  const Ref* name = class_name(&layout) == "_get_layout" ? only_argument(layout) : nullptr;
  if (name != nullptr && name->is(Kind::kString) && name->text() == "torch.strided") return;
  std::string text = name != nullptr && name->is(Kind::kString) ? quote(name->text()) : full_name(layout);
  throw UnsupportedError("has the layout {}; only torch.strided can be read", text);
}

/// _MEM_FORMAT_ENCODING(0), by its number or by its name.
MemoryFormat memory_format_of(const Ref& ref) {
  constexpr std::string_view kNames[] = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST",
                                         "TORCH_PRESERVE_FORMAT"};
  const Ref* number = class_name(&ref).ends_with("MEM_FORMAT_ENCODING") ? only_argument(ref) : nullptr;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    bool by_number = number != nullptr && number->is(Kind::kInt) && std::cmp_equal(number->as_int(), i);
    bool by_name = ref.is(Kind::kGlobal) && ref.global().name.ends_with(kNames[i]);
    if (by_number || by_name) return static_cast<MemoryFormat>(i);
  }
  throw UnsupportedError("has an unknown memory format");
}

struct Properties {
  DType dtype;
  bool requires_grad;
  MemoryFormat memory_format;
};

Properties properties_of(const Ref* properties) {
  const Ref* state = class_name(properties) == "TensorProperties" ? &properties->state() : nullptr;
  if (state == nullptr || !state->is(Kind::kTuple) || state->items().size() < 4) {
    throw CorruptError("has no properties");
  }
  std::span<const Ref> items = state->items();  // dtype, layout, requires_grad, memory_format, pin_memory
  const DType dtype = dtype_of(items[0]);
  check_is_strided(items[1]);
  return {dtype, items[2].is(Kind::kBool) && items[2].as_bool(), memory_format_of(items[3])};
}

[[noreturn]] void throw_shared_too_often() {
  throw CorruptError("shared parts would make the catalog far larger than the file");
}

/// Texts numbered in the order they first come. Ranks list the same names in the same order, so mostly the
/// next text is the last one again or the one after it.
class Names {
 public:
  int64_t number(std::string_view text) {
    for (size_t guess : {last_, last_ + 1, size_t{0}}) {
      if (guess < texts_.size() && texts_[guess] == text) return static_cast<int64_t>(last_ = guess);
    }
    auto [at, is_new] = numbers_.try_emplace(text, texts_.size());
    if (is_new) texts_.push_back(text);
    return static_cast<int64_t>(last_ = at->second);
  }
  const std::vector<std::string_view>& texts() const { return texts_; }

 private:
  std::vector<std::string_view> texts_;
  std::map<std::string_view, size_t> numbers_;
  size_t last_ = 0;
};

/// The kinds of objects that there is one of for each tensor or chunk become runs of plain numbers as soon as
/// they are built: a handle says where its run starts and how many dims it has. Objects that do not look as
/// they should are left as they are, for those who know the tensor's name to complain about.
class CompactObjects : public pickle::Hooks {
 public:
  explicit CompactObjects(size_t pickle_bytes) : chunks_left_(pickle_bytes) {}

  uint32_t recognise(std::string_view module, std::string_view name) override {
    if (module == kMetadataModule && name == "ChunkStorageMetadata") return kChunk;
    if (module == kMetadataModule && name == "MetadataIndex") return kIndex;
    if (module == kMetadataModule && name == "TensorStorageMetadata") return kTensor;
    if (module == "torch.distributed.checkpoint.filesystem" && name == "_StorageInfo") return kInfo;
    return 0;
  }

  std::optional<Ref> build(pickle::Heap&, const Ref& object, const Ref& state) override {
    if (!object.is(Kind::kObject)) return std::nullopt;
    switch (object.callable().global().tag) {
      case kChunk:
        return chunk(state.find("offsets"), state.find("sizes"));
      case kIndex:
        return index(state.find("fqn"), state.find("index"), state.find("offset"));
      case kInfo:
        return info(state);
      case kTensor:
        return sound_tensor(state);
      default:
        return std::nullopt;
    }
  }

  /// The handle for the state of a TensorStorageMetadata. Throws where it does not look as it should.
  Ref tensor(const Ref& state) {
    const Properties properties = properties_of(state.find("properties"));
    const Dims sizes = dims_of(state.find("size"), "size");
    const Ref* chunks = state.find("chunks");
    if (chunks == nullptr || !chunks->is(Kind::kList)) throw CorruptError("has no list of chunks");
    const std::span<const Ref> items = chunks->items();
    if (!std::ranges::all_of(items, [](const Ref& chunk) { return chunk.is_handle(kChunk); })) {
      throw CorruptError("has a chunk without proper offsets and sizes");
    }
    if (items.size() > chunks_left_) throw_shared_too_often();
    chunks_left_ -= items.size();
    Ref handle = start(kTensor, sizes.size());
    for (int64_t number : {static_cast<int64_t>(properties.dtype), int64_t{properties.requires_grad},
                           static_cast<int64_t>(properties.memory_format), std::ssize(items)}) {
      numbers_.push_back(number);
    }
    numbers_.insert(numbers_.end(), sizes.begin(), sizes.end());
    for (const Ref& chunk : items) numbers_.push_back(chunk.handle_value());
    return handle;
  }

  /// The `count` numbers from number `first` of the run that a handle stands for.
  Dims numbers(const Ref& handle, size_t first, size_t count) const {
    auto begin = numbers_.begin() + (handle.handle_value() >> 8) + static_cast<ptrdiff_t>(first);
    return Dims(begin, begin + static_cast<ptrdiff_t>(count));
  }
  int64_t number(const Ref& handle, size_t i) const {
    return numbers_[static_cast<size_t>(handle.handle_value() >> 8) + i];
  }
  static size_t ndim(const Ref& handle) { return static_cast<size_t>(handle.handle_value() & 0xff); }

  const std::vector<std::string_view>& names() const { return names_.texts(); }
  const std::vector<std::string_view>& files() const { return files_.texts(); }
  const std::set<std::string_view>& transforms() const { return transforms_; }

 private:
  /// Longer names would make comparing them again and again slow; no tensor or file has one.
  static bool is_name(const Ref* text) {
    return text != nullptr && text->is(Kind::kString) && text->text().size() <= 4096;
  }
  static bool are_dims(const Ref* tuple) {
    return tuple != nullptr && tuple->is(Kind::kTuple) && tuple->items().size() <= kMaxDims &&
           std::ranges::all_of(tuple->items(), [](const Ref& item) { return item.is(Kind::kInt); });
  }

  Ref start(Tag tag, size_t ndim) const {
    return Ref::handle(tag, static_cast<int64_t>(numbers_.size() << 8 | ndim));
  }
  void append(const Ref& tuple) {
    for (const Ref& item : tuple.items()) numbers_.push_back(item.as_int());
  }

  /// Those that are not sound are read once more, by someone who knows their names. One is enough for the
  /// file to be refused, so the others can wait for that too.
  std::optional<Ref> sound_tensor(const Ref& state) {
    if (!tensors_are_sound_) return std::nullopt;
    try {
      return tensor(state);
    } catch (const Error&) {
      tensors_are_sound_ = false;
      return std::nullopt;
    }
  }

  std::optional<Ref> chunk(const Ref* offsets, const Ref* sizes) {
    if (!are_dims(offsets) || !are_dims(sizes) || offsets->items().size() != sizes->items().size()) {
      return std::nullopt;
    }
    Ref handle = start(kChunk, sizes->items().size());
    append(*offsets);
    append(*sizes);
    return handle;
  }

  std::optional<Ref> index(const Ref* name, const Ref* hint, const Ref* offset) {
    bool is_bytes = offset == nullptr || offset->is_none();
    if (!is_name(name) || !(is_bytes || are_dims(offset))) return std::nullopt;
    Ref handle = is_bytes ? start(kBytesIndex, 0) : start(kIndex, offset->items().size());
    numbers_.push_back(names_.number(name->text()));
    if (is_bytes) return handle;
    numbers_.push_back(hint != nullptr && hint->is(Kind::kInt) ? hint->as_int() : -1);
    append(*offset);
    return handle;
  }

  std::optional<Ref> info(const Ref& state) {
    const Ref* path = state.find("relative_path");
    const Ref* offset = state.find("offset");
    const Ref* length = state.find("length");
    if (!is_name(path) || offset == nullptr || length == nullptr || !offset->is(Kind::kInt) ||
        !length->is(Kind::kInt)) {
      return std::nullopt;
    }
    if (state.items().size() > 6) note_transforms(state.find("transform_descriptors"));
    Ref handle = start(kInfo, 0);
    for (int64_t number : {files_.number(path->text()), offset->as_int(), length->as_int()}) {
      numbers_.push_back(number);
    }
    return handle;
  }

  void note_transforms(const Ref* descriptors) {
    constexpr size_t kMostDescriptors = 16;  // one list may be that of all items
    if (descriptors == nullptr || !descriptors->is(Kind::kList)) return;
    if (descriptors->items().size() > kMostDescriptors) return;
    for (const Ref& descriptor : descriptors->items()) {
      if (descriptor.is(Kind::kString)) transforms_.insert(descriptor.text());
    }
  }

  std::deque<int64_t> numbers_;  // grows without copying
  size_t chunks_left_;           // that tensors may list: many may share one list
  bool tensors_are_sound_ = true;
  Names names_;
  Names files_;
  std::set<std::string_view> transforms_;
};

KeyPath path_of(const Ref& tuple) {
  KeyPath path;
  if (!tuple.is(Kind::kTuple) && !tuple.is(Kind::kList)) return path;
  for (const Ref& key : tuple.items()) {
    if (key.is(Kind::kString)) {
      path.emplace_back(std::string(key.text()));
    } else if (key.is(Kind::kInt)) {
      path.emplace_back(key.as_int());
    } else {
      return {};
    }
  }
  return path;
}

std::span<const Ref> dict_items(const Ref* dict, std::string_view what) {
  if (dict == nullptr || !dict->is(Kind::kDict)) throw CorruptError("the metadata has no {}", what);
  return dict->items();
}

/// Turns the object that the pickle held into a catalog. Errors do not name the file.
class CatalogBuilder {
 public:
  CatalogBuilder(CompactObjects& objects, size_t pickle_bytes, Catalog& catalog)
      : objects_(objects), catalog_(catalog), allowance_((size_t{1} << 16) + 16 * pickle_bytes) {}

  void build(const Ref& root) {
    const Ref* state = root.is(Kind::kObject) ? &root.state() : nullptr;
    if (state == nullptr || state->find("state_dict_metadata") == nullptr) {
      throw CorruptError("it holds {}, which is no checkpoint metadata", pickle::name_of(root.kind()));
    }
    add_notes(root);
    for (std::string_view file : objects_.files()) catalog_.files.emplace_back(file);
    add_entries(dict_items(state->find("state_dict_metadata"), "state_dict_metadata"));
    add_paths(state->find("planner_data"));
    place_items(dict_items(state->find("storage_data"), "storage_data"));
  }

 private:
  /// A pickle may have one name, path or list of chunks in many places; the catalog has a copy in each.
  void spend(size_t bytes) {
    if (bytes > allowance_) throw_shared_too_often();
    allowance_ -= bytes;
  }

  void add_notes(const Ref& root) {
    constexpr std::string_view kKnown[] = {"state_dict_metadata", "planner_data", "storage_data",
                                           "storage_meta", "version"};
    if (!root.callable().is_global(kMetadataModule, "Metadata")) {
      catalog_.notes.push_back(fmt::format("the metadata is of the class {}", full_name(root.callable())));
    }
    std::span<const Ref> attributes = root.state().items();
    for (size_t i = 0; i < attributes.size(); i += 2) {
      const Ref& key = attributes[i];
      if (key.is(Kind::kString) && std::ranges::find(kKnown, key.text()) == std::end(kKnown)) {
        catalog_.notes.push_back(fmt::format("the metadata's attribute {} is not used", quote(key.text())));
      }
    }
    for (std::string_view transform : objects_.transforms()) {
      catalog_.notes.push_back(fmt::format("items are stored with the transform {}", quote(transform)));
    }
  }

  void add_entries(std::span<const Ref> entries) {
    spend(entries.size() / 2 * sizeof(TensorEntry));
    catalog_.tensors.reserve(static_cast<size_t>(
        std::ranges::count_if(entries, [](const Ref& entry) { return entry.is_handle(kTensor); })));
    for (size_t i = 0; i < entries.size(); i += 2) {
      if (!entries[i].is(Kind::kString))
        throw CorruptError("a name is {}", pickle::name_of(entries[i].kind()));
      std::string_view name = entries[i].text();
      spend(name.size());
      const Ref& entry = entries[i + 1];
      std::string_view type = class_name(&entry);
      if (entry.is_handle(kTensor) || type == "TensorStorageMetadata") {
        add_tensor(name, entry);
      } else if (type == "BytesStorageMetadata") {
        catalog_.values.push_back({.name = std::string(name), .extent = {}, .value = {}, .path = {}});
      } else {
        throw UnsupportedError("{} is neither a tensor nor bytes but {}", quote(name),
                               type.empty() ? pickle::name_of(entry.kind()) : quote(type));
      }
    }
    sort_entries(catalog_);
  }

  void add_tensor(std::string_view name, const Ref& entry) {
    TensorEntry tensor;
    tensor.name = name;
    try {
      const Ref handle = entry.is_handle(kTensor) ? entry : objects_.tensor(entry.state());
      const size_t ndim = CompactObjects::ndim(handle);
      tensor.dtype = static_cast<DType>(objects_.number(handle, 0));
      tensor.requires_grad = objects_.number(handle, 1) != 0;
      tensor.memory_format = static_cast<MemoryFormat>(objects_.number(handle, 2));
      tensor.shape = objects_.numbers(handle, kTensorSizes, ndim);
      tensor.bytes();  // throws where the shape overflows
      read_chunks(tensor, handle, static_cast<size_t>(objects_.number(handle, 3)));
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("tensor {}", quote(name)));
    }
    catalog_.tensors.push_back(std::move(tensor));
  }

  void read_chunks(TensorEntry& tensor, const Ref& handle, size_t count) {
    size_t ndim = tensor.shape.size();
    spend(count * (2 * ndim * sizeof(int64_t) + sizeof(Extent)));
    tensor.boxes = BoxList(ndim);
    tensor.boxes.reserve(count);
    tensor.extents.assign(count, ChunkPlacer::kNowhere);
    for (size_t i = 0; i < count; ++i) {
      const Ref chunk = Ref::handle(kChunk, objects_.number(handle, kTensorSizes + ndim + i));
      size_t chunk_ndim = CompactObjects::ndim(chunk);
      Dims offsets = objects_.numbers(chunk, 0, chunk_ndim);
      Dims sizes = objects_.numbers(chunk, chunk_ndim, chunk_ndim);
      if (!fits(offsets, sizes, tensor.shape)) {
        throw CorruptError("the chunk {} + {} is not inside of the shape {}", list_text(offsets),
                           list_text(sizes), list_text(tensor.shape));
      }
      tensor.boxes.add(offsets, sizes);
    }
  }

  void add_paths(const Ref* planner_data) {
    if (planner_data == nullptr || !planner_data->is(Kind::kDict)) return;
    std::span<const Ref> entries = planner_data->items();
    for (size_t i = 0; i < entries.size(); i += 2) {
      if (!entries[i].is(Kind::kString)) continue;
      size_t tensor = tensor_index(entries[i].text());
      size_t value = value_index(entries[i].text());
      spend_path(entries[i + 1]);
      if (tensor != kNone) catalog_.tensors[tensor].path = path_of(entries[i + 1]);
      if (value != kNone) catalog_.values[value].path = path_of(entries[i + 1]);
    }
  }

  void spend_path(const Ref& path) {
    if (!path.is(Kind::kTuple) && !path.is(Kind::kList)) return;
    for (const Ref& key : path.items())
      spend(sizeof(PathKey) + (key.is(Kind::kString) ? key.text().size() : 0));
  }

  void place_items(std::span<const Ref> entries) {
    std::vector<size_t> tensor_of_name, value_of_name;
    for (std::string_view name : objects_.names()) {
      tensor_of_name.push_back(tensor_index(name));
      value_of_name.push_back(value_index(name));
    }
    ChunkPlacer placer(catalog_);
    for (size_t i = 0; i < entries.size(); i += 2) {
      const Ref& index = entries[i];
      bool is_value = index.is_handle(kBytesIndex);
      if (!is_value && !index.is_handle(kIndex)) {
        throw CorruptError("storage_data has a key that is no proper MetadataIndex");
      }
      size_t name = static_cast<size_t>(objects_.number(index, 0));
      size_t target = is_value ? value_of_name[name] : tensor_of_name[name];
      if (target == kNone) {
        throw CorruptError("storage_data has an item for {}, which is no {} of the metadata",
                           quote(objects_.names()[name]), is_value ? "value" : "tensor");
      }
      Extent extent = extent_of(entries[i + 1], objects_.names()[name]);
      if (is_value) {
        placer.place_value(target, extent);
      } else {
        placer.place_chunk(target, objects_.numbers(index, 2, CompactObjects::ndim(index)),
                           objects_.number(index, 1), extent);
      }
    }
    placer.finish();
  }

  Extent extent_of(const Ref& info, std::string_view name) const {
    if (!info.is_handle(kInfo)) {
      throw CorruptError("the item of {} has no proper relative_path, offset and length", quote(name));
    }
    Extent extent{static_cast<uint32_t>(objects_.number(info, 0)), objects_.number(info, 1),
                  objects_.number(info, 2)};
    if (extent.offset < 0 || extent.length < 0 || !try_add(extent.offset, extent.length)) {
      throw CorruptError("the item of {} in {} cannot be at offset {} with a length of {}", quote(name),
                         quote(catalog_.files[extent.file]), extent.offset, extent.length);
    }
    return extent;
  }

  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  size_t tensor_index(std::string_view name) const {
    const TensorEntry* tensor = catalog_.find_tensor(name);
    return tensor == nullptr ? kNone : static_cast<size_t>(tensor - catalog_.tensors.data());
  }
  size_t value_index(std::string_view name) const {
    const ValueEntry* value = catalog_.find_value(name);
    return value == nullptr ? kNone : static_cast<size_t>(value - catalog_.values.data());
  }

  CompactObjects& objects_;
  Catalog& catalog_;
  size_t allowance_;  // of bytes that the catalog may still take
};

pickle::Result read_pickle(pickle::Heap& heap, std::span<const std::byte> bytes, const std::string& where,
                           CompactObjects& objects) {
  try {
    return pickle::read(heap, bytes, where, &objects);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kCorrupt) throw;
    throw CorruptError("{}; the save was probably interrupted", error.what());
  }
}

}  // namespace

Catalog read_dcp_metadata(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  std::string where = quote(path.string());
  if (bytes.empty()) throw CorruptError("{} is empty; the save was probably interrupted", where);
  Catalog catalog;
  catalog.format = "dcp";
  catalog.root = path.parent_path();
  pickle::Heap heap;
  CompactObjects objects(bytes.size());
  pickle::Result result = read_pickle(heap, bytes, where, objects);
  try {
    CatalogBuilder(objects, bytes.size(), catalog).build(result.root);
  } catch (const Error& error) {
    rethrow_with_context(error, where);
  }
  return catalog;
}

}  // namespace spolia
