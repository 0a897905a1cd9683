// Strided n-d copies within the memory of one device, made of its copies of rows.
#pragma once

#include <cstdint>
#include <span>

#include "spolia/device/device.h"

namespace spolia {

/// Copies the element at every index of `sizes` from `src` to `dst`, both memory of `device`. Element
/// [i0, i1, ...] lies at the pointer plus the sum of i_d * strides[d], in bytes; strides of src may be 0,
/// those of both may be negative. Preconditions: spans of one length, sizes >= 0; the elements of dst overlap
/// neither each other nor src. Returns when it is done.
///
/// Dims that are contiguous on both sides are one run; the longest other dim that a device can step along
/// gives the rows of a call. So an ordinary slice is one call, and what has no such dim, say one that runs
/// backwards on one side only, a call for each run.
void copy_strided_on(const DeviceBackend& device, std::span<const int64_t> sizes, int64_t element_bytes,
                     std::byte* dst, std::span<const int64_t> dst_strides, const std::byte* src,
                     std::span<const int64_t> src_strides);

}  // namespace spolia
