// From nested state dicts to flat names, by the rule of PyTorch's distributed checkpoints.
//
// Dicts always descend. A list descends where a tensor, a dict, or a list that descends is directly in it.
// Everything else, tuples included, is a value as a whole. Names are the keys joined by '.'; keys become
// text, as Python's str() has them; a list's index is its number.
#pragma once

#include <string>
#include <vector>

#include "spolia/format/torch/tensor_pickle.h"
#include "spolia/state/catalog.h"

namespace spolia {

struct FlatTensor {
  KeyPath path;
  const PickledTensor* tensor;
};

struct FlatValue {
  KeyPath path;
  Value value;
};

struct FlatState {
  std::vector<FlatTensor> tensors;
  std::vector<FlatValue> values;
  int64_t tensors_in_values = 0;  // in tuples, objects and the like: shown there, but not to be read
};

/// The tensors and values of a pickle, in its order; tensors live as long as the pickle. A root that is a
/// tensor itself is called "tensor", any other that does not descend "value". UnsupportedError for a tensor
/// of a form that is not known, naming its key; CorruptError for a cycle or where shared parts would make the
/// state far larger than the pickle.
FlatState flatten(const TensorPickle& pickle);

}  // namespace spolia
