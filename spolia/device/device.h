// Devices: where memory is, and the seam through which kinds of device come.
//
// A backend gives memory and moves bytes; everything above it works on the Buffers of buffer.h. There are the
// CPU's (cpu.h), and CUDA's (cuda.h), whose driver is loaded when the first of its devices is asked for.
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

/// A point in what a device has been told to do: a CUDA event (cudaEvent_t, CUevent) that has been recorded.
/// A plain handle, borrowed; one of nullptr has happened. Host memory needs none: it is ready when a call is
/// made.
struct DeviceEvent {
  void* handle = nullptr;
};

/// What a kind of device does for Spolia. Every call returns when it is done. Thread-safe; lives as long as
/// the process.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Whether the host may read and write this memory through plain pointers.
  virtual bool host_accessible() const = 0;

  /// `bytes` (>= 0) of memory with unspecified contents, aligned to 64 bytes, and where the host
  /// reaches it to 4096 from 4096 bytes on. IoError where there is not enough.
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
  /// Copies between this device's memory and the host's.
  virtual void copy_from_host(std::byte* dst, const std::byte* src, int64_t bytes) const = 0;
  virtual void copy_to_host(std::byte* dst, const std::byte* src, int64_t bytes) const = 0;
  /// Returns when the event has happened.
  virtual void wait_for(DeviceEvent event) const = 0;
};

/// The backend of a device; UnsupportedError naming the device, and why, where it is not there.
const DeviceBackend& backend_of(Device device);

}  // namespace spolia
