// 16 x 16 words of 32 bits, transposed in registers.
#pragma once

#include <cstdint>
#include <cstring>

namespace spolia {

typedef float Lanes16 __attribute__((vector_size(64)));

/// The vectors become the columns of what they were: each stage exchanges halves of ever larger blocks.
__attribute__((always_inline)) static inline void transpose_lanes(Lanes16 (&rows)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 16; ++i) {
    if (i & 1) continue;
    const Lanes16 low = rows[i], high = rows[i + 1];
    rows[i] = __builtin_shufflevector(low, high, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    rows[i + 1] =
        __builtin_shufflevector(low, high, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & 2) continue;
    const Lanes16 low = rows[i], high = rows[i + 2];
    rows[i] = __builtin_shufflevector(low, high, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    rows[i + 2] =
        __builtin_shufflevector(low, high, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & 4) continue;
    const Lanes16 low = rows[i], high = rows[i + 4];
    rows[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    rows[i + 4] =
        __builtin_shufflevector(low, high, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & 8) continue;
    const Lanes16 low = rows[i], high = rows[i + 8];
    rows[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    rows[i + 8] =
        __builtin_shufflevector(low, high, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

}  // namespace spolia
