// Groups: ranks that do things together.
//
// Operations are started, and have landed when their Pending says so. Those of one group are met in the order
// in which each rank starts them, and complete in that order. docs/decisions/0014-groups.md has the rules,
// docs/comm.md the steps and bytes of every operation on every backend.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "spolia/comm/backend.h"
#include "spolia/device/buffer.h"
#include "spolia/tensor/view.h"

namespace spolia {

using std::chrono::milliseconds;

/// A started operation and what it holds. Moves only. Used by whoever uses its group.
///
/// One that is dropped without wait() waits itself, and is silent about a failure: the group is then broken,
/// and the next operation tells. One that is dropped because an exception passes it does not wait for ranks
/// that have not arrived, for they may wait for this one: unless the operation has landed, the group is
/// broken. Whoever wants to go on with the group after an error waits for what is pending first.
class Pending {
 public:
  Pending();  // of an operation that has landed
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();

  /// Whether it has landed. Throws where it failed.
  bool test();
  /// Returns when it has landed. Throws what Work::wait() throws; the time-out is the group's when the
  /// operation was started, and runs from the start of the wait. What has landed or thrown once is over:
  /// waits for it return at once.
  void wait();

 private:
  friend class Group;
  struct State;
  explicit Pending(std::unique_ptr<State> state);
  void drop() noexcept;

  std::unique_ptr<State> state_;
};

/// One rank's end of a group: cheap to pass by reference, used by one thread at a time. Views may be strided;
/// those that are not dense are packed when the operation starts and dealt out when it has landed, which
/// costs a copy each, unless the backend takes runs and they lie in some (runs.h). Every view of an operation
/// has the same dtype and lies on one device. Views do not overlap, except where an operation is in place:
/// Collective::send says how.
///
/// Views on a device: an operation takes an event, and touches no buffer before it has happened
/// (Collective::after). Where a view is not dense, the call itself waits for it. Host memory has to be ready
/// when the call is made.
///
/// Before anything is started: InvalidArgumentError where views do not suit the operation, UnsupportedError
/// naming a device that the backend does not reach, or a dtype that cannot be strided or reduced;
/// PeerFailedError where the group is broken.
class Group {
 public:
  explicit Group(std::shared_ptr<GroupBackend> backend, milliseconds timeout = std::chrono::minutes(5));

  int size() const { return static_cast<int>(ranks().size()); }
  /// This rank's place, from 0 to size() - 1.
  int place() const { return backend_->place(); }
  std::span<const int64_t> ranks() const { return backend_->ranks(); }
  /// The place of a rank of the world; InvalidArgumentError where it is not in the group.
  int place_of(int64_t rank) const;
  GroupBackend& backend() const { return *backend_; }
  /// A device whose memory it moves.
  Device device() const { return backend_->device(); }
  milliseconds timeout() const { return timeout_; }
  void set_timeout(milliseconds timeout) { timeout_ = timeout; }

  Pending barrier();
  /// The elements of the root's view become everybody's.
  Pending broadcast(const View& buffer, int root, DeviceEvent after = {});
  /// `all` has one dim more than `piece`, in front: size(). Element [r, ...] is what rank r gave.
  Pending all_gather(const ConstView& piece, const View& all, DeviceEvent after = {});
  /// Pieces of different sizes: `all` is 1-d, counts[r] elements from each rank, one after the other.
  Pending all_gather(const ConstView& piece, std::span<const int64_t> counts, const View& all,
                     DeviceEvent after = {});
  /// Reduced by elements, in the dtype, in the order of the ranks. In place where both views are one.
  /// reduce.h has the rules of every dtype.
  Pending all_reduce(const ConstView& send, const View& receive, ReduceOp op = ReduceOp::kSum,
                     DeviceEvent after = {});
  /// `send` is 1-d; rank r gets counts[r] elements of the reduction, those after what lower ranks get.
  Pending reduce_scatter(const ConstView& send, std::span<const int64_t> counts, const View& receive,
                         ReduceOp op = ReduceOp::kSum, DeviceEvent after = {});
  /// Both 1-d: send_counts[r] elements go to rank r, receive_counts[r] come from it.
  Pending all_to_all(const ConstView& send, std::span<const int64_t> send_counts, const View& receive,
                     std::span<const int64_t> receive_counts, DeviceEvent after = {});
  /// Between two ranks, in the order in which they are started between these two.
  Pending send(const ConstView& buffer, int to, DeviceEvent after = {});
  Pending receive(const View& buffer, int from, DeviceEvent after = {});

  /// The same for host memory that lies in runs, none of them empty, however it lies on other ranks: many
  /// pieces in one operation. `dtype` is compared, and says no more. Precondition: backend().takes_runs().
  Pending broadcast(Runs runs, DType dtype, int root);
  Pending send(Runs runs, DType dtype, int to);
  Pending receive(Runs runs, DType dtype, int from);

 private:
  std::unique_ptr<Pending::State> prepare(CollectiveKind kind, const ConstView& view,
                                          DeviceEvent after) const;
  Pending start(std::unique_ptr<Pending::State> operation);
  Pending start_in_runs(CollectiveKind kind, Runs runs, DType dtype, int peer);

  std::shared_ptr<GroupBackend> backend_;
  milliseconds timeout_;
};

}  // namespace spolia
