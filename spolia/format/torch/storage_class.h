// The classes of torch's storages, which in a pickle say a tensor's dtype.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// A class of the module torch. Newer dtypes have none: their tensors have a torch.storage.UntypedStorage and
/// name their dtype themselves.
struct StorageClass {
  std::string_view name;
  DType dtype;
};

inline constexpr std::array kStorageClasses{
    StorageClass{"DoubleStorage", DType::kFloat64},
    StorageClass{"FloatStorage", DType::kFloat32},
    StorageClass{"HalfStorage", DType::kFloat16},
    StorageClass{"BFloat16Storage", DType::kBFloat16},
    StorageClass{"LongStorage", DType::kInt64},
    StorageClass{"IntStorage", DType::kInt32},
    StorageClass{"ShortStorage", DType::kInt16},
    StorageClass{"CharStorage", DType::kInt8},
    StorageClass{"ByteStorage", DType::kUInt8},
    StorageClass{"BoolStorage", DType::kBool},
    StorageClass{"ComplexFloatStorage", DType::kComplex64},
    StorageClass{"ComplexDoubleStorage", DType::kComplex128},
};

/// Nothing for a name that is no such class.
inline std::optional<DType> dtype_of_storage_class(std::string_view name) {
  auto at = std::ranges::find(kStorageClasses, name, &StorageClass::name);
  return at == kStorageClasses.end() ? std::nullopt : std::optional(at->dtype);
}

/// Empty for a dtype without a class.
inline std::string_view storage_class_of(DType dtype) {
  auto at = std::ranges::find(kStorageClasses, dtype, &StorageClass::dtype);
  return at == kStorageClasses.end() ? std::string_view() : at->name;
}

}  // namespace spolia
