#include "spolia/comm/runs.h"

#include <vector>

namespace spolia {
namespace {

// Copying less costs less than a row or a run does.
constexpr int64_t kLeastRow = 16;
constexpr int64_t kLeastRun = 512;

struct Dim {
  int64_t size = 1, stride = 0;
};

/// A view as rows, in runs of them, at `outer` places.
struct Shape {
  int64_t bytes = 0;  // of a row
  Dim rows;
  std::vector<Dim> outer;  // the slowest first
};

Shape shape_of(const View& view) {
  Shape shape{.bytes = element_bytes(view.dtype), .rows = {}, .outer = {}};
  size_t d = view.shape.size();
  const auto skip_ones = [&] {
    while (d > 0 && view.shape[d - 1] == 1) --d;
    return d > 0;
  };
  for (; skip_ones() && view.strides[d - 1] == shape.bytes; --d) shape.bytes *= view.shape[d - 1];
  if (skip_ones()) {
    shape.rows = {view.shape[d - 1], view.strides[d - 1]};
    --d;
  }
  for (; skip_ones() && view.strides[d - 1] == shape.rows.stride * shape.rows.size; --d)
    shape.rows.size *= view.shape[d - 1];
  for (size_t at = 0; at < d; ++at) {
    if (view.shape[at] > 1) shape.outer.push_back({view.shape[at], view.strides[at]});
  }
  return shape;
}

/// A dense one of elements finer than a byte is a row.
bool is_row(const View& view) { return view.is_dense(); }

void append(Runs& runs, const Run& run) {
  if (!runs.empty() && run.rows == 1 && runs.back().rows == 1 &&
      runs.back().data + runs.back().bytes == run.data) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

}  // namespace

bool lies_in_runs(const View& view) {
  const int64_t bytes = view.bytes();
  if (bytes < kLeastRun) return false;
  if (is_row(view)) return true;
  const Shape shape = shape_of(view);
  return shape.bytes >= kLeastRow && shape.bytes * shape.rows.size >= kLeastRun;
}

void append_runs(const View& view, Runs& runs) {
  const int64_t bytes = view.bytes();
  if (bytes == 0) return;
  if (is_row(view)) return append(runs, {view.data, bytes});
  const Shape shape = shape_of(view);
  std::vector<int64_t> index(shape.outer.size(), 0);
  std::byte* data = view.data;
  while (true) {
    append(runs, {data, shape.bytes, shape.rows.size, shape.rows.stride});
    size_t d = index.size();
    while (true) {
      if (d == 0) return;
      --d;
      data += shape.outer[d].stride;
      if (++index[d] < shape.outer[d].size) break;
      data -= shape.outer[d].stride * shape.outer[d].size;
      index[d] = 0;
    }
  }
}

}  // namespace spolia
