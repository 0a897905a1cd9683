// How a DTensor is spread over ranks, from the DTensorSpec in its pickle.
//
// DTensorSpec{mesh, placements, tensor_meta}. The mesh's ranks are a tensor: up to PyTorch 2.9 the field
// `mesh`; later `_rank_map`, a list of all ranks, and `_layout`, sizes and strides that say where in that
// list each coordinate of the mesh is (an axis may be several sizes and strides, its index split row-major).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spolia/format/torch/pickle.h"
#include "spolia/layout/layout.h"
#include "spolia/tensor/shape.h"

namespace spolia {

struct DTensorSpec {
  Dims shape;  // global
  Layout layout;
  friend bool operator==(const DTensorSpec&, const DTensorSpec&) = default;
};

struct IntegerTensor {
  Dims shape;
  std::vector<int64_t> values;  // row-major
};

/// Gives the elements of a pickled tensor; nothing where `ref` is none.
using IntegerReader = std::function<std::optional<IntegerTensor>(const pickle::Ref& ref)>;

/// Reads the specs of one pickle; the meshes that they share are read once.
class DTensorSpecReader {
 public:
  explicit DTensorSpecReader(IntegerReader integers) : integers_(std::move(integers)) {}

  /// The spec that `spec` describes. CorruptError where parts are missing or contradict each other;
  /// UnsupportedError for placements that are not known, by name.
  DTensorSpec read(const pickle::Ref& spec);

 private:
  const DeviceMesh& mesh(const pickle::Ref& mesh);

  IntegerReader integers_;
  // By node. The reference keeps the node from being used for something else.
  std::unordered_map<const pickle::Node*, std::pair<pickle::Ref, DeviceMesh>> meshes_;
};

}  // namespace spolia
