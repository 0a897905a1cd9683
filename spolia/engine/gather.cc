#include "spolia/engine/gather.h"

#include <algorithm>

namespace spolia {
namespace {

constexpr int64_t kFreeOverRead = int64_t{64} << 10;

/// Whether elements at these strides (in bytes) lie one after the other in row-major order.
bool is_dense(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t width) {
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != width) return false;
    width *= sizes[d];
  }
  return true;
}

struct Gatherer {
  int64_t scratch_bytes;
  std::vector<ReadOp>& ops;

  void add(ReadOp op) {
    const int64_t width = element_bytes(op.dtype);
    int64_t useful = width, span = width;
    size_t widest = 0;
    for (size_t d = 0; d < op.sizes.size(); ++d) {
      useful *= op.source_strides[d] == 0 ? 1 : op.sizes[d];
      span += (op.sizes[d] - 1) * op.source_strides[d];
      auto reach = [&](size_t dim) { return op.sizes[dim] > 1 ? op.source_strides[dim] : -1; };
      if (reach(d) > reach(widest)) widest = d;
    }
    op.length = span;
    op.in_place = op.dtype == op.target.dtype && is_dense(op.sizes, op.source_strides, width) &&
                  is_dense(op.sizes, op.target.strides, width);
    const bool fits = span <= scratch_bytes && (span <= 2 * useful || span <= kFreeOverRead);
    if (op.in_place || fits) {
      ops.push_back(std::move(op));
    } else {
      cut(op, widest);
    }
  }

  void cut(const ReadOp& op, size_t dim) {
    const int64_t half = op.sizes[dim] / 2;
    ReadOp low = op, high = op;
    low.sizes[dim] = half;
    high.sizes[dim] -= half;
    high.offset += half * op.source_strides[dim];
    high.target.data += half * op.target.strides[dim];
    add(std::move(low));
    add(std::move(high));
  }
};

}  // namespace

void plan_reads(const Payload& payload, size_t payload_number, DType dtype, const Box& chunk, const Box& part,
                const Block& target, int64_t scratch_bytes, std::vector<ReadOp>& ops) {
  const int64_t width = element_bytes(dtype);
  ReadOp op;
  op.payload = payload_number;
  op.dtype = dtype;
  op.sizes = part.sizes;
  op.source_strides = payload.strides;
  op.target = target;
  int64_t first = payload.first;
  for (size_t d = 0; d < part.ndim(); ++d) {
    first += (part.offsets[d] - chunk.offsets[d]) * payload.strides[d];
    op.source_strides[d] *= width;
  }
  op.offset = first * width;
  Gatherer{scratch_bytes, ops}.add(std::move(op));
}

}  // namespace spolia
