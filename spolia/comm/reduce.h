// Reductions of several buffers into one, element by element, in the order of the ranks.
//
// One order and one place where each element is computed: the result is the same on every rank, to the bit,
// whatever the number of ranks that help and however the elements are cut into pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "spolia/tensor/dtype.h"

namespace spolia {

enum class ReduceOp : uint8_t { kSum, kMin, kMax };
/// "sum", "min", "max".
std::string_view name_of(ReduceOp op);

/// Whether elements of this dtype can be reduced so: integers and floats by all three, bool too, complex
/// numbers by kSum alone. float8, sub-byte, quantized and bit types cannot.
bool can_reduce(DType dtype, ReduceOp op);

/// ((from[0] op from[1]) op from[2]) ... for each element of the bytes [begin, end) of the buffers, into
/// every one of `to`. Each of `to` may be one of `from`, else nothing overlaps. Pointers need no alignment.
/// Preconditions: `from` is not empty, can_reduce(), `begin` and `end` lie between elements.
///
/// Sums: integers wrap. float16, bfloat16 and complex32 are added in float32 and rounded once, at the end;
/// the others in their own precision. Of bool, kSum and kMax are "or", kMin is "and". kMin and kMax: a NaN
/// wins, the first one where there are several; of equal elements (0 and -0) the first.
void reduce(DType dtype, ReduceOp op, std::span<const std::byte* const> from, std::span<std::byte* const> to,
            int64_t begin, int64_t end) noexcept;

}  // namespace spolia
