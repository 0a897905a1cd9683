#include "spolia/optim/small_products.h"

#include <algorithm>
#include <cstring>

#include "spolia/optim/transpose_tile.h"

#define SPOLIA_INLINE __attribute__((always_inline)) static inline

namespace spolia {

#if defined(__x86_64__)
namespace {

typedef float Lanes8 __attribute__((vector_size(32)));

constexpr int64_t kTileRows = 6;  // with four vectors a row: 24 sums in registers

/// Rows [row, row + kTileRows) of c, those below `rows`, and kVectors vectors of columns from `column` on.
template <class Lanes, int kVectors>
SPOLIA_INLINE void tile(int64_t row, int64_t rows, int64_t column, int64_t depth, SmallMatrix a,
                        SmallMatrix b, SmallMatrix c) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  const float* a_rows[kTileRows];  // the last row again where there are fewer
  for (int64_t i = 0; i < kTileRows; ++i) a_rows[i] = a.data + std::min(row + i, rows - 1) * a.stride;
  Lanes sums[kTileRows][kVectors] = {};
  const float* b_row = b.data + column;
  for (int64_t k = 0; k < depth; ++k, b_row += b.stride) {
    Lanes factors[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) std::memcpy(&factors[v], b_row + v * kLanes, sizeof(Lanes));
#pragma GCC unroll 8
    for (int64_t i = 0; i < kTileRows; ++i) {
      const float factor = a_rows[i][k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[i][v] += factor * factors[v];
    }
  }
  for (int64_t i = 0; i < kTileRows && row + i < rows; ++i)
    for (int v = 0; v < kVectors; ++v)
      std::memcpy(c.data + (row + i) * c.stride + column + v * kLanes, &sums[i][v], sizeof(Lanes));
}

template <class Lanes>
SPOLIA_INLINE void tile_row(int64_t row, int64_t rows, int64_t columns, int64_t depth, SmallMatrix a,
                            SmallMatrix b, SmallMatrix c) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  constexpr int kMost = kLanes == 16 ? 4 : 2;  // as registers allow
  int64_t column = 0;
  for (; column + (kMost - 1) * kLanes < columns; column += kMost * kLanes)
    tile<Lanes, kMost>(row, rows, column, depth, a, b, c);
  if constexpr (kMost == 4) {
    if (column + 2 * kLanes < columns) {
      tile<Lanes, 3>(row, rows, column, depth, a, b, c);
      return;
    }
    if (column + kLanes < columns) {
      tile<Lanes, 2>(row, rows, column, depth, a, b, c);
      return;
    }
  }
  if (column < columns) tile<Lanes, 1>(row, rows, column, depth, a, b, c);
}

template <class Lanes>
SPOLIA_INLINE void lower_body(int64_t size, int64_t depth, SmallMatrix a, SmallMatrix b, SmallMatrix c) {
  for (int64_t row = 0; row < size; row += kTileRows)
    tile_row<Lanes>(row, size, std::min(size, row + kTileRows), depth, a, b, c);
}

template <class Lanes>
SPOLIA_INLINE void product_body(int64_t rows, int64_t columns, int64_t depth, SmallMatrix a, SmallMatrix b,
                                SmallMatrix c) {
  constexpr int64_t kPanel = 64;  // columns of b that the nearest cache holds for all rows
  for (int64_t column = 0; column < columns; column += kPanel)
    for (int64_t row = 0; row < rows; row += kTileRows)
      tile_row<Lanes>(row, rows, std::min(kPanel, columns - column), depth, a, {b.data + column, b.stride},
                      {c.data + column, c.stride});
}

SPOLIA_INLINE void transpose_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Lanes16 rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Lanes16));
  transpose_lanes(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Lanes16));
}

SPOLIA_INLINE void transpose_body(int64_t rows, int64_t columns, SmallMatrix from, SmallMatrix to) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 16) {
      if (i + 16 <= rows && j + 16 <= columns) {
        transpose_tile(from.data + i * from.stride + j, from.stride, to.data + j * to.stride + i, to.stride);
      } else {
        for (int64_t k = i; k < std::min(i + 16, rows); ++k)
          for (int64_t l = j; l < std::min(j + 16, columns); ++l)
            to.data[l * to.stride + k] = from.data[k * from.stride + l];
      }
    }
}

SPOLIA_INLINE void mirror_body(int64_t size, SmallMatrix matrix) {
  typedef int32_t Signed16 __attribute__((vector_size(64)));
  constexpr Signed16 kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < size; i += 16)
    for (int64_t j = 0; j <= i; j += 16) {
      Lanes16 rows[16] = {};
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k)
        if (i + k < size) std::memcpy(&rows[k], matrix.data + (i + k) * matrix.stride + j, sizeof(Lanes16));
      transpose_lanes(rows);
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) {
        float* to = matrix.data + (j + k) * matrix.stride + i;
        if (i == j && j + k < size) {
          Lanes16 row;
          std::memcpy(&row, to, sizeof row);
          rows[k] = kLane > k ? rows[k] : row;
        }
        if (j + k < size) std::memcpy(to, &rows[k], sizeof rows[k]);
      }
    }
}

#define SPOLIA_LEVEL(NAME, LANES, TARGET)                                                                \
  struct NAME {                                                                                          \
    TARGET static void lower(int64_t size, int64_t depth, SmallMatrix a, SmallMatrix b, SmallMatrix c) { \
      lower_body<LANES>(size, depth, a, b, c);                                                           \
    }                                                                                                    \
    TARGET static void product(int64_t m, int64_t n, int64_t k, SmallMatrix a, SmallMatrix b,            \
                               SmallMatrix c) {                                                          \
      product_body<LANES>(m, n, k, a, b, c);                                                             \
    }                                                                                                    \
    TARGET static void transpose(int64_t rows, int64_t columns, SmallMatrix from, SmallMatrix to) {      \
      transpose_body(rows, columns, from, to);                                                           \
    }                                                                                                    \
    TARGET static void mirror(int64_t size, SmallMatrix matrix) { mirror_body(size, matrix); }           \
    static constexpr SmallProducts kAll = {lower, product, transpose, mirror};                           \
  }

SPOLIA_LEVEL(Avx2, Lanes8, __attribute__((target("avx2,fma"))));
SPOLIA_LEVEL(Avx512, Lanes16, __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma"))));

}  // namespace

const SmallProducts* small_products() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("fma"))
    return &Avx512::kAll;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &Avx2::kAll : nullptr;
}
#else
const SmallProducts* small_products() { return nullptr; }
#endif

}  // namespace spolia
