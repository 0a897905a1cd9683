#include "spolia/device/device.h"

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/device/cpu.h"
#include "spolia/device/cuda.h"

namespace spolia {

std::string name_of(Device device) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      return device.index == 0 ? "cpu" : fmt::format("cpu:{}", device.index);
    case DeviceKind::kCuda:
      return fmt::format("cuda:{}", device.index);
  }
  return "unknown";
}

const DeviceBackend& backend_of(Device device) {
  static const CpuBackend cpu;
  if (device == Device{}) return cpu;
  if (device.kind == DeviceKind::kCuda) return cuda_backend(device.index);
  throw UnsupportedError("there is no device {} here", name_of(device));
}

}  // namespace spolia
