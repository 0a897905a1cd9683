// Where the bytes of strided views lie, as runs: what goes from its place to its place without a copy
// between.
#pragma once

#include "spolia/comm/backend.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// Whether moving the view in runs costs less than packing it: its rows are 16 bytes or longer, and its runs
/// 512. Host memory.
bool lies_in_runs(const View& view);

/// Appends the view's elements in row-major order. Runs that lie end to end become one. Any view of whole
/// bytes can be had in runs, also one that lies_in_runs() advises against; none is empty.
void append_runs(const View& view, Runs& runs);

}  // namespace spolia
