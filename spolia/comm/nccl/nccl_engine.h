// The thread of a rank that tells NCCL what to do.
//
// It polls what is under way, so that an operation goes on whatever its rank computes: whether the ranks have
// met (by a host group), whether a communicator is ready, whether a device is done. It never waits in a call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "spolia/comm/nccl/nccl_library.h"
#include "spolia/device/cuda.h"

namespace spolia {

class NcclBackend;
struct NcclOperation;

/// Shared by the groups of one rank. Everything of them is under its mutex.
class NcclEngine {
 public:
  NcclEngine(const CudaBackend& device, const NcclLibrary& library);
  ~NcclEngine();
  NcclEngine(const NcclEngine&) = delete;
  NcclEngine& operator=(const NcclEngine&) = delete;

  const CudaBackend& device() const { return device_; }
  const NcclLibrary& library() const { return library_; }

  std::mutex& mutex() { return mutex_; }

  // Under the mutex:

  void add(NcclBackend& group);
  /// The group has nothing pending any more, or gives it up.
  void remove(NcclBackend& group);
  /// The next operation of all ranks of its group.
  void queue(std::shared_ptr<NcclOperation> operation);
  /// There is something new to look at.
  void wake();
  /// Notified when anything has landed or failed.
  std::condition_variable& landed() { return landed_; }

 private:
  void work();
  bool progress();

  const CudaBackend& device_;
  const NcclLibrary& library_;
  std::mutex mutex_;
  std::condition_variable woken_, landed_;
  bool is_woken_ = false, ends_ = false;
  std::vector<NcclBackend*> groups_;
  /// Operations of all groups, in the order in which they were started. Communicators that share a device are
  /// told what to do in one order on all ranks: their kernels could wait for each other else.
  std::deque<std::shared_ptr<NcclOperation>> order_;
  std::thread thread_;
};

}  // namespace spolia
