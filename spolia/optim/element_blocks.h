// Elementwise work over tensors of several dtypes, in one pass: what is not of the computing type is cast on
// its way, a block at a time, so that it stays in the nearest cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/kernels.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// A run of elements that a pass reads, writes, or both. Without data the pass is given a null pointer.
struct ElementRun {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  bool read = false;
  bool written = false;
};

inline ElementRun read_run(const ConstView& view) {
  return {const_cast<std::byte*>(view.data), view.dtype, true, false};
}
inline ElementRun write_run(const View& view) { return {view.data, view.dtype, false, true}; }
inline ElementRun update_run(const View& view) { return {view.data, view.dtype, true, true}; }

/// Throws unless `view` holds `count` floating-point numbers, densely, or (where that may be) no data. `what`
/// names it.
inline void check_elements(const ConstView& view, int64_t count, std::string_view what,
                           bool may_be_missing = false) {
  if (!view.data && (may_be_missing || count == 0)) return;
  if (count == 0 && numel(view.shape) == 0) return;  // whatever its strides
  if (!view.data || !view.is_dense() || numel(view.shape) != count)
    throw InvalidArgumentError("{} has to be {} elements without gaps, and is {} elements{}", what, count,
                               view.data ? numel(view.shape) : 0, view.is_dense() ? "" : " with gaps");
  if (!can_cast(DType::kFloat32, view.dtype))
    throw UnsupportedError("{} has to be floating-point numbers, and is {}", what, name_of(view.dtype));
}

/// cast() to Real and back, of bfloat16 by the kernels of this room.
template <class Real>
void cast_in(Real* to, const ElementRun& run, int64_t at, int64_t count) {
  const std::byte* from = run.data + at * element_bytes(run.dtype);
  if constexpr (sizeof(Real) == 4)
    if (run.dtype == DType::kBFloat16) return bfloat16_kernels().widen(count, from, to);
  cast(sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32, to, run.dtype, from, count);
}
template <class Real>
void cast_out(const Real* from, const ElementRun& run, int64_t at, int64_t count) {
  std::byte* to = run.data + at * element_bytes(run.dtype);
  if constexpr (sizeof(Real) == 4)
    if (run.dtype == DType::kBFloat16) return bfloat16_kernels().narrow(count, from, to);
  cast(run.dtype, to, sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32, from, count);
}

/// Calls body(std::array<Real*, N>, count) for consecutive blocks: for one block in all where every run is of
/// Real already.
template <class Real, size_t N, class Body>
void for_each_block(int64_t count, const std::array<ElementRun, N>& runs, Body body) {
  constexpr DType kComputed = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
  constexpr int64_t kBlock = 1024;
  std::array<bool, N> direct;
  for (size_t i = 0; i < N; ++i)
    direct[i] = runs[i].dtype == kComputed && reinterpret_cast<uintptr_t>(runs[i].data) % sizeof(Real) == 0;
  const bool whole = std::all_of(runs.begin(), runs.end(), [&](const ElementRun& run) {
    return !run.data || direct[static_cast<size_t>(&run - runs.data())];
  });
  alignas(64) Real scratch[N][kBlock + 64 / sizeof(Real)];  // not all at the same place in a page
  const int64_t step = whole ? std::max<int64_t>(count, 1) : kBlock;
  for (int64_t at = 0; at < count; at += step) {
    const int64_t n = std::min(step, count - at);
    std::array<Real*, N> pointers;
    for (size_t i = 0; i < N; ++i) {
      std::byte* data = runs[i].data ? runs[i].data + at * element_bytes(runs[i].dtype) : nullptr;
      pointers[i] = !data || direct[i] ? reinterpret_cast<Real*>(data) : scratch[i];
      if (data && !direct[i] && runs[i].read) cast_in(scratch[i], runs[i], at, n);
    }
    body(pointers, n);
    for (size_t i = 0; i < N; ++i)
      if (runs[i].data && !direct[i] && runs[i].written) cast_out(scratch[i], runs[i], at, n);
  }
}

}  // namespace spolia
