// Devices: where memory is, and the seam through which kinds of device come.
//
// A backend gives memory and moves bytes; everything above it works on the Buffers of buffer.h. This build
// has one backend, the CPU's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace spolia {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:1": PyTorch's names.
std::string name_of(Device device);

/// What a kind of device does for Spolia. Thread-safe; lives as long as the process.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Whether the host may read and write this memory through plain pointers.
  virtual bool host_accessible() const = 0;

  /// `bytes` (>= 0) of memory with unspecified contents, aligned to 64 bytes, and to 4096 from 4096 bytes on.
  /// IoError where there is not enough.
  virtual std::byte* allocate(int64_t bytes) const = 0;
  /// Gives back what allocate(bytes) returned.
  virtual void release(std::byte* memory, int64_t bytes) const noexcept = 0;
  /// Makes pages resident now, rather than one by one at first touch. Keeps the contents. IoError where there
  /// is not enough memory.
  virtual void prefault(std::byte* memory, int64_t bytes) const = 0;

  /// Copies `rows` runs of `row_bytes` that lie `dst_pitch` and `src_pitch` bytes apart. Both sides are this
  /// device's memory, do not overlap, and the rows of dst do not overlap each other. Copies of more dims are
  /// made of these (tensor/copy.h).
  virtual void copy_rows(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                         int64_t row_bytes, int64_t rows) const = 0;
};

/// The backend of a device; UnsupportedError naming the device where it is not there.
const DeviceBackend& backend_of(Device device);

}  // namespace spolia
