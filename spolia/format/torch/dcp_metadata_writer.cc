#include "spolia/format/torch/dcp_metadata_writer.h"

#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

namespace spolia {
namespace {

using pickle::MemoIndex;

class MetadataWriter {
 public:
  MetadataWriter(const Catalog& catalog, pickle::Writer::Protocol protocol)
      : catalog_(catalog), out_(protocol) {}

  std::string write() {
    begin_object("Metadata");
    text("state_dict_metadata");
    dict([&] {
      for (const TensorEntry& tensor : catalog_.tensors) write_tensor(tensor);
      for (const ValueEntry& value : catalog_.values) {
        if (value.extent) write_value(value);
      }
    });
    text("planner_data");
    dict([&] {
      for (const TensorEntry& tensor : catalog_.tensors) write_path(tensor.name, tensor.path);
      for (const ValueEntry& value : catalog_.values) {
        if (value.extent) write_path(value.name, value.path);
      }
    });
    text("storage_data");
    dict([&] {
      for (const TensorEntry& tensor : catalog_.tensors) write_items(tensor);
      for (const ValueEntry& value : catalog_.values) {
        if (value.extent) write_item(value);
      }
    });
    text("storage_meta");
    out_.none();
    text("version");
    text("1.0.0");
    end_object();
    return out_.finish();
  }

 private:
  static constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

  // What occurs often is written once and fetched from the memo after.
  template <class Push>
  void shared(const std::string& key, const Push& push) {
    if (auto known = memo_.find(key); known != memo_.end()) return out_.get(known->second);
    push();
    memo_.emplace(key, out_.put());
  }
  void text(std::string_view text) {
    shared(fmt::format("text {}", text), [&] { out_.string(text); });
  }
  void global(std::string_view module, std::string_view name) {
    shared(fmt::format("global {} {}", module, name), [&] { out_.global(module, name); });
  }

  /// A dict of the keys and values that `push_entries` pushes.
  template <class PushEntries>
  void dict(const PushEntries& push_entries) {
    out_.empty_dict();
    out_.mark();
    push_entries();
    out_.set_from_mark();
  }

  /// An object whose attributes are pushed next, as names and values, until end_object().
  void begin_object(std::string_view name, std::string_view module = kModule) {
    global(module, name);
    out_.empty_tuple();
    out_.new_object();
    out_.empty_dict();
    out_.mark();
  }
  void end_object() {
    out_.set_from_mark();
    out_.build();
  }

  /// The result of a call of the global with the one argument that `push_argument` pushes.
  template <class PushArgument>
  void call(std::string_view module, std::string_view name, const PushArgument& push_argument) {
    global(module, name);
    push_argument();
    out_.tuple1();
    out_.reduce();
  }
  void size(std::span<const int64_t> numbers) {
    call("torch", "Size", [&] { out_.tuple(numbers); });
  }

  void write_tensor(const TensorEntry& tensor) {
    text(tensor.name);
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
    }
    out_.append_from_mark();
    end_object();
  }

  void write_properties(const TensorEntry& tensor) {
    global(kModule, "TensorProperties");
    out_.empty_tuple();
    out_.new_object();
    out_.mark();
    global("torch", name_of(tensor.dtype));
    shared("layout", [&] { call("torch.serialization", "_get_layout", [&] { text("torch.strided"); }); });
    out_.boolean(tensor.requires_grad);
    int format = static_cast<int>(tensor.memory_format);
    shared(fmt::format("memory format {}", format),
           [&] { call(kModule, "_MEM_FORMAT_ENCODING", [&] { out_.integer(format); }); });
    out_.boolean(false);  // pin_memory
    out_.tuple_from_mark();
    out_.build();
  }

  void write_value(const ValueEntry& value) {
    text(value.name);
    global(kModule, "BytesStorageMetadata");
    out_.empty_tuple();
    out_.new_object();
  }

  void write_path(const std::string& name, const KeyPath& path) {
    text(name);
    out_.mark();
    for (const PathKey& key : path) {
      if (const auto* step = std::get_if<std::string>(&key)) {
        text(*step);
      } else {
        out_.integer(std::get<int64_t>(key));
      }
    }
    if (path.empty()) text(name);
    out_.tuple_from_mark();
  }

  void write_items(const TensorEntry& tensor) {
    for (size_t chunk = 0; chunk < tensor.chunks(); ++chunk) {
      begin_object("MetadataIndex");
      text("fqn");
      text(tensor.name);
      text("index");
      out_.integer(static_cast<int64_t>(chunk));
      text("offset");
      size(tensor.boxes.offsets(chunk));
      end_object();
      write_extent(tensor.extents[chunk]);
    }
  }

  void write_item(const ValueEntry& value) {
    begin_object("MetadataIndex");
    text("fqn");
    text(value.name);
    text("index");
    out_.none();
    end_object();
    write_extent(*value.extent);
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
  }

  const Catalog& catalog_;
  pickle::Writer out_;
  std::unordered_map<std::string, MemoIndex> memo_;  // never iterated
};

}  // namespace

std::string write_dcp_metadata(const Catalog& catalog, pickle::Writer::Protocol protocol) {
  return MetadataWriter(catalog, protocol).write();
}

}  // namespace spolia
