// Strided n-d copies on the host: slices, gathers of slices, and permutes, as raw elements of any dtype.
#pragma once

#include <cstdint>
#include <span>

namespace spolia {

/// Copies the element at every index of `sizes` from `src` to `dst`.
///
/// Element [i0, i1, ...] lies at the pointer plus the sum of i_d * strides[d], in bytes. Pointers need no
/// alignment. Strides may be in any order (a permute), leave gaps, be negative, or be 0 in src (an expanded
/// dim). Preconditions: the elements of dst do not overlap each other, nor src; every address is valid.
///
/// `element_bytes` is 1 to 16. InvalidArgumentError where it is not, where a size is negative, or where the
/// spans differ in length. Thread-safe for disjoint dst.
///
/// Dims that are contiguous together are copied as one run. Where dst and src run fastest along different
/// dims, the two are walked in tiles a cache line wide, so that each line is met once.
void copy_strided(std::span<const int64_t> sizes, int64_t element_bytes, void* dst,
                  std::span<const int64_t> dst_strides, const void* src,
                  std::span<const int64_t> src_strides);

}  // namespace spolia
