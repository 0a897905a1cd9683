// CUDA without a GPU, for tests: a driver whose devices are threads and host memory.
//
// What a stream is told is done later, by a thread of its own, so that who does not wait sees old bytes.
// Memory of a device has addresses that the host cannot touch: the process dies if it tries. Addresses are
// never used twice, so that what is used after its release is noticed. Whatever a real device would answer
// with undefined behaviour is written down as a fault.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "spolia/device/cuda_driver.h"

namespace spolia {

/// One a process: a driver's functions have no object. Thread-safe.
class FakeCuda {
 public:
  static constexpr int kDevices = 16;

  static FakeCuda& instance() {
    static FakeCuda& fake = *new FakeCuda;  // its threads may outlive main()
    return fake;
  }

  const CudaDriver& driver() const { return driver_; }

  /// The bytes behind an address: a device's, or host memory itself. nullptr, and a fault, where they are not
  /// all there.
  std::byte* bytes_at(uint64_t address, size_t bytes) {
    if (!is_on_device(address)) return reinterpret_cast<std::byte*>(address);
    const std::lock_guard lock(mutex_);
    auto at = blocks_.upper_bound(address);
    if (at != blocks_.begin()) {
      --at;
      const uint64_t offset = address - at->first;
      if (offset + bytes <= at->second.size()) return at->second.data() + offset;
    }
    faults_.push_back(fmt::format("{} bytes that are not allocated are used", bytes));
    return nullptr;
  }
  bool is_on_device(uint64_t address) const { return address >= base_ && address < base_ + kSpace; }

  void add_fault(std::string fault) {
    const std::lock_guard lock(mutex_);
    faults_.push_back(std::move(fault));
  }
  /// What has gone wrong since the last call.
  std::vector<std::string> take_faults() {
    const std::lock_guard lock(mutex_);
    return std::exchange(faults_, {});
  }
  /// Blocks of device memory that have not been released.
  size_t blocks() {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
  }

  /// A queue and the thread that works it off.
  class Stream {
   public:
    Stream() : thread_([this] { work(); }) {}
    ~Stream() {
      {
        const std::lock_guard lock(mutex_);
        ends_ = true;
      }
      changed_.notify_all();
      thread_.join();
    }
    void add(std::function<void()> task) {
      {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        ++added_;
      }
      changed_.notify_all();
    }
    void finish() {
      std::unique_lock lock(mutex_);
      const uint64_t until = added_;
      changed_.wait(lock, [&] { return done_ >= until; });
    }

   private:
    void work() {
      std::minstd_rand random(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(this) >> 6));
      std::unique_lock lock(mutex_);
      while (true) {
        changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        task();
        task = nullptr;
        lock.lock();
        ++done_;
        changed_.notify_all();
      }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    uint64_t added_ = 0, done_ = 0;
    bool ends_ = false;
    std::thread thread_;
  };

  /// The device whose context is current on this thread; -1.
  static int current_device() { return contexts().empty() ? -1 : contexts().back(); }

 private:
  static constexpr uint64_t kSpace = uint64_t{1} << 38;
  static constexpr uint64_t kAlignment = 256;

  struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, happened = 0;
  };

