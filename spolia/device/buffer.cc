#include "spolia/device/buffer.h"

#include <utility>

#include "spolia/base/error.h"

namespace spolia {

Buffer::Buffer(int64_t bytes, Device device) : size_(bytes), device_(device) {
  if (bytes < 0) throw InvalidArgumentError("a buffer cannot have {} bytes", bytes);
  data_ = backend_of(device).allocate(bytes);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(device_, other.device_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) backend_of(device_).release(data_, size_);
}

std::span<const std::byte> Buffer::bytes() const {
  if (!backend_of(device_).host_accessible()) {
    throw InvalidArgumentError("memory on {} cannot be reached from the host; copy it first",
                               name_of(device_));
  }
  return {data_, static_cast<size_t>(size_)};
}

std::span<std::byte> Buffer::bytes() {
  std::span<const std::byte> held = std::as_const(*this).bytes();
  return {data_, held.size()};
}

void Buffer::prefault() { backend_of(device_).prefault(data_, size_); }

}  // namespace spolia
