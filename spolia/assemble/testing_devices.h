// For tests of streams on devices: fakes that fail when they are told to, and states in a device's memory.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/comm/decorators.h"
#include "spolia/comm/nccl/nccl_world.h"
#include "spolia/comm/nccl/testing_nccl.h"
#include "spolia/device/testing_cuda.h"
#include "spolia/state/state_dict.h"

namespace spolia {

/// Fake devices. A process that uses them uses them from the start.
class FaultyCuda {
 public:
  static void use() {
    static const CudaDriver driver = wrapped();
    set_cuda_driver(driver);
  }
  /// From now on, the device's copy number `nth` (from 1), or its allocation of at least `bytes`, fails.
  static void fail_copy(int device, int nth) { copies().set(device, nth); }
  static void fail_allocation(int device, int nth, size_t bytes) {
    least_bytes() = bytes;
    allocations().set(device, nth);
  }
  static void reset() {
    fail_copy(-1, 0);
    fail_allocation(-1, 0, 0);
  }

 private:
  struct Countdown {
    std::atomic<int> device{-1}, left{0};
    void set(int on, int nth) {
      left = nth;
      device = on;
    }
    bool ends() { return FakeCuda::current_device() == device && --left == 0; }
  };
  static Countdown& copies() {
    static Countdown countdown;
    return countdown;
  }
  static Countdown& allocations() {
    static Countdown countdown;
    return countdown;
  }
  static std::atomic<size_t>& least_bytes() {
    static std::atomic<size_t> bytes{0};
    return bytes;
  }
  static CudaDriver wrapped() {
    CudaDriver driver = FakeCuda::instance().driver();
    driver.copy = [](uint64_t dst, uint64_t src, size_t bytes, void* stream) {
      return copies().ends() ? 700 : FakeCuda::instance().driver().copy(dst, src, bytes, stream);
    };
    driver.copy_2d = [](const CudaCopy2d* copy, void* stream) {
      return copies().ends() ? 700 : FakeCuda::instance().driver().copy_2d(copy, stream);
    };
    driver.allocate = [](uint64_t* memory, size_t bytes, void* stream) {
      return bytes >= least_bytes() && allocations().ends()
                 ? kCudaOutOfMemory
                 : FakeCuda::instance().driver().allocate(memory, bytes, stream);
    };
    return driver;
  }
};

inline Device device_of(int64_t rank) { return {DeviceKind::kCuda, static_cast<int>(rank)}; }

/// What a view's elements are, dense, on the host.
inline std::vector<std::byte> host_bytes(const ConstView& dense) {
  std::vector<std::byte> bytes(static_cast<size_t>(dense.bytes()));
  if (!bytes.empty()) backend_of(dense.device).copy_to_host(bytes.data(), dense.data, std::ssize(bytes));
  return bytes;
}

/// A state dict whose tensors, or every second of them, are in a device's memory: at the strides that they
/// have on the host.
class StateOnDevice {
 public:
  StateOnDevice(const StateDict& host, Device device, bool every_second = false) {
    size_t number = 0;
    for (StateDict::Entry entry : host.entries()) {
      LocalTensor& tensor = *entry.tensor();
      if (!every_second || number++ % 2 == 0) {
        const int64_t bytes = extent_of(tensor.memory);
        Buffer& memory = memory_.emplace_back(bytes, device);
        backend_of(device).copy_from_host(memory.data(), tensor.memory.data, bytes);
        tensor.memory.data = memory.data();
        tensor.memory.device = device;
      }
      dict_.add(std::move(entry));
    }
  }
  StateDict& dict() { return dict_; }

 private:
  static int64_t extent_of(const View& view) {
    if (view.bytes() == 0 || is_sub_byte(view.dtype)) return view.bytes();
    int64_t bytes = element_bytes(view.dtype);
    for (size_t d = 0; d < view.shape.size(); ++d) bytes += (view.shape[d] - 1) * view.strides[d];
    return bytes;
  }

  std::vector<Buffer> memory_;
  StateDict dict_;
};

/// Where the ranks of a test have their states, and what moves their bytes.
struct Stage {
  enum class State { kHost, kDevice, kBoth };
  State state = State::kHost;
  bool nccl = false;
  bool packs = false;  // threads that take no runs, as MPI does not

  std::string text() const {
    return std::string(nccl    ? "NCCL"
                       : packs ? "packing threads"
                               : "threads") +
           ", state on " +
           (state == State::kHost     ? "the host"
            : state == State::kDevice ? "devices"
                                      : "both");
  }

  class PackingBackend final : public ForwardingBackend {
   public:
    using ForwardingBackend::ForwardingBackend;
    bool takes_runs() const override { return false; }
  };

  void launch(int ranks, const std::function<void(World&)>& body, LaunchOptions options = {}) const {
    FaultyCuda::use();
    if (packs) {
      options.decorate = [](std::shared_ptr<GroupBackend> backend) {
        return std::make_shared<PackingBackend>(std::move(backend));
      };
    }
    spolia::launch(
        ranks,
        [&](World& host) {
          if (!nccl) return body(host);
          NcclWorld world(host, device_of(host.rank()), {.library = &FakeNccl::instance().library()});
          body(world);
        },
        options);
    EXPECT_EQ(FakeCuda::instance().take_faults(), std::vector<std::string>());
    EXPECT_EQ(FakeNccl::instance().communicators(), 0);
  }
  /// Calls `body` with the state where it is to be.
  void place(StateDict& host, int64_t rank, const std::function<void(StateDict&)>& body) const {
    if (state == State::kHost) return body(host);
    StateOnDevice there(host, device_of(rank), state == State::kBoth);
    body(there.dict());
  }
};

}  // namespace spolia
