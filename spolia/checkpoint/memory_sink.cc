#include "spolia/checkpoint/memory_sink.h"

#include <utility>

#include "spolia/device/buffer.h"
#include "spolia/device/strided_copy.h"
#include "spolia/layout/box.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

Dims dense_strides(const View& view) { return dense_view(view.data, view.dtype, view.shape).strides; }

/// The region's part of a target's view. Elements finer than a byte are bytes here.
View part_of(const View& view, const TileRegion& region) {
  View part = view;
  for (size_t d = 0; d < region.box.ndim(); ++d) {
    part.data += region.box.offsets[d] * (is_sub_byte(view.dtype) ? 1 : view.strides[d]);
  }
  part.shape = region.box.sizes;
  if (is_sub_byte(view.dtype)) part.strides = Dims{1};
  return part;
}

int64_t bytes_of(const View& view, const TileRegion& region) {
  return region.box.numel() * element_bytes(view.dtype);
}

void copy_in(const View& to, const std::byte* from) {
  const int64_t width = element_bytes(to.dtype);
  const DeviceBackend& device = backend_of(to.device);
  if (device.host_accessible()) {
    copy_strided(to.shape, width, to.data, to.strides, from, dense_strides(to));
    return;
  }
  Buffer staged(numel(to.shape) * width, to.device);
  device.copy_from_host(staged.data(), from, staged.size());
  copy_strided_on(device, to.shape, width, to.data, to.strides, staged.data(), dense_strides(to));
}

}  // namespace

MemorySink::MemorySink(std::vector<View> views) : views_(std::move(views)) {
  for (const View& view : views_) left_.push_back(view.bytes());
}

std::optional<std::span<std::byte>> MemorySink::memory_of(std::span<const TileRegion> regions) {
  std::byte* begin = nullptr;
  int64_t bytes = 0;
  for (const TileRegion& region : regions) {
    const View& view = views_[region.target];
    const View part = part_of(view, region);
    if (!part.is_dense() || !backend_of(view.device).host_accessible()) return std::nullopt;
    if (begin == nullptr) begin = part.data;
    if (part.data != begin + bytes) return std::nullopt;
    bytes += bytes_of(view, region);
  }
  return std::span(begin, static_cast<size_t>(bytes));
}

void MemorySink::put(size_t, std::span<const TileRegion> regions, std::span<std::byte> bytes) {
  for (const TileRegion& region : regions) {
    const View& view = views_[region.target];
    const View part = part_of(view, region);
    const std::byte* from = bytes.data() + region.offset;
    if (part.data != from) copy_in(part, from);
    note(region.target, bytes_of(view, region));
  }
}

void MemorySink::wait_for(size_t target) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return left_[target] <= 0 || given_up_; });
}

void MemorySink::give_up() {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
  }
  changed_.notify_all();
}

void MemorySink::note(size_t target, int64_t bytes) {
  bool complete;
  {
    const std::lock_guard lock(mutex_);
    complete = (left_[target] -= bytes) <= 0;
  }
  if (complete) changed_.notify_all();
}

}  // namespace spolia
