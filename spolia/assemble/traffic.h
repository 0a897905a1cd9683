// What a stream has on its way: pieces that go to all of a group, or to one rank, small ones together.
//
// A piece goes from its place to its place where the backend can do that: where it takes runs and the piece
// lies in some (runs.h), or where it is dense and goes alone. What cannot is packed by its sender and dealt
// out by its receiver, in slots of memory on the groups' device: views at other strides, small pieces, memory
// that the groups do not reach. How that is on one rank is nothing to the others.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "spolia/assemble/element_copier.h"
#include "spolia/assemble/local_failure.h"
#include "spolia/comm/group.h"
#include "spolia/comm/runs.h"

namespace spolia {

/// Used by one thread. All ranks keep to one order of all pieces, from which each leaves out those that it
/// has no part in, call flush() at the same points between them, and have slots of one size.
///
/// Where a copy fails on this rank alone, it is kept in `failure`, and the rank goes on taking part: the
/// bytes are unspecified then. What a group throws is thrown, and that group is broken.
class Traffic {
 public:
  static constexpr int kSlots = 3;

  /// `memory`: kSlots slots, on the groups' device, each as large as the largest piece at least. The copier
  /// and `failure` outlive this.
  Traffic(Buffer memory, ElementCopier& copier, LocalFailure& failure);
  /// Waits for what is on its way, as Pending does.
  ~Traffic() = default;
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  /// The piece becomes everybody's. `root` and `peer` are places in the group. The memory is the traffic's
  /// until a wait for it returns.
  void broadcast(Group& group, int root, const View& piece);
  void send(Group& group, int peer, const View& piece);
  void receive(Group& group, int peer, const View& piece);

  /// Starts what waits for company.
  void flush();
  /// How many operations have been started: a point to wait for.
  int64_t started() const { return started_; }
  /// Returns when those that were started before this point have landed.
  void wait_until(int64_t point);
  /// Waits for all that can still land, whatever happens. What it brings is not dealt out.
  void give_up() noexcept;

 private:
  struct Batch {
    Group* group = nullptr;
    CollectiveKind kind = CollectiveKind::kBroadcast;
    int peer = 0;
    std::vector<View> pieces;
    int64_t bytes = 0;

    bool sends() const {
      return kind == CollectiveKind::kSend || (kind == CollectiveKind::kBroadcast && peer == group->place());
    }
    /// Whether a piece goes from or to its place.
    bool goes_direct(const View& piece) const;
  };
  struct Flight {
    std::vector<View> received;  // pieces that come through the slot
    int slot = -1;
    int64_t bytes = 0;
    Pending pending;
  };

  void add(Group& group, CollectiveKind kind, int peer, const View& piece);
  void start(const Batch& batch);
  int take_slot();
  std::byte* slot(int number) { return memory_.data() + number * slot_bytes_; }
  template <class Body>
  void for_each_in_slot(std::span<const View> pieces, int number, Body body);
  void finish_oldest();

  ElementCopier& copier_;
  LocalFailure& failure_;
  int64_t slot_bytes_ = 0, batch_bytes_ = 0;
  std::vector<Batch> open_;
  int64_t started_ = 0, landed_ = 0, bytes_in_flight_ = 0;
  bool used_[kSlots] = {};
  Buffer memory_;
  std::deque<Flight> in_flight_;  // the oldest first; goes before the memory
};

}  // namespace spolia
