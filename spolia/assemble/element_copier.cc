#include "spolia/assemble/element_copier.h"

#include <algorithm>
#include <cstring>

#include "spolia/device/strided_copy.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

bool on_host(Device device) { return backend_of(device).host_accessible(); }

void copy_on_host(const View& to, const ConstView& from) {
  if (to.dtype != from.dtype) {
    cast_strided(to.shape, to.dtype, to.data, to.strides, from.dtype, from.data, from.strides);
  } else if (to.is_dense() && from.is_dense()) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
  } else {
    copy_strided(to.shape, element_bytes(to.dtype), to.data, to.strides, from.data, from.strides);
  }
}

void copy_on_device(const View& to, const ConstView& from) {
  copy_strided_on(backend_of(to.device), to.shape, element_bytes(to.dtype), to.data, to.strides, from.data,
                  from.strides);
}

template <class Byte>
BasicView<Byte> part_of(BasicView<Byte> view, size_t dim, int64_t begin, int64_t size) {
  view.data += begin * view.strides[dim];
  view.shape[dim] = size;
  return view;
}

}  // namespace

ElementCopier::ElementCopier(const std::set<int>& cuda_devices, int64_t bytes) {
  // Two on the host, for what comes from a device, and for what a cast makes of it.
  share_ = bytes / (2 + std::ssize(cuda_devices)) / 64 * 64;
  for (int i = 0; i < 2; ++i) buffers_.emplace_back(share_);
  for (int index : cuda_devices) buffers_.emplace_back(share_, Device{DeviceKind::kCuda, index});
}

int64_t ElementCopier::bytes() const { return share_ * std::ssize(buffers_); }

std::byte* ElementCopier::memory_on(Device device) {
  return std::ranges::find_if(buffers_, [&](const Buffer& b) { return b.device() == device; })->data();
}

void ElementCopier::copy(const View& to, const ConstView& from) {
  if (numel(to.shape) == 0) return;
  if (on_host(to.device) && on_host(from.device)) return copy_on_host(to, from);
  if (to.device == from.device && to.dtype == from.dtype) return copy_on_device(to, from);
  const int64_t bytes = std::max(to.bytes(), from.bytes());
  if (bytes <= share_) return copy_through_host(to, from);
  size_t dim = 0;
  while (to.shape[dim] == 1) ++dim;
  const int64_t size = to.shape[dim];
  const int64_t at_once = std::max<int64_t>(1, share_ / (bytes / size));
  for (int64_t begin = 0; begin < size; begin += at_once) {
    const int64_t count = std::min(at_once, size - begin);
    copy(part_of(to, dim, begin, count), part_of(from, dim, begin, count));
  }
}

void ElementCopier::copy_through_host(const View& to, const ConstView& from) {
  ConstView on_host_now = from;
  if (!on_host(from.device)) {
    const View fetched = dense_view(buffers_[0].data(), from.dtype, from.shape);
    const std::byte* dense = from.data;
    if (!from.is_dense()) {
      std::byte* gathered = memory_on(from.device);
      copy_on_device(dense_view(gathered, from.dtype, from.shape, from.device), from);
      dense = gathered;
    }
    backend_of(from.device).copy_to_host(fetched.data, dense, fetched.bytes());
    on_host_now = fetched;
  }
  if (on_host(to.device)) return copy_on_host(to, on_host_now);
  if (to.dtype != on_host_now.dtype || !on_host_now.is_dense()) {
    const View made = dense_view(buffers_[1].data(), to.dtype, to.shape);
    copy_on_host(made, on_host_now);
    on_host_now = made;
  }
  const DeviceBackend& device = backend_of(to.device);
  if (to.is_dense()) return device.copy_from_host(to.data, on_host_now.data, to.bytes());
  const View arrived = dense_view(memory_on(to.device), to.dtype, to.shape, to.device);
  device.copy_from_host(arrived.data, on_host_now.data, arrived.bytes());
  copy_on_device(to, arrived);
}

}  // namespace spolia
