// A flag that asks running work to stop. Set from any thread, or from a signal handler.
#pragma once

#include <atomic>

#include "spolia/base/error.h"

namespace spolia {

class CancelToken {
 public:
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }
  /// Throws CancelledError once cancel() was called.
  void check() const {
    if (cancelled()) throw CancelledError("cancelled");
  }

 private:
  static_assert(std::atomic<bool>::is_always_lock_free);
  std::atomic<bool> cancelled_{false};
};

}  // namespace spolia
