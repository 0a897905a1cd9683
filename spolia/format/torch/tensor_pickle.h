// Pickles that hold tensors: the data.pkl of a torch.save archive.
//
// A tensor stands there as a call, _rebuild_tensor_v2(storage, offset, size, stride, ...), whose storage is a
// persistent id ('storage', torch.FloatStorage, key, location, numel). Nothing is called: tensors become
// handles in the tree of plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/format/torch/dtensor_spec.h"
#include "spolia/format/torch/pickle.h"
#include "spolia/format/torch/torch_archive.h"
#include "spolia/state/value.h"
#include "spolia/tensor/dtype.h"
#include "spolia/tensor/shape.h"

namespace spolia {

/// A storage; its texts live as long as the pickle.
struct PickledStorage {
  std::string_view key;
  std::string_view location;   // "cpu", "cuda:0"
  std::optional<DType> dtype;  // nothing for an UntypedStorage
  int64_t bytes = 0;
};

/// A strided view of a storage. Every element lies inside the storage.
struct PickledTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;       // in elements, >= 0
  int64_t first = 0;  // in elements from the storage's start
  size_t storage = 0;
  bool requires_grad = false;
  std::shared_ptr<const DTensorSpec> spec;  // of the whole, where this is the local tensor of a DTensor

  /// The global shape: the spec's, or the tensor's own.
  const Dims& global_shape() const;
};

/// A pickle, read. Not thread-safe; values keep their place, so it neither copies nor moves.
class TensorPickle {
 public:
  /// Reads `archive`'s data.pkl. `archive` must outlive the object. CorruptError and UnsupportedError as
  /// pickle::read, and for tensors that reach out of their storages or have a form that is not known.
  explicit TensorPickle(const TorchArchive& archive);
  ~TensorPickle();
  TensorPickle(const TensorPickle&) = delete;
  TensorPickle& operator=(const TensorPickle&) = delete;

  const pickle::Ref& root() const { return root_; }
  /// The tensor that `ref` is, or nullptr.
  const PickledTensor* tensor(const pickle::Ref& ref) const;
  /// All tensors in the order in which they were met, local tensors of DTensors included.
  const std::vector<PickledTensor>& tensors() const { return tensors_; }
  const PickledStorage& storage_of(const PickledTensor& tensor) const { return storages_[tensor.storage]; }

  /// Any part of the tree as a value, tensors as records torch.Tensor(dtype, shape). CorruptError where it
  /// would grow far beyond the pickle.
  Value value(const pickle::Ref& ref) const;

  /// For a call that would rebuild a tensor in a way that is not known: the function's name. Else empty.
  static std::string unknown_tensor(const pickle::Ref& ref);

  size_t pickle_bytes() const { return bytes_.size(); }
  std::string where() const { return archive_.zip().where(); }

 private:
  class Reader;

  const TorchArchive& archive_;
  std::vector<std::byte> bytes_;  // texts point into it
  pickle::Heap heap_;
  pickle::Ref root_;
  std::vector<PickledStorage> storages_;
  std::vector<PickledTensor> tensors_;
};

/// The elements of a small tensor of integers, in row-major order. CorruptError for other dtypes, or more
/// than 1 Mi elements.
std::vector<int64_t> read_integers(const TorchArchive& archive, const PickledStorage& storage,
                                   const PickledTensor& tensor);

/// The payload of a tensor's elements: the record of its storage, checked. `file` is what the archive's bytes
/// are an extent of: {file, offset, length}, packed by `codec`.
Payload payload_of(const TorchArchive& archive, const PickledStorage& storage, const PickledTensor& tensor,
                   const Extent& extent, Codec codec);

}  // namespace spolia
