// What a mapping is compiled against: the names, dtypes and shapes of the tensors on one side.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/state/catalog.h"
#include "spolia/tensor/dtype.h"
#include "spolia/tensor/shape.h"

namespace spolia {

struct TensorDescription {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  /// How many tensor-parallel parts it was made of: what fused_ffn and fused_qkv_old ask for. 1: none, the
  /// tensor is whole.
  int64_t parts = 1;
};

/// Names in order, for looking up one or those that begin alike. Immutable.
class NameList {
 public:
  NameList() = default;
  /// The names are borrowed. Equal ones are kept once.
  explicit NameList(std::vector<std::string_view> names);

  bool has(std::string_view name) const;
  /// The names that begin with `prefix`.
  std::span<const std::string_view> with_prefix(std::string_view prefix) const;
  std::span<const std::string_view> all() const { return names_; }

 private:
  std::vector<std::string_view> names_;
};

/// The tensors of a catalog, in its order, each taken for whole: how a catalog cuts its tensors into chunks
/// says nothing of tensor parallelism.
std::vector<TensorDescription> describe_tensors(const Catalog& catalog);

/// The same in order of their names. InvalidArgumentError where a name occurs twice.
std::vector<TensorDescription> sorted_by_name(std::span<const TensorDescription> tensors);

/// The index of `name` in tensors that are in order of their names.
std::optional<size_t> find_tensor(std::span<const TensorDescription> tensors, std::string_view name);

}  // namespace spolia
