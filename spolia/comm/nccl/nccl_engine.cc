#include "spolia/comm/nccl/nccl_engine.h"

#include <algorithm>

#include "spolia/comm/nccl/nccl_backend.h"

namespace spolia {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

/// How long the thread looks again at once, and how it rests after that.
constexpr microseconds kEager{50};
constexpr microseconds kFirstRest{20};
constexpr microseconds kLongestRest{500};

}  // namespace

NcclEngine::NcclEngine(const CudaBackend& device, const NcclLibrary& library)
    : device_(device), library_(library), thread_([this] { work(); }) {}

NcclEngine::~NcclEngine() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    wake();
  }
  thread_.join();
}

void NcclEngine::add(NcclBackend& group) { groups_.push_back(&group); }

void NcclEngine::remove(NcclBackend& group) {
  std::erase(groups_, &group);
  std::erase_if(order_, [&](const auto& operation) { return operation->backend == &group; });
}

void NcclEngine::queue(std::shared_ptr<NcclOperation> operation) { order_.push_back(std::move(operation)); }

void NcclEngine::wake() {
  is_woken_ = true;
  woken_.notify_one();
}

/// One look at everything; whether anything changed.
bool NcclEngine::progress() {
  bool changed = false;
  for (NcclBackend* group : groups_) changed |= group->look();
  while (!order_.empty() && order_.front()->backend->issue(*order_.front())) {
    order_.pop_front();
    changed = true;
  }
  for (NcclBackend* group : groups_) changed |= group->issue_transfers();
  return changed;
}

void NcclEngine::work() {
  const CudaBackend::Current current(device_);  // NCCL connects on it
  std::unique_lock lock(mutex_);
  steady_clock::time_point changed = steady_clock::now();
  microseconds rest = kFirstRest;
  while (true) {
    const bool busy = std::ranges::any_of(groups_, [](const NcclBackend* group) { return group->is_busy(); });
    if (!busy) {
      if (ends_) return;
      woken_.wait(lock, [&] { return is_woken_; });
      changed = steady_clock::now();
    }
    is_woken_ = false;
    if (progress()) {
      landed_.notify_all();
      changed = steady_clock::now();
      rest = kFirstRest;
    } else if (steady_clock::now() - changed < kEager) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      woken_.wait_for(lock, rest, [&] { return is_woken_; });
      rest = std::min(2 * rest, kLongestRest);
    }
  }
}

}  // namespace spolia
