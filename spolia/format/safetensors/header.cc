#include "spolia/format/safetensors/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/json_reader.h"
#include "spolia/format/json_text.h"
#include "spolia/format/tensor_size.h"

namespace spolia {
namespace {

static_assert(std::endian::native == std::endian::little, "lengths are copied as they lie in the file");

constexpr int64_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

/// float4_e2m1fn_x2 for "F4": both float4 types are called so, and the pairs come first in the table.
std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (size_t i = 0; i < kDTypeCount; ++i) {
    DType dtype = static_cast<DType>(i);
    if (!name.empty() && info(dtype).safetensors == name) return dtype;
  }
  return std::nullopt;
}

/// From the shape in the file to the catalog's dtype and shape.
void pair_up_float4(DType& dtype, Dims& shape) {
  if (dtype != DType::kFloat4E2M1FNx2) return;
  if (shape.empty() || shape.back() % 2 != 0) {
    dtype = DType::kFloat4E2M1FN;
  } else {
    shape.back() /= 2;
  }
}

/// Collects the tensors as the header lists them, their offsets still relative to the data.
class HeaderReader : public JsonReader {
 public:
  HeaderReader(std::string_view file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kOutside:
        place_ = Place::kNames;
        return true;
      case Place::kNames:
        place_ = key_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
        if (place_ == Place::kTensor) start_tensor();
        return true;
      default:
        refuse("an object");
    }
  }

  bool end_object() override {
    if (place_ == Place::kTensor) finish_tensor();
    place_ = Place::kNames;
    return true;
  }

  bool key(std::string& key) override {
    switch (place_) {
      case Place::kMetadata:
        metadata_key_ = std::move(key);
        if (header_.metadata.contains(metadata_key_)) fail("the key is there twice");
        break;
      case Place::kTensor:
        choose_field(key);
        break;
      default:
        key_ = std::move(key);
        if (key_ == kMetadataKey && std::exchange(met_metadata_, true)) fail("it is there twice");
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(value));
    } else if (place_ == Place::kTensor && field_ == kDtype) {
      auto dtype = dtype_from_safetensors(value);
      if (!dtype) throw UnsupportedError("{}: the dtype {} is unknown", where(), quote(value));
      tensor().dtype = *dtype;
    } else {
      refuse("a string");
    }
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == kDtype) refuse("an array");
    place_ = Place::kNumbers;
    return true;
  }
  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kNumbers) refuse("a number");
    if (!std::in_range<int64_t>(value)) fail(fmt::format("the number {} is too large", value));
    Dims& numbers = field_ == kShape ? tensor().shape : offsets_;
    if (field_ == kShape && numbers.size() == kMaxDims) {
      throw UnsupportedError("{}: a tensor of more than {} dims", where(), kMaxDims);
    }
    if (field_ == kOffsets && numbers.size() == 2) fail("data_offsets has more than two numbers");
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

 protected:
  std::string where() const override {
    std::string text = fmt::format("{}: safetensors header", quote(file_));
    if (place_ == Place::kMetadata) return fmt::format("{}: {} {}", text, kMetadataKey, quote(metadata_key_));
    if (place_ == Place::kNames && key_ == kMetadataKey) return fmt::format("{}: {}", text, kMetadataKey);
    if (place_ != Place::kOutside && !key_.empty()) return fmt::format("{}: tensor {}", text, quote(key_));
    return text;
  }

 private:
  enum class Place { kOutside, kNames, kMetadata, kTensor, kNumbers };
  enum Field : unsigned { kDtype = 1, kShape = 2, kOffsets = 4 };  // bits of seen_

  [[noreturn]] void fail(std::string_view reason) const { throw CorruptError("{}: {}", where(), reason); }

  SafetensorsTensor& tensor() { return header_.tensors.back(); }

  void start_tensor() {
    header_.tensors.emplace_back().name = key_;
    offsets_.clear();
    seen_ = 0;
  }

  void choose_field(std::string_view key) {
    if (key == "dtype") {
      field_ = kDtype;
    } else if (key == "shape") {
      field_ = kShape;
    } else if (key == "data_offsets") {
      field_ = kOffsets;
    } else {
      fail(fmt::format("the key {} is unknown", quote(key)));
    }
    if ((seen_ & field_) != 0) fail(fmt::format("{} is there twice", key));
    seen_ |= field_;
  }

  void finish_tensor() {
    if (seen_ != (kDtype | kShape | kOffsets)) fail("one of dtype, shape and data_offsets is missing");
    if (offsets_.size() != 2) fail("data_offsets has fewer than two numbers");
    if (offsets_[0] > offsets_[1]) fail(fmt::format("data_offsets {} run backwards", list_text(offsets_)));
    SafetensorsTensor& t = tensor();
    t.offset = offsets_[0];
    t.length = offsets_[1] - offsets_[0];
    pair_up_float4(t.dtype, t.shape);
    int64_t due = 0;
    try {
      due = checked_tensor_size(t.dtype, t.shape);
    } catch (const CorruptError& error) {
      fail(error.what());
    }
    if (t.length != due) {
      fail(fmt::format("data_offsets {} span {} bytes, but {} of shape {} takes {}", list_text(offsets_),
                       t.length, name_of(t.dtype), list_text(t.shape), due));
    }
  }

  std::string_view file_;
  SafetensorsHeader& header_;
  Place place_ = Place::kOutside;
  std::string key_;           // the key met last in the outermost object: a tensor's name
  std::string metadata_key_;  // and in __metadata__
  bool met_metadata_ = false;
  Field field_ = kDtype;  // the key met last in a tensor
  unsigned seen_ = 0;     // the fields met in it
  Dims offsets_;
};

