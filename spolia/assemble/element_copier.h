// Copies of elements between any two places: the host's memory and devices', at any strides, of two dtypes.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "spolia/device/buffer.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// Within the host's memory, and within a device's where the dtype stays, elements go from their place to
/// their place. All else passes through memory that the copier has, in parts where it has to. Used by one
/// thread.
class ElementCopier {
 public:
  /// Between the host and itself.
  ElementCopier() = default;
  /// Between the host and these, within `bytes` of memory, at least kLeastBytes: a share of the host's and
  /// one of each device. IoError where there is not so much.
  ElementCopier(const std::set<int>& cuda_devices, int64_t bytes);
  /// For a copier between the host and 16 devices.
  static constexpr int64_t kLeastBytes = 18 * 64;

  /// Returns when it is done. Of dtypes, one can be cast to the other (cast.h), or they are one. Of elements
  /// finer than a byte, none. Strides of `from` may be 0. What a device throws is thrown.
  void copy(const View& to, const ConstView& from);

  /// Bytes of its memory.
  int64_t bytes() const;

 private:
  void copy_through_host(const View& to, const ConstView& from);
  std::byte* memory_on(Device device);

  int64_t share_ = 0;  // bytes of each buffer
  std::vector<Buffer> buffers_;
};

}  // namespace spolia
