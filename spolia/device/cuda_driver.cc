#include "spolia/device/cuda_driver.h"

#include <atomic>

#include "spolia/base/error.h"
#include "spolia/device/dynamic_library.h"

namespace spolia {
namespace {

std::atomic<const CudaDriver*> given{nullptr};

CudaDriver load() {
  const DynamicLibrary cuda("CUDA's driver", {"libcuda.so.1"});
  CudaDriver driver;
  cuda.find("cuInit", driver.init);
  cuda.find("cuDeviceGetCount", driver.device_count);
  cuda.find("cuDeviceGet", driver.device);
  cuda.find("cuGetErrorString", driver.error_text);
  cuda.find("cuDevicePrimaryCtxRetain", driver.retain_context);
  cuda.find("cuCtxPushCurrent_v2", driver.push_context);
  cuda.find("cuCtxPopCurrent_v2", driver.pop_context);
  cuda.find("cuMemAllocAsync", driver.allocate);
  cuda.find("cuMemFreeAsync", driver.release);
  cuda.find("cuMemAllocHost_v2", driver.allocate_pinned);
  cuda.find("cuMemFreeHost", driver.release_pinned);
  cuda.find("cuMemcpyAsync", driver.copy);
  cuda.find("cuMemcpy2DAsync_v2", driver.copy_2d);
  cuda.find("cuLaunchHostFunc", driver.run_on_host);
  cuda.find("cuStreamCreate", driver.create_stream);
  cuda.find("cuStreamDestroy_v2", driver.destroy_stream);
  cuda.find("cuStreamSynchronize", driver.finish_stream);
  cuda.find("cuStreamWaitEvent", driver.wait_in_stream);
  cuda.find("cuEventCreate", driver.create_event);
  cuda.find("cuEventDestroy_v2", driver.destroy_event);
  cuda.find("cuEventRecord", driver.record_event);
  cuda.find("cuEventQuery", driver.query_event);
  cuda.find("cuEventSynchronize", driver.finish_event);
  if (const int error = driver.init(0); error != kCudaSuccess) {
    const char* text = nullptr;
    driver.error_text(error, &text);
    throw UnsupportedError("CUDA's driver cannot start: {}", text == nullptr ? "unknown error" : text);
  }
  return driver;
}

}  // namespace

const CudaDriver& cuda_driver() {
  if (const CudaDriver* driver = given.load()) return *driver;
  static const CudaDriver loaded = load();  // where it throws, the next call tries again
  return loaded;
}

void set_cuda_driver(const CudaDriver& driver) { given.store(&driver); }

}  // namespace spolia
