#include "spolia/format/native/manifest.h"

#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/json_records.h"
#include "spolia/format/json_text.h"
#include "spolia/format/native/hex.h"
#include "spolia/format/native/tagged_json.h"
#include "spolia/format/tensor_size.h"

namespace spolia {
namespace {

constexpr std::string_view kManifestFormat = "spolia";
constexpr std::string_view kPartFormat = "spolia part";
constexpr int64_t kMostIndex = std::numeric_limits<uint32_t>::max();

// By their numbers in MemoryFormat.
constexpr std::array<std::string_view, 3> kMemoryFormats = {"contiguous", "channels_last", "preserve"};

// Writing.

template <class... Args>
void append(std::string& out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

void append_start(std::string& out, std::string_view format) {
  append(out, "{{\n\"format\": \"{}\",\n\"version\": {}", format, kSpoliaVersion);
}

/// An array as a member of the outermost object, an element a line.
template <class Items, class AddOne>
void append_lines(std::string& out, std::string_view key, const Items& items, AddOne add_one) {
  append(out, ",\n\"{}\": [", key);
  for (size_t i = 0; i < items.size(); ++i) {
    out += i == 0 ? "\n" : ",\n";
    add_one(items[i]);
  }
  out += items.empty() ? "]" : "\n]";
}

void append_numbers(std::string& out, std::span<const int64_t> numbers) {
  append(out, "[{}]", fmt::join(numbers, ", "));
}

void append_file(std::string& out, const HashedFile& file) {
  append(out, R"("file": {}, "bytes": {}, "sha256": "{}")", json_string(file.name), file.bytes, file.sha256);
}

void append_path(std::string& out, const KeyPath& path) {
  if (path.empty()) return;
  out += ", \"path\": [";
  for (size_t i = 0; i < path.size(); ++i) {
    if (i > 0) out += ", ";
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      append_tagged_json(out, *key);
    } else {
      append(out, "{}", std::get<int64_t>(path[i]));
    }
  }
  out += ']';
}

void append_tensor(std::string& out, const Manifest::Tensor& tensor) {
  out += "{\"name\": ";
  append_tagged_json(out, tensor.name);
  append(out, R"(, "dtype": "{}", "shape": )", name_of(tensor.dtype));
  append_numbers(out, tensor.shape);
  if (tensor.chunks) append(out, R"(, "chunks": {})", *tensor.chunks);
  if (tensor.layout) append(out, R"(, "layout": {})", *tensor.layout);
  if (tensor.replica) append(out, R"(, "replica": {})", *tensor.replica);
  if (tensor.requires_grad) out += ", \"requires_grad\": true";
  if (tensor.memory_format != MemoryFormat::kContiguous) {
    append(out, R"(, "memory_format": "{}")", kMemoryFormats[static_cast<size_t>(tensor.memory_format)]);
  }
  append_path(out, tensor.path);
  out += '}';
}

void append_value(std::string& out, const Manifest::NamedValue& value) {
  out += "{\"name\": ";
  append_tagged_json(out, value.name);
  out += ", ";
  if (const auto* file = std::get_if<HashedFile>(&value.content)) {
    append_file(out, *file);
  } else {
    out += "\"value\": ";
    append_tagged_json(out, std::get<Value>(value.content));
  }
  append_path(out, value.path);
  out += '}';
}

void append_chunk(std::string& out, const PartFile::Chunk& chunk) {
  append(out, R"({{"tensor": {}, "offset": {})", chunk.tensor, chunk.offset);
  if (chunk.box) {
    out += ", \"box\": [";
    append_numbers(out, chunk.box->offsets);
    out += ", ";
    append_numbers(out, chunk.box->sizes);
    out += ']';
  }
  if (!chunk.crcs.empty()) append(out, R"(, "crc32": "{}")", hex_of_crcs(chunk.crcs));
  out += '}';
}

// Reading.

/// A name that a file in the folder can have.
const std::string& file_name(const JsonObject& object, std::string_view key) {
  const std::string& name = object.text(key);
  if (name.empty() || name == "." || name == ".." ||
      name.find_first_of(std::string_view("/\0", 2)) != name.npos) {
    throw CorruptError("{} should be the name of a file in the folder, not {}", quote(key), quote(name));
  }
  return name;
}

HashedFile hashed_file(const JsonObject& object) {
  HashedFile file{file_name(object, "file"), object.integer("bytes"), object.text("sha256")};
  if (!is_sha256_hex(file.sha256)) {
    throw CorruptError("\"sha256\" should be 64 lower-case hex digits, not {}", quote(file.sha256));
  }
  return file;
}

KeyPath path_of(const JsonObject& object) {
  KeyPath path;
  if (object.find("path") == nullptr) return path;
  for (const Value& key : object.list("path")) {
    if (const auto* index = key.get_if<int64_t>()) {
      path.emplace_back(*index);
    } else {
      path.emplace_back(untagged_text(key));
    }
  }
  return path;
}

bool flag(const JsonObject& object, std::string_view key) {
  const Value* value = object.find(key);
  if (value == nullptr) return false;
  if (const auto* set = value->get_if<bool>()) return *set;
  throw CorruptError("{} should be true or false, not {}", quote(key), value->text());
}

DType dtype_of(const JsonObject& object) {
  const std::string& name = object.text("dtype");
  if (auto dtype = dtype_from_name(name)) return *dtype;
  throw UnsupportedError("the dtype {} is unknown", quote(name));
}

Dims dims_of(const Value& value, std::string_view what) {
  const std::vector<int64_t> numbers = json_integers(value, what);
  if (numbers.size() > kMaxDims) throw UnsupportedError("{} has more than {} dims", what, kMaxDims);
  return Dims(std::span<const int64_t>(numbers));
}

MemoryFormat memory_format_of(const JsonObject& object) {
  if (object.find("memory_format") == nullptr) return MemoryFormat::kContiguous;
  const std::string& name = object.text("memory_format");
  auto at = std::ranges::find(kMemoryFormats, name);
  if (at == kMemoryFormats.end()) throw UnsupportedError("the memory format {} is unknown", quote(name));
  return static_cast<MemoryFormat>(at - kMemoryFormats.begin());
}

void read_tensor(const JsonObject& object, Manifest::Tensor& tensor) {
  tensor.dtype = dtype_of(object);
  tensor.shape = dims_of(object.at("shape"), "\"shape\"");
  checked_tensor_size(tensor.dtype, tensor.shape);
  if (object.find("chunks") != nullptr) tensor.chunks = object.integer("chunks");
  if (object.find("layout") != nullptr) {
    tensor.layout = static_cast<uint32_t>(object.integer("layout", kMostIndex));
    if (object.find("replica") != nullptr) {
      tensor.replica = static_cast<uint32_t>(object.integer("replica", kMostIndex));
    }
  }
  tensor.requires_grad = flag(object, "requires_grad");
  tensor.memory_format = memory_format_of(object);
  tensor.path = path_of(object);
}

Manifest::Tensor tensor_of(const JsonObject& object) {
  Manifest::Tensor tensor;
  tensor.name = untagged_text(object.at("name"));
  try {
    read_tensor(object, tensor);
  } catch (const Error& error) {
    rethrow_with_context(error, fmt::format("tensor {}", quote(tensor.name)));
  }
  return tensor;
}

Manifest::NamedValue value_of(const JsonObject& object) {
  Manifest::NamedValue value{untagged_text(object.at("name")), Value(), path_of(object)};
  if (object.find("file") != nullptr) {
    value.content = hashed_file(object);
  } else {
    value.content = untagged(object.at("value"));
  }
  return value;
}

Manifest::Part part_of(const JsonObject& object) {
  return {static_cast<uint32_t>(object.integer("writer", kMostIndex)), hashed_file(object)};
}

Box box_of(const Value& value) {
  const auto* both = value.get_if<List>();
  if (both == nullptr || both->items.size() != 2) {
    throw CorruptError("\"box\" should be a list of offsets and one of sizes, not {}", value.text());
  }
  return {dims_of(both->items[0], "\"box\""), dims_of(both->items[1], "\"box\"")};
}

PartFile::Chunk chunk_of(const JsonObject& object) {
  PartFile::Chunk chunk;
  chunk.tensor = static_cast<uint32_t>(object.integer("tensor", kMostIndex));
  chunk.offset = object.integer("offset");
  if (const Value* box = object.find("box")) chunk.box = box_of(*box);
  if (object.find("crc32") != nullptr) chunk.crcs = crcs_of_hex(object.text("crc32"));
  return chunk;
}

uint32_t crc_of(const JsonObject& object) {
  const std::vector<uint32_t> crcs = crcs_of_hex(object.text("crc32"));
  if (crcs.size() != 1) throw CorruptError("\"crc32\" should be 8 hex digits");
  return crcs.front();
}

/// Adds to a list whose entries must come in the order of a key, each key once.
template <class Entry, class Key>
void add_in_order(std::vector<Entry>& entries, Entry entry, Key key) {
  if (!entries.empty() && !(std::invoke(key, entries.back()) < std::invoke(key, entry))) {
    throw CorruptError("it is there twice, or out of order");
  }
  entries.push_back(std::move(entry));
}

/// Watches that a file begins with its format and a version that is known.
class Preamble {
 public:
  explicit Preamble(std::string_view format) : format_(format) {}

