// The element types that checkpoints hold: every dtype of PyTorch and of safetensors.
//
// Names are PyTorch's without the prefix. Types that Spolia cannot compute with (float8, sub-byte, quantized,
// ...) are carried as bytes. Two dtypes are finer than a byte and exist in safetensors alone: the elements of
// such a tensor are packed without gaps, and only the tensor as a whole has an address.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace spolia {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt64,
  kUInt32,
  kUInt16,
  kUInt8,
  kBool,
  kComplex128,
  kComplex64,
  kComplex32,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kFloat4E2M1FNx2,  // two elements a byte; the shape counts bytes, as PyTorch does
  kFloat4E2M1FN,    // the same, counted in elements: a safetensors F4 whose last size is odd
  kFloat6E2M3FN,
  kFloat6E3M2FN,
  kBits1x8,
  kBits2x4,
  kBits4x2,
  kBits8,
  kBits16,
  kUInt1,
  kUInt2,
  kUInt3,
  kUInt4,
  kUInt5,
  kUInt6,
  kUInt7,  // a byte each in PyTorch
  kInt1,
  kInt2,
  kInt3,
  kInt4,
  kInt5,
  kInt6,
  kInt7,
  kQInt8,
  kQUInt8,
  kQInt32,
  kQUInt4x2,
  kQUInt2x4,
};
inline constexpr size_t kDTypeCount = static_cast<size_t>(DType::kQUInt2x4) + 1;

enum class DTypeKind : uint8_t { kFloat, kInteger, kBool, kComplex, kOpaque };

struct DTypeInfo {
  DType dtype;
  std::string_view name;         // "bfloat16"
  std::string_view safetensors;  // "BF16"; empty where safetensors has no such dtype
  int bits;                      // an element's size; 4, 6 or a multiple of 8
  DTypeKind kind;  // kFloat: only those Spolia casts between (float64, float32, float16, bfloat16)
};

const DTypeInfo& info(DType dtype);
inline std::string_view name_of(DType dtype) { return info(dtype).name; }

/// Nothing where the name is unknown.
std::optional<DType> dtype_from_name(std::string_view name);

/// Whether elements are finer than a byte, so that only whole tensors can be addressed.
inline bool is_sub_byte(DType dtype) { return info(dtype).bits % 8 != 0; }

/// Bytes of an element; 1 for sub-byte types, which are handled as strings of bytes.
inline int64_t element_bytes(DType dtype) { return is_sub_byte(dtype) ? 1 : info(dtype).bits / 8; }

/// Bytes of a dense tensor. CorruptError on overflow, or where the bits of a sub-byte type do not fill whole
/// bytes.
int64_t byte_size(DType dtype, std::span<const int64_t> shape);

}  // namespace spolia
