// The functions of CUDA's driver that Spolia uses, as a table: filled from libcuda when a device is asked
// for, or by a test.
//
// Source: the reference of the CUDA driver API, 11.4 and later. The driver comes with every GPU and keeps
// these functions as they are; nothing of CUDA is needed to build Spolia. Handles are opaque pointers, memory
// is a number (CUdeviceptr), an error is an int.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spolia {

/// CUDA_MEMCPY2D.
struct CudaCopy2d {
  size_t src_x = 0, src_y = 0;
  int src_kind = 2;  // CU_MEMORYTYPE_DEVICE
  const void* src_host = nullptr;
  uint64_t src = 0;
  void* src_array = nullptr;
  size_t src_pitch = 0;
  size_t dst_x = 0, dst_y = 0;
  int dst_kind = 2;
  void* dst_host = nullptr;
  uint64_t dst = 0;
  void* dst_array = nullptr;
  size_t dst_pitch = 0;
  size_t width = 0, height = 0;
};

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaOutOfMemory = 2;
inline constexpr int kCudaNotReady = 600;

struct CudaDriver {
  int (*init)(unsigned flags) = nullptr;
  int (*device_count)(int* count) = nullptr;
  int (*device)(int* device, int index) = nullptr;
  int (*error_text)(int error, const char** text) = nullptr;

  int (*retain_context)(void** context, int device) = nullptr;  // the device's primary one
  int (*push_context)(void* context) = nullptr;                 // on the calling thread
  int (*pop_context)(void** context) = nullptr;

  int (*allocate)(uint64_t* memory, size_t bytes, void* stream) = nullptr;
  int (*release)(uint64_t memory, void* stream) = nullptr;
  int (*allocate_pinned)(void** memory, size_t bytes) = nullptr;
  int (*release_pinned)(void* memory) = nullptr;

  int (*copy)(uint64_t dst, uint64_t src, size_t bytes, void* stream) = nullptr;  // host and device alike
  int (*copy_2d)(const CudaCopy2d* copy, void* stream) = nullptr;
  int (*run_on_host)(void* stream, void (*function)(void*), void* argument) = nullptr;

  int (*create_stream)(void** stream, unsigned flags) = nullptr;
  int (*destroy_stream)(void* stream) = nullptr;
  int (*finish_stream)(void* stream) = nullptr;  // waits
  int (*wait_in_stream)(void* stream, void* event, unsigned flags) = nullptr;

  int (*create_event)(void** event, unsigned flags) = nullptr;
  int (*destroy_event)(void* event) = nullptr;
  int (*record_event)(void* event, void* stream) = nullptr;
  int (*query_event)(void* event) = nullptr;
  int (*finish_event)(void* event) = nullptr;  // waits
};

/// The driver of this process: libcuda's, initialised, or what set_cuda_driver() gave. UnsupportedError that
/// says why where there is none. Thread-safe.
const CudaDriver& cuda_driver();

/// For tests: `driver`, which outlives the process's use of it, instead of libcuda. Before the first CUDA
/// device is asked for.
void set_cuda_driver(const CudaDriver& driver);

}  // namespace spolia
