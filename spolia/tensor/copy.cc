#include "spolia/tensor/copy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "spolia/base/error.h"
#include "spolia/device/host_copy.h"
#include "spolia/tensor/strided.h"

namespace spolia {
namespace {

/// Runs from this length on are copied one by one: they fill lines on both sides.
constexpr int64_t kLongRun = kLineBytes;

/// The two innermost loops and what is copied in them. dst runs fastest along `col`; src along `row`, or
/// along `col` too.
struct Plane {
  PairDim row;
  PairDim col;
  int64_t run;     // bytes that are contiguous on both sides
  bool streaming;  // the whole copy is past the caches
};

/// The length of a run is known to the compiler where kRun is not 0.
template <int64_t kRun>
void copy_elements(std::byte* dst, const std::byte* src, const Plane& plane) {
  for (int64_t r = 0; r < plane.row.size; ++r) {
    std::byte* to = dst + r * plane.row.dst;
    const std::byte* from = src + r * plane.row.src;
    for (int64_t c = 0; c < plane.col.size; ++c) {
      std::memcpy(to + c * plane.col.dst, from + c * plane.col.src,
                  static_cast<size_t>(kRun == 0 ? plane.run : kRun));
    }
  }
}

void copy_long_runs(std::byte* dst, const std::byte* src, const Plane& plane) {
  for (int64_t r = 0; r < plane.row.size; ++r) {
    copy_rows_on_host(dst + r * plane.row.dst, plane.col.dst, src + r * plane.row.src, plane.col.src,
                      plane.run, plane.col.size, plane.streaming);
  }
}

/// Calls body(dst, src, part) for tiles of `side` x `side` elements. The inner loop follows src: several
/// streams that the hardware prefetches.
template <class Body>
void for_each_tile(std::byte* dst, const std::byte* src, const Plane& plane, int64_t side, Body body) {
  for (int64_t c = 0; c < plane.col.size; c += side) {
    for (int64_t r = 0; r < plane.row.size; r += side) {
      Plane part = plane;
      part.row.size = std::min(side, plane.row.size - r);
      part.col.size = std::min(side, plane.col.size - c);
      body(dst + r * plane.row.dst + c * plane.col.dst, src + r * plane.row.src + c * plane.col.src, part);
    }
  }
}

// Transposing N x N elements of kBytes in registers of 16 bytes, N = 16 / kBytes: log2(N) perfect shuffles of
// the registers. Written with the compilers' portable vectors: SSE2 on any x86-64, NEON on ARM.
using Vector = uint8_t __attribute__((vector_size(16)));
constexpr int64_t kVector = sizeof(Vector);

template <int kBytes, int kHalf>
Vector interleave(Vector a, Vector b) {
  // Element e of the result is element kHalf * N/2 + e/2 of a where e is even, of b where odd.
  auto pick = [](int i) constexpr {
    int e = i / kBytes;
    return (e % 2) * 16 + (kHalf * (16 / kBytes) / 2 + e / 2) * kBytes + i % kBytes;
  };
  return __builtin_shufflevector(a, b, pick(0), pick(1), pick(2), pick(3), pick(4), pick(5), pick(6), pick(7),
                                 pick(8), pick(9), pick(10), pick(11), pick(12), pick(13), pick(14),
                                 pick(15));
}

template <int kBytes>
void transpose_square(std::byte* dst, int64_t dst_row, const std::byte* src, int64_t src_col) {
  constexpr int kN = 16 / kBytes;
  std::array<Vector, kN> in, out;
#pragma GCC unroll 16
  for (int i = 0; i < kN; ++i) std::memcpy(&in[i], src + i * src_col, kVector);
#pragma GCC unroll 4
  for (int stage = 1; stage < kN; stage *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kN / 2; ++i) {
      out[2 * i] = interleave<kBytes, 0>(in[i], in[i + kN / 2]);
      out[2 * i + 1] = interleave<kBytes, 1>(in[i], in[i + kN / 2]);
    }
    in = out;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kN; ++i) std::memcpy(dst + i * dst_row, &in[i], kVector);
}

/// `rows` x `cols` elements, both multiples of N.
template <int kBytes>
void transpose_squares(std::byte* dst, int64_t dst_row, const std::byte* src, int64_t src_col, int64_t rows,
                       int64_t cols) {
  constexpr int64_t kN = 16 / kBytes;
  for (int64_t r = 0; r < rows; r += kN) {
    for (int64_t c = 0; c < cols; c += kN) {
      transpose_square<kBytes>(dst + r * dst_row + c * kBytes, dst_row, src + r * kBytes + c * src_col,
                               src_col);
    }
  }
}

/// A tile whose rows are contiguous in src and whose columns are contiguous in dst.
template <int kBytes>
void transpose_tile(std::byte* dst, const std::byte* src, const Plane& tile) {
  constexpr int64_t kN = 16 / kBytes;
  int64_t rows = tile.row.size / kN * kN, cols = tile.col.size / kN * kN;
  transpose_squares<kBytes>(dst, tile.row.dst, src, tile.col.src, rows, cols);
  Plane right = tile, below = tile;
  right.row.size = rows;
  right.col.size -= cols;
  below.row.size -= rows;
  copy_elements<kBytes>(dst + cols * kBytes, src + cols * tile.col.src, right);
  copy_elements<kBytes>(dst + rows * tile.row.dst, src + rows * kBytes, below);
}

/// The same for a tile of whole, aligned lines of dst, which are put together first and then streamed.
template <int kBytes>
void transpose_tile_of_lines(std::byte* dst, const std::byte* src, const Plane& tile) {
  constexpr int64_t kSide = kLineBytes / kBytes;
  alignas(kLineBytes) std::array<std::byte, kSide * kLineBytes> lines;
  transpose_squares<kBytes>(lines.data(), kLineBytes, src, tile.col.src, kSide, kSide);
  for (int64_t r = 0; r < kSide; ++r) stream_line(dst + r * tile.row.dst, lines.data() + r * kLineBytes);
}

template <int kBytes>
void transpose(std::byte* dst, const std::byte* src, const Plane& plane) {
  constexpr int64_t kSide = kLineBytes / kBytes;
  bool streaming = plane.streaming && (reinterpret_cast<uintptr_t>(dst) | plane.row.dst) % kLineBytes == 0;
  for_each_tile(dst, src, plane, kSide, [streaming](std::byte* to, const std::byte* from, const Plane& tile) {
    if (streaming && tile.row.size == kSide && tile.col.size == kSide) {
      transpose_tile_of_lines<kBytes>(to, from, tile);
    } else {
      transpose_tile<kBytes>(to, from, tile);
    }
  });
}

template <int64_t kRun>
void copy_tiled(std::byte* dst, const std::byte* src, const Plane& plane) {
  if constexpr (kRun == 1 || kRun == 2 || kRun == 4 || kRun == 8) {
    if (plane.col.dst == kRun && plane.row.src == kRun) return transpose<kRun>(dst, src, plane);
  }
  int64_t side = std::max<int64_t>(kLineBytes / plane.run, 4);
  for_each_tile(dst, src, plane, side, copy_elements<kRun>);
}

using PlaneCopy = void (*)(std::byte* dst, const std::byte* src, const Plane& plane);

template <int64_t kRun>
PlaneCopy choose(bool tiled) {
  return tiled ? copy_tiled<kRun> : copy_elements<kRun>;
}

PlaneCopy choose_plane_copy(int64_t run, bool tiled) {
  if (run >= kLongRun) return copy_long_runs;
  switch (run) {
    case 1:
      return choose<1>(tiled);
    case 2:
      return choose<2>(tiled);
    case 4:
      return choose<4>(tiled);
    case 8:
      return choose<8>(tiled);
    case 16:
      return choose<16>(tiled);
    default:
      return choose<0>(tiled);
  }
}

int64_t byte_count(std::span<const PairDim> dims, int64_t run) {
  int64_t bytes = run;  // cannot overflow: dst's elements are all there
  for (const PairDim& dim : dims) bytes *= dim.size;
  return bytes;
}

}  // namespace

