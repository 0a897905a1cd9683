// A mapping without macros: steps over single, named tensors, in the order in which they run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spolia/mapping/syntax.h"
#include "spolia/tensor/dtype.h"
#include "spolia/tensor/shape.h"

namespace spolia {

/// A name that steps read and write: a tensor's, or, where `temporary` is not 0, a number that a macro made
/// up and no tensor can have. A temporary's name tells people where it comes from.
struct Variable {
  std::string name;
  uint32_t temporary = 0;
  Position at;
};

struct TensorOperation {
  enum Kind : uint8_t { kPermute, kCast, kReshape };
  Kind kind;
  Dims dims;  // kPermute: target dim d is source dim dims[d]; empty: all reversed. kReshape: see reshaped()
  std::optional<DType> from;  // kCast: what the tensor has to be
  DType to = DType::kFloat32;
};

struct ProgramStep {
  enum Kind : uint8_t {
    kMove,    // left[0] through the operations to right[0]
    kConcat,  // left side by side along `axis`
    kSplit,   // left[0] cut along `axis`
    kDrop,    // left[0] is no part of the result
    kNew,     // right[0] comes from no source
  };
  Kind kind = kMove;
  std::vector<Variable> left, right;
  std::vector<TensorOperation> operations;
  int64_t axis = 0;  // negative: from the last dim
  /// kConcat, kSplit: of the parts along `axis`, where the mapping tells; else empty.
  Dims sizes;
  /// The parts are of equal size; a split without sizes is such.
  bool equal_parts = false;
  // kNew: what the mapping says of the tensor.
  std::optional<Dims> shape;
  std::optional<DType> dtype;
  std::optional<double> fill;
  Position at;
};

struct Program {
  std::vector<ProgramStep> steps;
  uint32_t temporaries = 0;  // they are numbered from 1
  std::vector<std::string> notes;
};

}  // namespace spolia
