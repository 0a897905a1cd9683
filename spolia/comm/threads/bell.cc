#include "spolia/comm/threads/bell.h"

#include <algorithm>
#include <thread>

namespace spolia {
namespace {

/// Waking a sleeper takes about as long.
constexpr std::chrono::microseconds kSpin{50};
/// A core that was given away and is back after so long was with somebody who works.
constexpr std::chrono::microseconds kLate{100};
/// Waits that sleep at once then: at least and at most. It is late again if it is within so many waits.
constexpr int kLeastSleeps = 32, kMostSleeps = 1024, kAgain = 256;

}  // namespace

void Bell::ring() {
  rings_.fetch_add(1);
  // Either the sleeper sees this ring before it sleeps, or it is seen asleep here.
  if (!asleep_.load()) return;
  std::lock_guard lock(mutex_);
  woken_.notify_one();
}

/// Whether it rings, or the deadline passes, within a short time.
bool Bell::spin(uint32_t seen, Deadline deadline) {
  if (sleep_at_once_ > 0) {
    --sleep_at_once_;
    return rings() != seen;
  }
  if (spins_ < kAgain) ++spins_;
  Deadline now = std::chrono::steady_clock::now();
  const Deadline end = now + kSpin;
  while (rings() == seen && now < deadline) {
    if (now >= end) return false;
    const Deadline before = now;
    std::this_thread::yield();
    now = std::chrono::steady_clock::now();
    if (now - before > kLate) {
      last_sleeps_ = spins_ < kAgain ? std::clamp(2 * last_sleeps_, kLeastSleeps, kMostSleeps) : kLeastSleeps;
      sleep_at_once_ = last_sleeps_;
      spins_ = 0;
      return rings() != seen;
    }
  }
  return true;
}

void Bell::wait(uint32_t seen, Deadline deadline) {
  if (spin(seen, deadline)) return;
  std::unique_lock lock(mutex_);
  asleep_.store(true);
  woken_.wait_until(lock, deadline, [&] { return rings_.load() != seen; });
  asleep_.store(false);
}

}  // namespace spolia
