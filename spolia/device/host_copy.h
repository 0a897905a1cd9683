// Copying rows of host memory, around the caches where there is too much for them.
//
// An ordinary store first reads the line it writes to. A streaming (non-temporal) store of a whole line does
// not: a third less traffic, which is all that counts past the caches. Such stores become visible to other
// threads only after finish_streaming().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace spolia {

inline constexpr int64_t kLineBytes = 64;

/// From this many bytes copied in all, streaming is no slower even where the target is read right after.
inline constexpr int64_t kStreamBytes = int64_t{4} << 20;

/// Copies one line to `dst`, which is aligned to kLineBytes, around the caches.
inline void stream_line(std::byte* dst, const std::byte* src) {
#ifdef __SSE2__
  auto* to = reinterpret_cast<__m128i*>(dst);
  auto* from = reinterpret_cast<const __m128i*>(src);
  __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
  __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
#else
  std::memcpy(dst, src, kLineBytes);
#endif
}

/// Orders all streamed lines of this thread before whatever it stores next.
inline void finish_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

/// Copies `rows` runs of `row_bytes` that lie `dst_pitch` and `src_pitch` bytes apart; nothing overlaps.
/// Where `streaming`, finish_streaming() is left to the caller.
void copy_rows_on_host(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                       int64_t row_bytes, int64_t rows, bool streaming);

}  // namespace spolia
