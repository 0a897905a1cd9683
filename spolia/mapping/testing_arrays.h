// For tests: tensors as arrays of numbers, and what a compiled mapping makes of them, element by element.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "spolia/mapping/mapping.h"

namespace spolia {

struct Array {
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<int64_t> values;  // row-major
  friend bool operator==(const Array&, const Array&) = default;
};
using Arrays = std::map<std::string, Array>;

/// Calls f(index) for every index of the shape, in row-major order.
template <class F>
void for_each_index(const Dims& shape, F f) {
  if (numel(shape) == 0) return;
  Dims index(shape.size());
  while (true) {
    f(std::as_const(index));
    size_t d = shape.size();
    while (d > 0 && ++index[d - 1] == shape[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

inline int64_t flat_index(const Dims& index, const Dims& shape) {
  int64_t flat = 0;
  for (size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + index[d];
  return flat;
}

/// The sources with a number of its own in every element.
inline Arrays numbered_arrays(std::span<const TensorDescription> tensors) {
  Arrays arrays;
  int64_t next = 1;
  for (const TensorDescription& tensor : tensors) {
    Array& array = arrays[tensor.name];
    array.dtype = tensor.dtype;
    array.shape = tensor.shape;
    for (int64_t n = numel(tensor.shape); n > 0; --n) array.values.push_back(next++);
  }
  return arrays;
}

/// Copies one region's elements; how many times each element of `to` was written is counted in `times`.
inline void copy_region_elements(const Region& region, const Array& from, Array& to,
                                 std::vector<int>& times) {
  for_each_index(region.target.sizes, [&](const Dims& index) {
    Dims target = region.target.offsets, source = region.source.offsets;
    for (size_t d = 0; d < index.size(); ++d) {
      target[d] += index[d];
      if (source_dim(region, d) >= 0) source[source_dim(region, d)] += index[d];
    }
    const int64_t place = flat_index(target, to.shape);
    to.values[place] = from.values[flat_index(source, from.shape)];
    ++times[place];
  });
}

/// The targets; an element that is not written exactly once is -1.
inline Arrays evaluated(const CompiledMapping& mapping, std::span<const TensorDescription> sources,
                        const Arrays& arrays) {
  Arrays made;
  for (size_t t = 0; t < mapping.targets.size(); ++t) {
    const MappedTensor& target = mapping.targets[t];
    Array& array = made[target.name];
    array.dtype = target.dtype;
    array.shape = target.shape;
    array.values.assign(numel(target.shape), -1);
    if (target.origin != Origin::kSources) {
      std::ranges::fill(array.values, 0);
      continue;
    }
    std::vector<int> times(array.values.size());
    for (const RegionCopy& copy : mapping.copies_of(t)) {
      const Array& from = arrays.at(sources[copy.source].name);
      const Region all{whole(from.shape), whole(array.shape), {}};
      copy_region_elements(copy.region ? *copy.region : all, from, array, times);
    }
    for (size_t i = 0; i < times.size(); ++i) {
      if (times[i] != 1) array.values[i] = -1;
    }
  }
  return made;
}

/// The targets as what the way back starts from.
inline std::vector<TensorDescription> described(const CompiledMapping& mapping) {
  std::vector<TensorDescription> tensors;
  for (const MappedTensor& target : mapping.targets)
    tensors.push_back({target.name, target.dtype, target.shape, 1});
  return tensors;
}

}  // namespace spolia
