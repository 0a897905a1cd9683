// The loop nest that walks two strided operands together: what copies and casts share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "spolia/base/inline_vector.h"

namespace spolia {

/// One dim of the nest; strides in bytes.
struct PairDim {
  int64_t size;
  int64_t dst;
  int64_t src;
};
using PairDims = InlineVector<PairDim, 5>;

/// The fewest dims that visit the same pairs of elements, in the order that dst lies in memory (outermost
/// first): sizes of 1 are dropped, dims that are one run on both sides are merged. None at all is a single
/// element; nothing is no element. InvalidArgumentError where a size is negative or the spans differ in
/// length. Precondition: dst's elements do not overlap, and every offset fits in 64 bits.
std::optional<PairDims> merge_dims(std::span<const int64_t> sizes, std::span<const int64_t> dst_strides,
                                   std::span<const int64_t> src_strides);

/// Makes the two innermost dims the plane to walk in one go: inside the dim along which dst runs fastest,
/// around it src's fastest where that is another one, so that tiles of both meet each cache line once; true
/// then. Adds dims of size 1 where there are fewer than two.
bool make_plane(PairDims& dims);

/// Calls body(dst_offset, src_offset) for every index of `dims`, all of size > 0; once where there are none.
template <class Body>
void for_each_offset(std::span<const PairDim> dims, Body body) {
  InlineVector<int64_t, 5> index(dims.size());
  int64_t dst = 0, src = 0;
  while (true) {
    body(dst, src);
    size_t d = dims.size();
    while (true) {
      if (d == 0) return;
      --d;
      if (++index[d] < dims[d].size) break;
      index[d] = 0;
      dst -= dims[d].dst * (dims[d].size - 1);
      src -= dims[d].src * (dims[d].size - 1);
    }
    dst += dims[d].dst;
    src += dims[d].src;
  }
}

}  // namespace spolia
