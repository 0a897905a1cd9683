#include "spolia/tensor/dtype.h"

#include <array>
#include <cstddef>

#include "spolia/base/checked.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using enum DType;

constexpr std::array<DTypeInfo, kDTypeCount> kInfos = {{
    {kFloat64, "float64", "F64", 64, DTypeKind::kFloat},
    {kFloat32, "float32", "F32", 32, DTypeKind::kFloat},
    {kFloat16, "float16", "F16", 16, DTypeKind::kFloat},
    {kBFloat16, "bfloat16", "BF16", 16, DTypeKind::kFloat},
    {kInt64, "int64", "I64", 64, DTypeKind::kInteger},
    {kInt32, "int32", "I32", 32, DTypeKind::kInteger},
    {kInt16, "int16", "I16", 16, DTypeKind::kInteger},
    {kInt8, "int8", "I8", 8, DTypeKind::kInteger},
    {kUInt64, "uint64", "U64", 64, DTypeKind::kInteger},
    {kUInt32, "uint32", "U32", 32, DTypeKind::kInteger},
    {kUInt16, "uint16", "U16", 16, DTypeKind::kInteger},
    {kUInt8, "uint8", "U8", 8, DTypeKind::kInteger},
    {kBool, "bool", "BOOL", 8, DTypeKind::kBool},
    {kComplex128, "complex128", "", 128, DTypeKind::kComplex},
    {kComplex64, "complex64", "C64", 64, DTypeKind::kComplex},
    {kComplex32, "complex32", "", 32, DTypeKind::kComplex},
    {kFloat8E4M3FN, "float8_e4m3fn", "F8_E4M3", 8, DTypeKind::kOpaque},
    {kFloat8E5M2, "float8_e5m2", "F8_E5M2", 8, DTypeKind::kOpaque},
    {kFloat8E4M3FNUZ, "float8_e4m3fnuz", "F8_E4M3FNUZ", 8, DTypeKind::kOpaque},
    {kFloat8E5M2FNUZ, "float8_e5m2fnuz", "F8_E5M2FNUZ", 8, DTypeKind::kOpaque},
    {kFloat8E8M0FNU, "float8_e8m0fnu", "F8_E8M0", 8, DTypeKind::kOpaque},
    {kFloat4E2M1FNx2, "float4_e2m1fn_x2", "F4", 8, DTypeKind::kOpaque},
    {kFloat4E2M1FN, "float4_e2m1fn", "F4", 4, DTypeKind::kOpaque},
    {kFloat6E2M3FN, "float6_e2m3fn", "F6_E2M3", 6, DTypeKind::kOpaque},
    {kFloat6E3M2FN, "float6_e3m2fn", "F6_E3M2", 6, DTypeKind::kOpaque},
    {kBits1x8, "bits1x8", "", 8, DTypeKind::kOpaque},
    {kBits2x4, "bits2x4", "", 8, DTypeKind::kOpaque},
    {kBits4x2, "bits4x2", "", 8, DTypeKind::kOpaque},
    {kBits8, "bits8", "", 8, DTypeKind::kOpaque},
    {kBits16, "bits16", "", 16, DTypeKind::kOpaque},
    {kUInt1, "uint1", "", 8, DTypeKind::kOpaque},
    {kUInt2, "uint2", "", 8, DTypeKind::kOpaque},
    {kUInt3, "uint3", "", 8, DTypeKind::kOpaque},
    {kUInt4, "uint4", "", 8, DTypeKind::kOpaque},
    {kUInt5, "uint5", "", 8, DTypeKind::kOpaque},
    {kUInt6, "uint6", "", 8, DTypeKind::kOpaque},
    {kUInt7, "uint7", "", 8, DTypeKind::kOpaque},
    {kInt1, "int1", "", 8, DTypeKind::kOpaque},
    {kInt2, "int2", "", 8, DTypeKind::kOpaque},
    {kInt3, "int3", "", 8, DTypeKind::kOpaque},
    {kInt4, "int4", "", 8, DTypeKind::kOpaque},
    {kInt5, "int5", "", 8, DTypeKind::kOpaque},
    {kInt6, "int6", "", 8, DTypeKind::kOpaque},
    {kInt7, "int7", "", 8, DTypeKind::kOpaque},
    {kQInt8, "qint8", "", 8, DTypeKind::kOpaque},
    {kQUInt8, "quint8", "", 8, DTypeKind::kOpaque},
    {kQInt32, "qint32", "", 32, DTypeKind::kOpaque},
    {kQUInt4x2, "quint4x2", "", 8, DTypeKind::kOpaque},
    {kQUInt2x4, "quint2x4", "", 8, DTypeKind::kOpaque},
}};

constexpr bool in_enum_order() {
  for (size_t i = 0; i < kInfos.size(); ++i) {
    if (static_cast<size_t>(kInfos[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_enum_order());

}  // namespace

const DTypeInfo& info(DType dtype) { return kInfos[static_cast<size_t>(dtype)]; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeInfo& i : kInfos) {
    if (i.name == name) return i.dtype;
  }
  return std::nullopt;
}

int64_t byte_size(DType dtype, std::span<const int64_t> shape) {
  int64_t bits = checked_mul(numel(shape), info(dtype).bits, "the size of a tensor in bits");
  if (bits % 8 != 0) {
    throw CorruptError("a {} tensor of shape {} does not fill whole bytes", name_of(dtype), list_text(shape));
  }
  return bits / 8;
}

}  // namespace spolia
