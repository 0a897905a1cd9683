#include "spolia/device/host_copy.h"

#include <algorithm>

namespace spolia {
namespace {

/// How far ahead of the line being copied source lines are asked for: in rows up to kLongRow bytes, whose
/// gaps the hardware's own prefetch cannot see past, that many bytes' worth of rows; else within the row.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kLongRow = 16384;

int64_t prefetch_distance(int64_t row_bytes, int64_t src_pitch) {
  if (row_bytes > kLongRow) return kPrefetchBytes;
  return std::max<int64_t>(kPrefetchBytes / std::max<int64_t>(row_bytes, 1), 1) * src_pitch;
}

/// Whole lines of dst are streamed, what is cut at both ends copied. `later`: where the source will be read
/// next.
void stream_row(std::byte* dst, const std::byte* src, uintptr_t later, int64_t bytes) {
  int64_t head = std::min(bytes, -reinterpret_cast<int64_t>(dst) & (kLineBytes - 1));
  std::memcpy(dst, src, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(later + static_cast<uintptr_t>(at)), 0, 1);
    stream_line(dst + at, src + at);
  }
  std::memcpy(dst + at, src + at, static_cast<size_t>(bytes - at));
}

}  // namespace

void copy_rows_on_host(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                       int64_t row_bytes, int64_t rows, bool streaming) {
  if (!streaming) {
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(dst + row * dst_pitch, src + row * src_pitch, static_cast<size_t>(row_bytes));
    }
    return;
  }
  // `later` is a number: past the last row it points nowhere, which a prefetch may and a pointer may not.
  auto ahead = static_cast<uintptr_t>(prefetch_distance(row_bytes, src_pitch));
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* from = src + row * src_pitch;
    stream_row(dst + row * dst_pitch, from, reinterpret_cast<uintptr_t>(from) + ahead, row_bytes);
  }
}

}  // namespace spolia