  /// Whether the record was a part of it, and all is well.
  bool take(const JsonRecord& record) {
    if (record.key == "format" && !record.in_array) {
      const auto* format = record.value.get_if<std::string>();
      if (format == nullptr || *format != format_) {
        throw UnsupportedError("it should be {}, not {}", quote(format_), record.value.text());
      }
      met_format_ = true;
      return true;
    }
    if (!met_format_) throw CorruptError("the file should begin with the \"format\" {}", quote(format_));
    if (record.key == "version" && !record.in_array) {
      const auto* version = record.value.get_if<int64_t>();
      if (version == nullptr || *version != kSpoliaVersion) {
        throw UnsupportedError("this Spolia reads version {} of the format, not {}: use a newer one",
                               kSpoliaVersion, record.value.text());
      }
      met_version_ = true;
      return true;
    }
    if (!met_version_) throw CorruptError("the \"version\" should come first");
    return false;
  }

  void finish(std::string_view file) const {
    if (!met_version_) throw CorruptError("{}: \"format\" or \"version\" is missing", quote(file));
  }

 private:
  std::string_view format_;
  bool met_format_ = false, met_version_ = false;
};

const std::string& text_of(const Value& value) {
  if (const auto* text = value.get_if<std::string>()) return *text;
  throw CorruptError("a string is expected here, not {}", value.text());
}

void take_record(Manifest& manifest, JsonRecord& record) {
  const std::string_view key = record.key;
  if (record.in_array && key == "layouts") {
    manifest.layouts.push_back(text_of(record.value));
  } else if (record.in_array && key == "parts") {
    add_in_order(manifest.parts, part_of(JsonObject(record.value)), &Manifest::Part::writer);
  } else if (record.in_array && key == "tensors") {
    add_in_order(manifest.tensors, tensor_of(JsonObject(record.value)), &Manifest::Tensor::name);
  } else if (record.in_array && key == "values") {
    add_in_order(manifest.values, value_of(JsonObject(record.value)), &Manifest::NamedValue::name);
  } else if (key == "layouts" || key == "parts" || key == "tensors" || key == "values") {
    throw CorruptError("an array is expected here, not {}", record.value.text());
  } else if (key == "block_bytes") {
    const auto* bytes = record.value.get_if<int64_t>();
    if (record.in_array || bytes == nullptr || *bytes <= 0)
      throw CorruptError("it should be a positive number");
    manifest.block_bytes = *bytes;
  }  // another key is of a writer that knows more
}

void take_record(PartFile& part, JsonRecord& record) {
  if (record.key == "chunks") {
    if (!record.in_array) throw CorruptError("an array is expected here, not {}", record.value.text());
    part.chunks.push_back(chunk_of(JsonObject(record.value)));
  } else if (record.key == "data" && !record.in_array) {
    const JsonObject data(record.value);
    part.data_file = file_name(data, "file");
    part.bytes = data.integer("bytes");
  } else if (record.key == "header" && !record.in_array) {
    const JsonObject header(record.value);
    part.header_bytes = header.integer("bytes");
    if (header.find("crc32") != nullptr) part.header_crc = crc_of(header);
  }
}

template <class File>
File read_file(std::string_view text, std::string_view name, std::string_view format) {
  File file;
  Preamble preamble(format);
  read_json_records(text, name, [&](JsonRecord& record) {
    if (!preamble.take(record)) take_record(file, record);
  });
  preamble.finish(name);
  return file;
}

void check_layouts(const Manifest& manifest, std::string_view file) {
  for (const Manifest::Tensor& tensor : manifest.tensors) {
    if (!tensor.layout || *tensor.layout < manifest.layouts.size()) continue;
    throw CorruptError("{}: tensor {} has layout {}, but there are {}", quote(file), quote(tensor.name),
                       *tensor.layout, manifest.layouts.size());
  }
}

void check_file_names(const Manifest& manifest, std::string_view file) {
  std::vector<std::string_view> names;
  for (const Manifest::Part& part : manifest.parts) names.push_back(part.file.name);
  for (const Manifest::NamedValue& value : manifest.values) {
    if (const auto* in_file = std::get_if<HashedFile>(&value.content)) names.push_back(in_file->name);
  }
  std::ranges::sort(names);
  auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) throw CorruptError("{}: the file {} is there twice", quote(file), quote(*twice));
}

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  std::string text;
  write_manifest(manifest, [&](std::string_view piece) { text += piece; });
  return text;
}

