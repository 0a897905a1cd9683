#include "spolia/tensor/cast.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "spolia/base/error.h"
#include "spolia/tensor/cast_kernels.h"
#include "spolia/tensor/copy.h"
#include "spolia/tensor/strided.h"

namespace spolia {
namespace {

CastKernel cast_kernel(DType to, DType from) {
  if (CastKernel kernel = simd_cast_kernel(to, from)) return kernel;
  if (CastKernel kernel = scalar_cast_kernel(to, from)) return kernel;
  throw UnsupportedError("cannot cast {} to {}; casts are between float64, float32, float16 and bfloat16",
                         name_of(from), name_of(to));
}

/// A tile's elements, which are gathered, cast in one run, and scattered.
constexpr int64_t kTileElements = 1024;
constexpr int64_t kTileSide = 32;  // where dst and src run fastest along different dims

void cast_tile(const PairDim& row, const PairDim& col, int64_t to_bytes, std::byte* dst, int64_t from_bytes,
               const std::byte* src, CastKernel kernel) {
  alignas(64) std::array<std::byte, kTileElements * 8> gathered, converted;
  std::array sizes = {row.size, col.size};
  copy_strided(sizes, from_bytes, gathered.data(), std::array{col.size * from_bytes, from_bytes}, src,
               std::array{row.src, col.src});
  kernel(converted.data(), gathered.data(), row.size * col.size);
  copy_strided(sizes, to_bytes, dst, std::array{row.dst, col.dst}, converted.data(),
               std::array{col.size * to_bytes, to_bytes});
}

}  // namespace

bool can_cast(DType to, DType from) { return scalar_cast_kernel(to, from) != nullptr; }

void cast(DType to, void* dst, DType from, const void* src, int64_t count) {
  const auto kernel = cast_kernel(to, from);
  if (count > 0) kernel(dst, src, count);  // no elements may have no address
}

void cast_strided(std::span<const int64_t> sizes, DType to, void* dst, std::span<const int64_t> dst_strides,
                  DType from, const void* src, std::span<const int64_t> src_strides) {
  CastKernel kernel = cast_kernel(to, from);
  int64_t to_bytes = element_bytes(to), from_bytes = element_bytes(from);
  std::optional<PairDims> merged = merge_dims(sizes, dst_strides, src_strides);
  if (!merged) return;
  PairDims& dims = *merged;
  auto* dst_base = static_cast<std::byte*>(dst);
  auto* src_base = static_cast<const std::byte*>(src);

  if (dims.empty() || (dims.back().dst == to_bytes && dims.back().src == from_bytes)) {
    int64_t run = dims.empty() ? 1 : dims.back().size;
    if (!dims.empty()) dims.pop_back();
    for_each_offset(dims, [&](int64_t d, int64_t s) { kernel(dst_base + d, src_base + s, run); });
    return;
  }

  bool tiled = make_plane(dims);
  PairDim row = dims[dims.size() - 2], col = dims.back();
  dims.resize(dims.size() - 2);
  int64_t cols = tiled ? kTileSide : std::min(col.size, kTileElements);
  int64_t rows = kTileElements / cols;
  for_each_offset(dims, [&](int64_t d, int64_t s) {
    for (int64_t c = 0; c < col.size; c += cols) {
      for (int64_t r = 0; r < row.size; r += rows) {
        PairDim tile_row = {std::min(rows, row.size - r), row.dst, row.src};
        PairDim tile_col = {std::min(cols, col.size - c), col.dst, col.src};
        cast_tile(tile_row, tile_col, to_bytes, dst_base + d + r * row.dst + c * col.dst, from_bytes,
                  src_base + s + r * row.src + c * col.src, kernel);
      }
    }
  });
}

}  // namespace spolia