void copy_strided(std::span<const int64_t> sizes, int64_t element_bytes, void* dst,
                  std::span<const int64_t> dst_strides, const void* src,
                  std::span<const int64_t> src_strides) {
  if (element_bytes < 1 || element_bytes > 16) {
    throw InvalidArgumentError("an element of {} bytes; 1 to 16 can be copied", element_bytes);
  }
  std::optional<PairDims> merged = merge_dims(sizes, dst_strides, src_strides);
  if (!merged) return;
  PairDims& dims = *merged;
  int64_t run = element_bytes;
  if (!dims.empty() && dims.back().dst == run && dims.back().src == run) {
    run *= dims.back().size;
    dims.pop_back();
  }
  bool tiled = make_plane(dims);
  bool streaming = byte_count(dims, run) >= kStreamBytes;
  Plane plane = {dims[dims.size() - 2], dims.back(), run, streaming};
  PlaneCopy copy_plane = choose_plane_copy(run, tiled);
  dims.resize(dims.size() - 2);
  for_each_offset(dims, [&](int64_t dst_offset, int64_t src_offset) {
    copy_plane(static_cast<std::byte*>(dst) + dst_offset, static_cast<const std::byte*>(src) + src_offset,
               plane);
  });
  if (streaming) finish_streaming();
}

}  // namespace spolia
