#include "spolia/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace spolia {

void parallel_for(size_t threads, size_t items, const std::function<void(size_t, size_t)>& body,
                  const CancelToken* cancel) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;
  size_t error_item = items;

  auto work = [&](size_t worker) {
    while (!failed.load(std::memory_order_relaxed)) {
      size_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      try {
        if (cancel != nullptr) cancel->check();
        body(worker, item);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (item < error_item) {
          error = std::current_exception();
          error_item = item;
        }
        failed.store(true, std::memory_order_relaxed);
      }
    }
  };

  {
    std::vector<std::jthread> others;
    try {
      for (size_t worker = 1; worker < std::min(threads, items); ++worker) others.emplace_back(work, worker);
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
    work(0);
  }
  if (error) std::rethrow_exception(error);
}

size_t hardware_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace spolia
