#include "spolia/optim/bfloat16_products.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "spolia/optim/transpose_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SPOLIA_TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx512bf16,fma")))
#define SPOLIA_INLINE SPOLIA_TARGET __attribute__((always_inline)) static inline
#endif

namespace spolia {

#if defined(__x86_64__)
namespace {

// The right operand is packed, a panel at a time, which then stays in the nearest cache for all rows of the
// left one: for each pair of its rows the pairs of kColumns columns. A tile of sums is kept in registers.
constexpr int64_t kRows = 6, kVectors = 4, kLanes = 16, kColumns = kVectors * kLanes;
constexpr int64_t kDepth = kBFloat16PanelBytes / (2 * kColumns);
static_assert(kDepth % 32 == 0);

using Half = uint16_t;

/// Of lanes that begin at `at`, those below `end`.
SPOLIA_INLINE __mmask16 below(int64_t end, int64_t at) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(end - at, 0, 16)) - 1);
}
SPOLIA_INLINE __mmask32 halves_below(int64_t end, int64_t at) {
  return static_cast<__mmask32>((uint64_t{1} << std::clamp<int64_t>(end - at, 0, 32)) - 1);
}

/// Adds the products of one pair of each row to the sums.
template <int kUsed>
SPOLIA_INLINE void add_pairs(__m512 (&sums)[kRows][kUsed], const uint32_t (&pairs)[kRows],
                             const uint32_t* panel) {
  __m512i factors[kUsed];
#pragma GCC unroll 8
  for (int v = 0; v < kUsed; ++v) factors[v] = _mm512_load_si512(panel + v * kLanes);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(pairs[i]));
#pragma GCC unroll 8
    for (int v = 0; v < kUsed; ++v)
      sums[i][v] = _mm512_dpbf16_ps(sums[i][v], (__m512bh)pair, (__m512bh)factors[v]);
  }
}

/// Up to kRows rows of c and kUsed vectors of its columns, of which `columns` exist; added to what is there
/// or not.
template <int kUsed>
SPOLIA_TARGET __attribute__((noinline)) void tile(int64_t rows, int64_t columns, int64_t depth, const Half* a,
                                                  int64_t a_stride, const uint32_t* panel, bool add, float* c,
                                                  int64_t c_stride) {
  const Half* a_rows[kRows];  // the last row again where there are fewer
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; ++i) a_rows[i] = a + std::min(i, rows - 1) * a_stride;
  __m512 sums[kRows][kUsed];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < kUsed; ++v) sums[i][v] = _mm512_setzero_ps();
  uint32_t pairs[kRows];
  int64_t k = 0;
  for (; k + 1 < depth; k += 2, panel += kColumns) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) std::memcpy(&pairs[i], a_rows[i] + k, 4);
    add_pairs<kUsed>(sums, pairs, panel);
  }
  if (k < depth) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) pairs[i] = a_rows[i][k];
    add_pairs<kUsed>(sums, pairs, panel);
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; ++i) {
    if (i >= rows) break;
#pragma GCC unroll 8
    for (int v = 0; v < kUsed; ++v) {
      const __mmask16 mask = below(columns, v * kLanes);
      float* to = c + i * c_stride + v * kLanes;
      __m512 sum = sums[i][v];
      if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
      _mm512_mask_storeu_ps(to, mask, sum);
    }
  }
}

/// The pairs of rows 2 p and 2 p + 1 of b.
SPOLIA_INLINE void pack_rows(int64_t depth, int64_t columns, const Half* b, int64_t b_stride,
                             uint32_t* panel) {
  alignas(64) static constexpr Half kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t k = 0; k < depth; k += 2, b += 2 * b_stride, panel += kColumns)
    for (int64_t j = 0; j < columns; j += 32) {
      const __mmask32 mask = halves_below(columns, j);
      const __m512i even = _mm512_maskz_loadu_epi16(mask, b + j),
                    odd = k + 1 < depth ? _mm512_maskz_loadu_epi16(mask, b + b_stride + j)
                                        : _mm512_setzero_si512();
      _mm512_store_si512(panel + j, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(panel + j + kLanes, _mm512_permutex2var_epi16(even, high, odd));
    }
}

/// The same of a b whose transpose lies there: its pairs are words, and are transposed as such.
SPOLIA_INLINE void pack_columns(int64_t depth, int64_t columns, const Half* b, int64_t b_stride,
                                uint32_t* panel) {
  for (int64_t j = 0; j < columns; j += kLanes)
    for (int64_t k = 0; k < depth; k += 32) {
      const __mmask32 mask = halves_below(depth, k);
      Lanes16 words[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i)
        words[i] = (Lanes16)(j + i < columns ? _mm512_maskz_loadu_epi16(mask, b + (j + i) * b_stride + k)
                                             : _mm512_setzero_si512());
      transpose_lanes(words);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i)
        if (k + 2 * i < depth) std::memcpy(panel + (k / 2 + i) * kColumns + j, &words[i], sizeof(Lanes16));
    }
}

SPOLIA_TARGET void product(bool lower, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, float* c,
                           int64_t c_stride, void* packed) {
  auto* panel = static_cast<uint32_t*>(packed);
  auto* left = static_cast<const Half*>(a.data);
  auto* right = static_cast<const Half*>(b.data);
  for (int64_t j = 0; j < n; j += kColumns)
    for (int64_t at = 0; at < k; at += kDepth) {
      const int64_t columns = std::min(kColumns, n - j), depth = std::min(kDepth, k - at);
      if (b.transposed) {
        pack_columns(depth, columns, right + j * b.stride + at, b.stride, panel);
      } else {
        pack_rows(depth, columns, right + at * b.stride + j, b.stride, panel);
      }
      for (int64_t i = lower ? j : 0; i < m; i += kRows) {
        const int64_t needed = lower ? std::min(columns, i + kRows - j) : columns;
        constexpr std::array kTiles{tile<1>, tile<2>, tile<3>, tile<4>};
        kTiles[static_cast<size_t>((needed - 1) / kLanes)](m - i, columns, depth, left + i * a.stride + at,
                                                           a.stride, panel, at > 0, c + i * c_stride + j,
                                                           c_stride);
      }
    }
}

SPOLIA_TARGET void narrow_symmetric(int64_t size, const float* from, int64_t from_stride, void* to,
                                    int64_t to_stride) {
  auto store = [&](int64_t row, int64_t column, Lanes16 values) SPOLIA_TARGET {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(static_cast<Half*>(to) + row * to_stride + column, &halves, sizeof halves);
  };
  for (int64_t i = 0; i < size; i += 16)
    for (int64_t j = 0; j <= i; j += 16) {
      Lanes16 lower[16], upper[16];
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k)  // of a tile on the diagonal what is below it
        upper[k] = lower[k] = i + k >= size ? Lanes16{}
                                            : (Lanes16)_mm512_maskz_loadu_ps(
                                                  static_cast<__mmask16>(i == j ? (1 << k) - 1 : 0xFFFF),
                                                  from + (i + k) * from_stride + j);
      transpose_lanes(upper);
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) {
        if (i != j && i + k < size) store(i + k, j, lower[k]);
        if (j + k < size) store(j + k, i, i == j ? upper[k] + lower[k] : upper[k]);
      }
    }
}

}  // namespace

const BFloat16Products* bfloat16_products() {
  static constexpr BFloat16Products kAll = {product, narrow_symmetric};
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma")
             ? &kAll
             : nullptr;
}
#else
const BFloat16Products* bfloat16_products() { return nullptr; }
#endif

}  // namespace spolia