/// A name that two of the tensors have.
template <class Tensors>
std::optional<std::string_view> name_met_twice(const Tensors& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  std::ranges::sort(names);
  auto twice = std::ranges::adjacent_find(names);
  return twice == names.end() ? std::nullopt : std::optional(*twice);
}

/// Puts the tensors in the order of their bytes, checks that they tile the data, and makes their offsets
/// absolute.
void place_tensors(SafetensorsHeader& header, int64_t data_start, int64_t file_size, std::string_view file) {
  auto range = [](const SafetensorsTensor& t) { return std::pair(t.offset, t.length); };
  std::ranges::stable_sort(header.tensors, {}, range);
  int64_t data_size = file_size - data_start;
  int64_t end = 0;
  for (SafetensorsTensor& tensor : header.tensors) {
    if (tensor.offset != end) {
      throw CorruptError("{}: safetensors header: tensor {}: {} between data offsets {} and {}", quote(file),
                         quote(tensor.name), tensor.offset < end ? "it overlaps another" : "there is a hole",
                         std::min(tensor.offset, end), std::max(tensor.offset, end));
    }
    if (tensor.length > data_size - end) {
      throw CorruptError("{}: safetensors header: tensor {}: it ends at data offset {}, but the file at {}",
                         quote(file), quote(tensor.name), checked_add(end, tensor.length), data_size);
    }
    end += tensor.length;
    tensor.offset += data_start;
  }
  if (end != data_size) {
    throw CorruptError("{}: safetensors header: the tensors end at data offset {}, but the file at {}",
                       quote(file), end, data_size);
  }
}

/// The shape as it stands in the file.
Dims shape_in_file(const SafetensorsSpec& tensor) {
  Dims shape(tensor.shape);
  if (tensor.dtype != DType::kFloat4E2M1FNx2) return shape;
  if (shape.empty()) {
    throw UnsupportedError("tensor {}: safetensors cannot hold a 0-d {}; drop the tensor", quote(tensor.name),
                           name_of(tensor.dtype));
  }
  shape.back() = checked_mul(shape.back(), 2);
  return shape;
}

void check_writable(const SafetensorsSpec& tensor) {
  if (info(tensor.dtype).safetensors.empty()) {
    throw UnsupportedError("tensor {}: safetensors has no dtype for {}; drop the tensor", quote(tensor.name),
                           name_of(tensor.dtype));
  }
  if (!is_utf8(tensor.name) || tensor.name == kMetadataKey) {
    throw UnsupportedError("tensor {}: safetensors cannot hold a tensor of this name; rename or drop it",
                           quote(tensor.name));
  }
  if (tensor.shape.size() > kMaxDims) {
    throw UnsupportedError("tensor {}: it has more than {} dims; drop it", quote(tensor.name), kMaxDims);
  }
}

