// Diff: what two checkpoints do not have in common, whatever their formats and layouts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/tensor/compare.h"

namespace spolia {

struct DiffOptions {
  PlanOptions plan;  // the memory is for both sides: at least 2 * kLeastMemory
  Tolerance tolerance;
  std::vector<std::string> select;  // patterns (glob_match) of tensors' and values' names; none: everything
  std::vector<std::string> drop;    // patterns likewise, taken out afterwards
  bool values = true;               // compare what is not a tensor, too
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// A tensor that both have.
struct TensorDiff {
  std::string name;
  DType dtype_a, dtype_b;
  Dims shape_a, shape_b;
  /// Whether the elements were compared: the shapes are equal, and the dtypes are or can both be cast to
  /// float64, in which they are compared then.
  bool compared = false;
  int64_t elements = 0;   // bytes, where the dtype is finer than a byte
  int64_t differing = 0;  // elements that are not close
  int64_t nan_on_one_side = 0;
  Dims first;                    // the index of the first differing element in row-major order, and
  std::string first_a, first_b;  // what stands there, as element_text()
  // Over all elements, see ElementDifferences:
  double max_absolute = 0, mean_absolute = 0, max_relative = 0;

  bool is_equal() const { return compared && dtype_a == dtype_b && differing == 0; }
};

/// A value that both have, but not the same.
struct ValueDiff {
  std::string name;
  std::string a, b;  // Value::text()
};

struct Difference {
  // Names, in their order.
  std::vector<std::string> tensors_only_in_a, tensors_only_in_b, values_only_in_a, values_only_in_b;
  std::vector<TensorDiff> tensors;  // all that both have, equal or not
  std::vector<ValueDiff> values;    // those that differ
  size_t values_compared = 0;
  Report report;  // bytes_read and crcs_checked of both

  bool is_equal() const;
};

/// Compares the two, a tile at a time. Stored checksums are checked on the way. Throws where a tensor of
/// either is not tiled exactly by its chunks or cannot be read; InvalidArgumentError where a pattern matches
/// no name in either (it is probably mistyped) or a tolerance is negative or not finite. The same input and
/// memory give the same figures, at any number of threads.
Difference diff(const Source& a, const Source& b, const DiffOptions& options);

}  // namespace spolia