  FakeCuda() {
    void* space = mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = next_ = reinterpret_cast<uint64_t>(space);
    driver_.init = [](unsigned) { return kCudaSuccess; };
    driver_.device_count = [](int* count) {
      *count = kDevices;
      return kCudaSuccess;
    };
    driver_.device = [](int* device, int index) {
      *device = index;
      return kCudaSuccess;
    };
    driver_.error_text = [](int error, const char** text) {
      *text = error == kCudaOutOfMemory ? "out of memory" : "invalid value";
      return kCudaSuccess;
    };
    driver_.retain_context = [](void** context, int device) {
      *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
      return kCudaSuccess;
    };
    driver_.push_context = [](void* context) {
      contexts().push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
      return kCudaSuccess;
    };
    driver_.pop_context = [](void**) {
      contexts().pop_back();
      return kCudaSuccess;
    };
    driver_.allocate = [](uint64_t* memory, size_t bytes, void*) {
      return instance().allocate(memory, bytes);
    };
    driver_.release = [](uint64_t memory, void* stream) {
      stream_of(stream).add([memory] { instance().release(memory); });
      return kCudaSuccess;
    };
    driver_.allocate_pinned = [](void** memory, size_t bytes) {
      *memory = ::operator new(bytes);
      return needs_context();
    };
    driver_.release_pinned = [](void* memory) {
      ::operator delete(memory);
      return kCudaSuccess;
    };
    driver_.copy = [](uint64_t dst, uint64_t src, size_t bytes, void* stream) {
      stream_of(stream).add([=] { instance().copy(dst, src, bytes); });
      return bytes == 0 ? kInvalidValue : needs_context();
    };
    driver_.copy_2d = [](const CudaCopy2d* given, void* stream) {
      const CudaCopy2d copy = *given;
      if (copy.width > copy.src_pitch || copy.width > copy.dst_pitch) return kInvalidValue;
      stream_of(stream).add([copy] {
        for (size_t row = 0; row < copy.height; ++row) {
          instance().copy(copy.dst + row * copy.dst_pitch, copy.src + row * copy.src_pitch, copy.width);
        }
      });
      return needs_context();
    };
    driver_.run_on_host = [](void* stream, void (*function)(void*), void* argument) {
      stream_of(stream).add([=] { function(argument); });
      return needs_context();
    };
    driver_.create_stream = [](void** stream, unsigned) {
      *stream = new Stream;
      return needs_context();
    };
    driver_.destroy_stream = [](void* stream) {
      delete &stream_of(stream);
      return kCudaSuccess;
    };
    driver_.finish_stream = [](void* stream) {
      stream_of(stream).finish();
      return needs_context();
    };
    driver_.wait_in_stream = [](void* stream, void* event, unsigned) {
      const std::shared_ptr<Event> held = event_of(event);
      std::unique_lock lock(held->mutex);
      const uint64_t until = held->recorded;
      stream_of(stream).add([held, until] { wait(*held, until); });
      return needs_context();
    };
    driver_.create_event = [](void** event, unsigned) {
      *event = new std::shared_ptr<Event>(std::make_shared<Event>());
      return needs_context();
    };
    driver_.destroy_event = [](void* event) {
      delete static_cast<std::shared_ptr<Event>*>(event);
      return kCudaSuccess;
    };
    driver_.record_event = [](void* event, void* stream) {
      const std::shared_ptr<Event> held = event_of(event);
      const std::lock_guard lock(held->mutex);
      const uint64_t number = ++held->recorded;
      stream_of(stream).add([held, number] {
        const std::lock_guard inner(held->mutex);
        held->happened = std::max(held->happened, number);
        held->changed.notify_all();
      });
      return needs_context();
    };
    driver_.query_event = [](void* event) {
      const std::shared_ptr<Event> held = event_of(event);
      const std::lock_guard lock(held->mutex);
      return held->happened < held->recorded ? kCudaNotReady : needs_context();
    };
    driver_.finish_event = [](void* event) {
      const std::shared_ptr<Event> held = event_of(event);
      std::unique_lock lock(held->mutex);
      const uint64_t until = held->recorded;
      lock.unlock();
      wait(*held, until);
      return needs_context();
    };
  }

  static constexpr int kInvalidValue = 1;

  static std::vector<int>& contexts() {
    static thread_local std::vector<int> contexts;
    return contexts;
  }
  static int needs_context() {
    if (current_device() >= 0) return kCudaSuccess;
    instance().add_fault("a call without a context");
    return kInvalidValue;
  }
  static Stream& stream_of(void* stream) { return *static_cast<Stream*>(stream); }
  static std::shared_ptr<Event> event_of(void* event) { return *static_cast<std::shared_ptr<Event>*>(event); }
  static void wait(Event& event, uint64_t until) {
    std::unique_lock lock(event.mutex);
    event.changed.wait(lock, [&] { return event.happened >= until; });
  }

  int allocate(uint64_t* memory, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const uint64_t room = (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;  // with a gap
    if (room > base_ + kSpace - next_) return kCudaOutOfMemory;
    *memory = next_;
    next_ += room;
    blocks_.emplace(*memory, std::vector<std::byte>(bytes, std::byte{0xDD}));
    return kCudaSuccess;
  }
  void release(uint64_t memory) {
    const std::lock_guard lock(mutex_);
    if (blocks_.erase(memory) == 0) faults_.push_back("memory that is not allocated is released");
  }
  void copy(uint64_t dst, uint64_t src, size_t bytes) {
    std::byte* to = bytes_at(dst, bytes);
    const std::byte* from = bytes_at(src, bytes);
    if (to != nullptr && from != nullptr) std::memcpy(to, from, bytes);
  }

  CudaDriver driver_;
  uint64_t base_ = 0;
  std::mutex mutex_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::vector<std::byte>> blocks_;
  std::vector<std::string> faults_;
};

/// The process's devices are fake from now on.
inline FakeCuda& use_fake_cuda() {
  set_cuda_driver(FakeCuda::instance().driver());
  return FakeCuda::instance();
}

}  // namespace spolia
