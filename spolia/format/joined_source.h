// A source made of others: behind one checkpoint's tensors some of a second one, and tensors that are one
// value everywhere, which no file holds.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spolia/format/source.h"

namespace spolia {

/// A tensor whose every element is `value`.
struct FilledTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  double value = 0;
};

/// The bytes of an element that is `value`: rounded where the dtype is floating-point, exact in others.
/// Nothing where there is none such: the dtype is too small, or one whose values Spolia does not know, of
/// which only 0 is taken.
std::optional<std::vector<std::byte>> element_of(DType dtype, double value);

/// Tensors: those of `first`, with the same numbers; then `from_base`, tensors of `base`; then `filled`.
/// Values are those of `first`. Both sources are borrowed. The catalog is not in order of names, and names
/// may occur twice: it is for plans, which count tensors. InvalidArgumentError where a value does not fit its
/// dtype.
std::unique_ptr<Source> join_sources(const Source& first, const Source* base,
                                     const std::vector<size_t>& from_base,
                                     const std::vector<FilledTensor>& filled);

}  // namespace spolia
