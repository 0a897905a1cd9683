#include "spolia/device/cpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/device/host_copy.h"

namespace spolia {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

[[noreturn]] void throw_out_of_memory(int error_number, int64_t bytes) {
  throw_system_error(error_number, fmt::format("cannot get {} of memory on cpu", human_bytes(bytes)));
}

bool is_mapped(int64_t bytes) { return bytes >= kHugePage; }

/// Pages of their own, on a huge page's boundary.
std::byte* map_pages(int64_t bytes) {
  int64_t length = align_up(bytes, kPage);
  int64_t reserved = checked_add(length, kHugePage);
  void* mapping = mmap(nullptr, static_cast<size_t>(reserved), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw_out_of_memory(errno, bytes);
  auto* base = static_cast<std::byte*>(mapping);
  int64_t before = align_up(reinterpret_cast<int64_t>(base), kHugePage) - reinterpret_cast<int64_t>(base);
  int64_t after = reserved - before - length;
  if (before > 0) munmap(base, static_cast<size_t>(before));
  if (after > 0) munmap(base + before + length, static_cast<size_t>(after));
  madvise(base + before, static_cast<size_t>(length), MADV_HUGEPAGE);  // a hint: refusal does no harm
  return base + before;
}

/// For kernels before 5.14, which cannot populate a range.
void touch_pages(std::byte* memory, int64_t bytes) {
  auto* touched = reinterpret_cast<volatile std::byte*>(memory);
  for (int64_t at = 0; at < bytes; at += kPage) touched[at] = touched[at];
}

}  // namespace

std::byte* CpuBackend::allocate(int64_t bytes) const {
  if (is_mapped(bytes)) return map_pages(bytes);
  int64_t alignment = bytes < kPage ? kLine : kPage;
  int64_t length = align_up(std::max<int64_t>(bytes, 1), alignment);
  void* memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(length));
  if (memory == nullptr) throw_out_of_memory(ENOMEM, bytes);
  return static_cast<std::byte*>(memory);
}

void CpuBackend::release(std::byte* memory, int64_t bytes) const noexcept {
  if (is_mapped(bytes)) {
    munmap(memory, static_cast<size_t>(ceil_div(bytes, kPage) * kPage));
  } else {
    std::free(memory);
  }
}

void CpuBackend::prefault(std::byte* memory, int64_t bytes) const {
  if (!is_mapped(bytes)) return touch_pages(memory, bytes);
#ifdef MADV_POPULATE_WRITE
  if (madvise(memory, static_cast<size_t>(ceil_div(bytes, kPage) * kPage), MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_out_of_memory(errno, bytes);
#endif
  touch_pages(memory, bytes);
}

void CpuBackend::copy_rows(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                           int64_t row_bytes, int64_t rows) const {
  bool streaming = row_bytes * rows >= kStreamBytes;
  copy_rows_on_host(dst, dst_pitch, src, src_pitch, row_bytes, rows, streaming);
  if (streaming) finish_streaming();
}

}  // namespace spolia
