// The CPU's memory.
#pragma once

#include "spolia/device/device.h"

namespace spolia {

/// Memory of this process. Large allocations come straight from the kernel, in huge pages where it has them,
/// and go back to it when released: what is freed no longer counts as resident.
class CpuBackend final : public DeviceBackend {
 public:
  bool host_accessible() const override { return true; }
  std::byte* allocate(int64_t bytes) const override;
  void release(std::byte* memory, int64_t bytes) const noexcept override;
  void prefault(std::byte* memory, int64_t bytes) const override;
  void copy_rows(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                 int64_t row_bytes, int64_t rows) const override;
  void copy_from_host(std::byte* dst, const std::byte* src, int64_t bytes) const override {
    copy_rows(dst, bytes, src, bytes, bytes, 1);
  }
  void copy_to_host(std::byte* dst, const std::byte* src, int64_t bytes) const override {
    copy_rows(dst, bytes, src, bytes, bytes, 1);
  }
  void wait_for(DeviceEvent) const override {}
};

}  // namespace spolia
