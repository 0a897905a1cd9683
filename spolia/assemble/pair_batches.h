// Small messages between two ranks that travel together: what BroadcastBatches is for broadcasts.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <vector>

#include "spolia/comm/broadcast_batches.h"
#include "spolia/comm/group.h"
#include "spolia/device/buffer.h"

namespace spolia {

/// Used by one thread. Both ends of a pair add the same pieces (bytes) in the same order; all ranks keep to
/// one order of the pieces of all pairs, and call flush() at the same points between them.
class PairBatches {
 public:
  explicit PairBatches(const BatchOptions& options) : options_(options) {}

  /// `piece` goes to, or comes from, the place `peer` of the group. The memory belongs to the batches until
  /// wait_all() returns.
  void add(Group& group, int peer, bool sends, const View& piece);
  void flush();
  /// Flushes and waits for everything.
  void wait_all();

 private:
  struct Batch {
    Group* group = nullptr;
    int peer = 0;
    bool sends = false;
    std::vector<View> pieces;
    int64_t bytes = 0;
  };
  struct Flight {
    std::vector<View> received;  // pieces that come through the buffer
    int64_t bytes = 0;
    Buffer buffer;
    Pending pending;  // goes first
  };

  void start(Batch batch);
  void finish_oldest();

  const BatchOptions options_;
  std::vector<Batch> open_;
  std::deque<Flight> in_flight_;
  int64_t bytes_in_flight_ = 0;
};

}  // namespace spolia
