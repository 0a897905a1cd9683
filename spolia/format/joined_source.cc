#include "spolia/format/joined_source.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

template <class T>
std::vector<std::byte> bytes_as(T value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

template <class T>
std::optional<std::vector<std::byte>> whole_number(double value) {
  const double limit = std::ldexp(1.0, std::numeric_limits<T>::digits);  // one more than the largest
  const double least = std::numeric_limits<T>::is_signed ? -limit : 0.0;
  if (value != std::trunc(value) || value < least || value >= limit) return std::nullopt;
  return bytes_as(static_cast<T>(value));
}

std::vector<std::byte> cast_to(DType dtype, double value) {
  std::vector<std::byte> bytes(static_cast<size_t>(element_bytes(dtype)));
  cast(dtype, bytes.data(), DType::kFloat64, &value, 1);
  return bytes;
}

/// The elements of all filled tensors, one after the other.
class Elements final : public InputFile {
 public:
  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes_); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  /// Where they are then.
  Extent add(uint32_t file, const std::vector<std::byte>& element) {
    const Extent extent{file, size(), std::ssize(element)};
    bytes_.insert(bytes_.end(), element.begin(), element.end());
    return extent;
  }

 private:
  std::filesystem::path path_ = "fill";
  std::vector<std::byte> bytes_;
};

class JoinedSource final : public Source {
 public:
  JoinedSource(const Source& first, const Source* base, const std::vector<size_t>& from_base,
               const std::vector<FilledTensor>& filled)
      : first_(first), base_(base), from_base_(from_base) {
    catalog_ = first.catalog();
    first_tensors_ = catalog_.tensors.size();
    first_files_ = static_cast<uint32_t>(catalog_.files.size());
    if (base != nullptr) {
      const Catalog& more = base->catalog();
      for (uint32_t file = 0; file < more.files.size(); ++file) {
        // Absolute, as the root is the first one's.
        catalog_.files.push_back(std::filesystem::absolute(more.path_of(file)).string());
      }
      for (size_t tensor : from_base) {
        catalog_.tensors.push_back(more.tensors[tensor]);
        for (Extent& extent : catalog_.tensors.back().extents) extent.file += first_files_;
      }
    }
    const auto file = static_cast<uint32_t>(catalog_.files.size());
    catalog_.files.push_back(elements_.path().string());
    for (const FilledTensor& tensor : filled) {
      const auto element = element_of(tensor.dtype, tensor.value);
      if (!element) {
        throw InvalidArgumentError("tensor {} cannot be filled with {}: that is no {}", quote(tensor.name),
                                   tensor.value, name_of(tensor.dtype));
      }
      catalog_.tensors.push_back(
          whole_tensor(tensor.name, tensor.dtype, tensor.shape, elements_.add(file, *element)));
    }
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    if (tensor < first_tensors_) return first_.payload(tensor, chunk);
    if (const size_t of_base = tensor - first_tensors_; of_base < from_base_.size()) {
      Payload payload = base_->payload(from_base_[of_base], chunk);
      payload.stored.file += first_files_;
      return payload;
    }
    const TensorEntry& entry = catalog_.tensors[tensor];
    Payload payload;
    payload.stored = entry.extents[0];
    payload.length = payload.stored.length;
    payload.strides = Dims(addressable_shape(entry.dtype, entry.shape).size(), 0);
    return payload;
  }
  Value value(size_t index) const override { return first_.value(index); }
  std::optional<std::vector<std::byte>> value_archive(size_t index) const override {
    return first_.value_archive(index);
  }
  const InputFile& file(uint32_t index) const override {
    if (index < first_files_) return first_.file(index);
    return index + 1 < catalog_.files.size() ? base_->file(index - first_files_) : elements_;
  }

 private:
  const Source& first_;
  const Source* const base_;
  const std::vector<size_t> from_base_;
  size_t first_tensors_ = 0;
  uint32_t first_files_ = 0;
  Elements elements_;
};

}  // namespace

std::optional<std::vector<std::byte>> element_of(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
      return cast_to(dtype, value);
    case DType::kInt64:
      return whole_number<int64_t>(value);
    case DType::kInt32:
      return whole_number<int32_t>(value);
    case DType::kInt16:
      return whole_number<int16_t>(value);
    case DType::kInt8:
      return whole_number<int8_t>(value);
    case DType::kUInt64:
      return whole_number<uint64_t>(value);
    case DType::kUInt32:
      return whole_number<uint32_t>(value);
    case DType::kUInt16:
      return whole_number<uint16_t>(value);
    case DType::kUInt8:
      return whole_number<uint8_t>(value);
    case DType::kBool:
      return value == 0 || value == 1 ? whole_number<uint8_t>(value) : std::nullopt;
    case DType::kFloat8E8M0FNU:  // has no zero
      return std::nullopt;
    default:
      if (value != 0) return std::nullopt;
      return std::vector<std::byte>(static_cast<size_t>(element_bytes(dtype)));
  }
}

std::unique_ptr<Source> join_sources(const Source& first, const Source* base,
                                     const std::vector<size_t>& from_base,
                                     const std::vector<FilledTensor>& filled) {
  return std::make_unique<JoinedSource>(first, base, from_base, filled);
}

}  // namespace spolia
