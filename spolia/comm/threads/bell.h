// What a rank waits at until another one has something for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "spolia/comm/backend.h"

namespace spolia {

/// Rung by any thread, waited at by one. Who waits gives its core away again and again for some microseconds,
/// which is what a small operation takes, and then sleeps. Where the core comes back late, others want it
/// more: then the next waits sleep at once; more of them where it was late the last time too.
class Bell {
 public:
  /// How often it has been rung.
  uint32_t rings() const { return rings_.load(std::memory_order_acquire); }
  void ring();
  /// Returns when it has been rung more than `seen` times, or at the deadline.
  void wait(uint32_t seen, Deadline deadline);

 private:
  bool spin(uint32_t seen, Deadline deadline);

  std::atomic<uint32_t> rings_{0};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
  int sleep_at_once_ = 0;  // for so many waits
  int last_sleeps_ = 0;    // what that was at first
  int spins_ = 0;          // waits since then
};

}  // namespace spolia
