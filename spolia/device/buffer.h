// Owned memory on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spolia/device/device.h"

namespace spolia {

/// A block of a device's memory, given back when the Buffer goes. Moves, never copies. A Buffer made by
/// default or moved from holds nothing. Alignment: DeviceBackend::allocate.
class Buffer {
 public:
  Buffer() = default;
  /// `bytes` of unspecified contents. InvalidArgumentError where negative, UnsupportedError where the device
  /// is not there, IoError where there is not enough memory.
  explicit Buffer(int64_t bytes, Device device = {});
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  Device device() const { return device_; }

  /// The bytes. InvalidArgumentError where the host cannot reach them.
  std::span<std::byte> bytes();
  std::span<const std::byte> bytes() const;

  /// Makes all pages resident now: first touch is slow, and better paid before the clock starts.
  void prefault();

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  Device device_;
};

}  // namespace spolia