std::string metadata_json(const SafetensorsMetadata& metadata) {
  std::string out;
  for (const auto& [key, value] : metadata) {
    if (!is_utf8(key) || !is_utf8(value)) {
      throw UnsupportedError("safetensors cannot hold the metadata {}: it is not UTF-8", quote(key));
    }
    out += fmt::format("{}{}:{}", out.empty() ? "" : ",", json_string(key), json_string(value));
  }
  return fmt::format("{}:{{{}}}", json_string(kMetadataKey), out);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t file_size, std::string_view name) {
  SafetensorsHeader header;
  HeaderReader reader(name, header);
  read_json(json, reader);
  if (auto twice = name_met_twice(header.tensors)) {
    throw CorruptError("{}: safetensors header: tensor {}: it is there twice", quote(name), quote(*twice));
  }
  place_tensors(header, kLengthBytes + static_cast<int64_t>(json.size()), file_size, name);
  return header;
}

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  std::string name = file.path().string();
  if (file.size() < kLengthBytes) {
    throw CorruptError("{}: {} bytes are too few for a safetensors file", quote(name), file.size());
  }
  uint64_t length = 0;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > uint64_t{kMaxSafetensorsHeaderBytes}) {
    throw CorruptError("{}: a safetensors header of {} bytes; at most {} are allowed", quote(name), length,
                       kMaxSafetensorsHeaderBytes);
  }
  if (length > static_cast<uint64_t>(file.size() - kLengthBytes)) {
    throw CorruptError("{}: the safetensors header should have {} bytes, but the file ends after {}",
                       quote(name), length, file.size() - kLengthBytes);
  }
  std::string json(length, '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(json)));
  return parse_safetensors_header(json, file.size(), name);
}

bool looks_like_safetensors(std::span<const std::byte> start) {
  if (start.size() <= size_t{kLengthBytes}) return false;
  uint64_t length = 0;
  std::memcpy(&length, start.data(), sizeof(length));
  return length <= uint64_t{kMaxSafetensorsHeaderBytes} && start[kLengthBytes] == std::byte{'{'};
}

SafetensorsLayout lay_out_safetensors(std::span<const SafetensorsSpec> tensors,
                                      const SafetensorsMetadata& metadata) {
  if (auto twice = name_met_twice(tensors)) {
    throw InvalidArgumentError("tensor {} is given twice", quote(*twice));
  }
  SafetensorsLayout layout;
  layout.offsets.reserve(tensors.size());
  std::string& header = layout.header;
  header = std::string(kLengthBytes, '\0') + "{" + metadata_json(metadata);
  int64_t end = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    check_writable(tensor);
    int64_t begin = end;
    end = checked_add(begin, byte_size(tensor.dtype, tensor.shape), "the size of a safetensors file");
    layout.offsets.push_back(begin);
    fmt::format_to(std::back_inserter(header), R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                   json_string(tensor.name), info(tensor.dtype).safetensors,
                   fmt::join(shape_in_file(tensor), ","), begin, end);
  }
  header += '}';
  header.resize(static_cast<size_t>(align_up(std::ssize(header), 8)), ' ');
  const uint64_t length = header.size() - kLengthBytes;
  if (length > uint64_t{kMaxSafetensorsHeaderBytes}) {
    throw UnsupportedError(
        "a safetensors header of {} bytes; at most {} are allowed: use more, smaller files", length,
        kMaxSafetensorsHeaderBytes);
  }
  std::memcpy(header.data(), &length, sizeof(length));
  int64_t data_start = static_cast<int64_t>(layout.header.size());
  for (int64_t& offset : layout.offsets) offset += data_start;
  layout.file_size = checked_add(data_start, end, "the size of a safetensors file");
  return layout;
}

}  // namespace spolia