void write_manifest(const Manifest& manifest, const std::function<void(std::string_view)>& write) {
  constexpr size_t kPieceBytes = size_t{1} << 20;
  std::string out;
  append_start(out, kManifestFormat);
  if (manifest.block_bytes > 0) append(out, ",\n\"block_bytes\": {}", manifest.block_bytes);
  append_lines(out, "layouts", manifest.layouts, [&](const std::string& text) { out += json_string(text); });
  append_lines(out, "parts", manifest.parts, [&](const Manifest::Part& part) {
    append(out, "{{\"writer\": {}, ", part.writer);
    append_file(out, part.file);
    out += '}';
  });
  append_lines(out, "tensors", manifest.tensors, [&](const auto& tensor) {
    append_tensor(out, tensor);
    if (out.size() < kPieceBytes) return;
    write(out);
    out.clear();
  });
  append_lines(out, "values", manifest.values, [&](const auto& value) { append_value(out, value); });
  write(out + "\n}\n");
}

std::string write_part(const PartFile& part) {
  std::string out;
  append_start(out, kPartFormat);
  append(out, ",\n\"data\": {{\"file\": {}, \"bytes\": {}}}", json_string(part.data_file), part.bytes);
  append(out, ",\n\"header\": {{\"bytes\": {}", part.header_bytes);
  if (part.header_crc) append(out, ", \"crc32\": \"{:08x}\"", *part.header_crc);
  out += '}';
  append_lines(out, "chunks", part.chunks, [&](const PartFile::Chunk& chunk) { append_chunk(out, chunk); });
  out += "\n}\n";
  return out;
}

Manifest read_manifest(std::string_view text, std::string_view file) {
  Manifest manifest = read_file<Manifest>(text, file, kManifestFormat);
  check_layouts(manifest, file);
  check_file_names(manifest, file);
  return manifest;
}

PartFile read_part(std::string_view text, std::string_view file) {
  PartFile part = read_file<PartFile>(text, file, kPartFormat);
  if (part.data_file.empty()) throw CorruptError("{}: \"data\" is missing", quote(file));
  return part;
}

}  // namespace spolia
