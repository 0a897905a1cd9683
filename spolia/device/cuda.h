// CUDA devices: their memory, and the streams and events in which they are told what to do.
//
// Every call makes the device's primary context current for as long as it runs, and leaves the caller's as it
// was. What CUDA refuses is an IoError that names the call and the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spolia/device/cuda_driver.h"
#include "spolia/device/device.h"

namespace spolia {

/// One device. Thread-safe; lives as long as the process. Copies and allocations go through a stream of its
/// own, so that they wait for nothing else that the device does. allocate() takes from the driver's pool:
/// aligned to 256 bytes.
class CudaBackend final : public DeviceBackend {
 public:
  /// UnsupportedError where there is no such device.
  CudaBackend(const CudaDriver& driver, int index);

  bool host_accessible() const override { return false; }
  std::byte* allocate(int64_t bytes) const override;
  void release(std::byte* memory, int64_t bytes) const noexcept override;
  void prefault(std::byte*, int64_t) const override {}
  void copy_rows(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                 int64_t row_bytes, int64_t rows) const override;
  void copy_from_host(std::byte* dst, const std::byte* src, int64_t bytes) const override;
  void copy_to_host(std::byte* dst, const std::byte* src, int64_t bytes) const override;
  void wait_for(DeviceEvent event) const override;

  Device device() const { return {DeviceKind::kCuda, index_}; }
  const CudaDriver& driver() const { return driver_; }
  /// IoError "cuda:0: WHAT: ..." unless `error` is none.
  void check(int error, const char* what) const;

  /// The device's context is current on this thread while it lives.
  class Current {
   public:
    explicit Current(const CudaBackend& backend);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaDriver& driver_;
  };

 private:
  void copy(std::byte* dst, const std::byte* src, int64_t bytes) const;

  const CudaDriver& driver_;
  const int index_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

/// The device's backend; UnsupportedError naming the device, and why, where it is not there. Thread-safe.
const CudaBackend& cuda_backend(int index);

/// Host memory that the device reads and writes by itself. The host may touch it between the two.
class PinnedBuffer {
 public:
  PinnedBuffer(const CudaBackend& backend, int64_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return data_; }

 private:
  const CudaBackend& backend_;
  std::byte* data_ = nullptr;
};

/// A queue of things to do, one after the other. Calls return at once, and errors of what has been queued may
/// come later. Used by one thread at a time; destroyed when what was queued is done.
class CudaStream {
 public:
  explicit CudaStream(const CudaBackend& backend);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void* handle() const { return stream_; }
  const CudaBackend& backend() const { return backend_; }

  /// Between any two of device memory and pinned memory.
  void copy(std::byte* dst, const std::byte* src, int64_t bytes);
  /// What is queued from now on starts after the event, which stays alive until then.
  void wait_for(DeviceEvent event);
  /// Calls function(argument) on a thread of the driver's. It makes no CUDA calls and throws nothing.
  void run_on_host(void (*function)(void*), void* argument);

 private:
  const CudaBackend& backend_;
  void* stream_ = nullptr;
};

/// A place in a stream. Used by one thread at a time.
class CudaEvent {
 public:
  explicit CudaEvent(const CudaBackend& backend);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  DeviceEvent get() const { return {event_}; }
  /// After what the stream has been told so far.
  void record(const CudaStream& stream);
  /// Whether it has happened; true before the first record().
  bool has_happened() const;

 private:
  const CudaBackend& backend_;
  void* event_ = nullptr;
};

}  // namespace spolia
