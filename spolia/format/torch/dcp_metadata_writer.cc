#include "spolia/format/torch/dcp_metadata_writer.h"

#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spolia {
namespace {

using pickle::MemoIndex;

constexpr size_t kPiece = size_t{1} << 20;

class MetadataWriter {
 public:
  MetadataWriter(const Catalog& catalog, std::span<const DcpValueItem> values,
                 const DcpMetadataOptions& options, const std::function<void(std::string_view)>& write)
      : catalog_(catalog), values_(values), options_(options), write_(write), out_(options.protocol) {
    tensor_names_.reserve(catalog.tensors.size());
    value_names_.reserve(values.size());
  }

  void write() {
    begin_object("Metadata");
    write_state();
    write_paths();
    write_storage();
    text("storage_meta");
    out_.none();
    text("version");
    text("1.0.0");
    end_object();
    write_(out_.finish());
  }

 private:
  static constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

  void write_state() {
    text("state_dict_metadata");
    begin_dict();
    for (const TensorEntry& tensor : catalog_.tensors) write_tensor(tensor);
    for (const DcpValueItem& value : values_) write_value(value);
    end_dict();
  }

  void write_paths() {
    text("planner_data");
    begin_dict();
    for (size_t t = 0; t < catalog_.tensors.size(); ++t) {
      write_path(tensor_names_[t], catalog_.tensors[t].name, catalog_.tensors[t].path);
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      write_path(value_names_[v], values_[v].name, *values_[v].path);
    }
    end_dict();
  }

  void write_storage() {
    text("storage_data");
    begin_dict();
    for (size_t t = 0; t < catalog_.tensors.size(); ++t) {
      for (size_t c = 0; c < catalog_.tensors[t].chunks(); ++c) write_chunk_item(t, c);
    }
    for (size_t v = 0; v < values_.size(); ++v) write_value_item(v);
    end_dict();
  }

  /// Hands on what is there, once it is a piece. Called between entries.
  void flush() {
    if (out_.size() >= kPiece) write_(out_.take());
  }

  // What occurs often is written once and fetched from the memo after.
  template <class Memo, class Key, class Push>
  void shared(Memo& memo, const Key& key, const Push& push) {
    if (auto known = memo.find(key); known != memo.end()) return out_.get(known->second);
    push();
    memo.emplace(key, out_.put());
  }
  /// `text` must live as long as this object.
  void text(std::string_view text) {
    shared(texts_, text, [&] { out_.string(text); });
  }
  void global(std::string_view module, std::string_view name) {
    shared(globals_, std::pair(module, name), [&] { out_.global(module, name); });
  }

  /// Names are many, so the memo of their texts is a list.
  MemoIndex new_name(std::string_view name) {
    out_.string(name);
    return out_.put();
  }

  /// A dict of the keys and values that are pushed until end_dict().
  void begin_dict() {
    out_.empty_dict();
    out_.mark();
  }
  void end_dict() { out_.set_from_mark(); }

  /// An object whose attributes are pushed next, as names and values, until end_object().
  void begin_object(std::string_view name, std::string_view module = kModule) {
    new_object(name, module);
    begin_dict();
  }
  void end_object() {
    end_dict();
    out_.build();
  }
  void new_object(std::string_view name, std::string_view module = kModule) {
    global(module, name);
    out_.empty_tuple();
    out_.new_object();
  }

  /// Calls the global and argument on top.
  void call() {
    out_.tuple1();
    out_.reduce();
  }
  void size(std::span<const int64_t> numbers) {
    global("torch", "Size");
    out_.tuple(numbers);
    call();
  }

  void write_tensor(const TensorEntry& tensor) {
    tensor_names_.push_back(new_name(tensor.name));
    begin_object("TensorStorageMetadata");
    text("properties");
    write_properties(tensor);
    text("size");
    size(tensor.shape);
    text("chunks");
    out_.empty_list();
    out_.mark();
    for (size_t chunk = 0; chunk < tensor.chunks(); ++chunk) {
      begin_object("ChunkStorageMetadata");
      text("offsets");
      size(tensor.boxes.offsets(chunk));
      text("sizes");
      size(tensor.boxes.sizes(chunk));
      end_object();
      flush();
    }
    out_.append_from_mark();
    end_object();
    flush();
  }

