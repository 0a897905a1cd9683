// Running many independent items on a few threads.
#pragma once

#include <cstddef>
#include <functional>

#include "spolia/base/cancel.h"

namespace spolia {

/// Calls `body(worker, item)` for every item in [0, items), on at most `threads` threads (>= 1). `worker` <
/// threads names the thread, so that the caller can hand out scratch memory. Items are started in rising
/// order. Returns when all are done; where one throws, no further item starts and the exception of the lowest
/// failed item is rethrown. `cancel`, if given, is looked at before each item.
void parallel_for(size_t threads, size_t items, const std::function<void(size_t worker, size_t item)>& body,
                  const CancelToken* cancel = nullptr);

/// The number of hardware threads this process may run on; at least 1.
size_t hardware_threads();

}  // namespace spolia