  void write_properties(const TensorEntry& tensor) {
    new_object("TensorProperties");
    out_.mark();
    global("torch", name_of(tensor.dtype));
    write_strided_layout();
    out_.boolean(tensor.requires_grad);
    write_memory_format(tensor.memory_format);
    out_.boolean(false);  // pin_memory
    out_.tuple_from_mark();
    out_.build();
  }

  void write_strided_layout() {
    if (layout_) return out_.get(*layout_);
    global("torch.serialization", "_get_layout");
    text("torch.strided");
    call();
    layout_ = out_.put();
  }

  void write_memory_format(MemoryFormat format) {
    shared(memory_formats_, format, [&] {
      global(kModule, "_MEM_FORMAT_ENCODING");
      out_.integer(static_cast<int>(format));
      call();
    });
  }

  void write_value(const DcpValueItem& value) {
    value_names_.push_back(new_name(value.name));
    new_object("BytesStorageMetadata");
    flush();
  }

  void write_path(MemoIndex name_in_memo, std::string_view name, const KeyPath& path) {
    out_.get(name_in_memo);
    out_.mark();
    for (const PathKey& key : path) {
      const auto* step = std::get_if<std::string>(&key);
      if (step == nullptr) {
        out_.integer(std::get<int64_t>(key));
      } else if (*step == name) {
        out_.get(name_in_memo);
      } else {
        text(*step);
      }
    }
    if (path.empty()) out_.get(name_in_memo);
    out_.tuple_from_mark();
    flush();
  }

  void write_chunk_item(size_t t, size_t chunk) {
    const TensorEntry& tensor = catalog_.tensors[t];
    begin_index(tensor_names_[t]);
    out_.integer(static_cast<int64_t>(chunk));
    text("offset");
    size(tensor.boxes.offsets(chunk));
    end_object();
    write_extent(options_.item_of ? options_.item_of(t, chunk) : tensor.extents[chunk]);
  }

  void write_value_item(size_t v) {
    begin_index(value_names_[v]);
    out_.none();
    end_object();
    write_extent(values_[v].item);
  }

  void begin_index(MemoIndex name) {
    begin_object("MetadataIndex");
    text("fqn");
    out_.get(name);
    text("index");
  }

  void write_extent(const Extent& extent) {
    begin_object("_StorageInfo", "torch.distributed.checkpoint.filesystem");
    text("relative_path");
    text(catalog_.files[extent.file]);
    text("offset");
    out_.integer(extent.offset);
    text("length");
    out_.integer(extent.length);
    end_object();
    flush();
  }

  const Catalog& catalog_;
  std::span<const DcpValueItem> values_;
  const DcpMetadataOptions& options_;
  const std::function<void(std::string_view)>& write_;
  pickle::Writer out_;
  std::vector<MemoIndex> tensor_names_;
  std::vector<MemoIndex> value_names_;
  std::unordered_map<std::string_view, MemoIndex> texts_;  // never iterated
  std::map<std::pair<std::string_view, std::string_view>, MemoIndex> globals_;
  std::map<MemoryFormat, MemoIndex> memory_formats_;
  std::optional<MemoIndex> layout_;
};

}  // namespace

void write_dcp_metadata(const Catalog& catalog, std::span<const DcpValueItem> values,
                        const DcpMetadataOptions& options,
                        const std::function<void(std::string_view piece)>& write) {
  MetadataWriter(catalog, values, options, write).write();
}

std::string write_dcp_metadata(const Catalog& catalog, pickle::Writer::Protocol protocol) {
  std::vector<DcpValueItem> values;
  for (const ValueEntry& value : catalog.values) {
    if (value.extent) values.push_back({value.name, &value.path, *value.extent});
  }
  std::string out;
  write_dcp_metadata(catalog, values, {.protocol = protocol}, [&](std::string_view piece) { out += piece; });
  return out;
}

}  // namespace spolia
