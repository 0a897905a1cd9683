// Broadcasts through a grid of ranks: along its first dim, from there along the second, and so on.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <span>
#include <vector>

#include "spolia/comm/group.h"

namespace spolia {

/// A dim of the grid, as one rank has it: those ranks that differ from it in this coordinate alone.
struct BroadcastDim {
  Group* group = nullptr;     // of these ranks; not needed where the dim has one coordinate
  std::vector<int64_t> line;  // ranks of the world by coordinate
};

/// Any number of buffers at once, each from a rank of its own. Used by one thread.
///
/// A buffer is first sent along dim 0, to the ranks that share all later coordinates with its source; these
/// send it along dim 1, to those that share the coordinates after that; and so on. So a rank receives it
/// once, in the last dim in which it differs from the source, and passes it on in the dims after that as soon
/// as it has landed.
///
/// Every rank of the grid adds the same buffers in the same order. In each group they are sent in that order;
/// a buffer that has not landed yet holds back those after it in its own next group, and in no other.
///
/// Where a group fails, the groups of all dims are broken on this rank, for what comes through it never will:
/// all ranks that wait for that fail too.
class HierarchicalBroadcast {
 public:
  /// The groups outlive the broadcasts. `max_in_flight`: buffers, the same on every rank.
  /// InvalidArgumentError where a line is not what its group has, this rank not in it, or nothing may be in
  /// flight.
  explicit HierarchicalBroadcast(std::vector<BroadcastDim> dims, int64_t max_in_flight = 8);

  /// The elements of the source's buffer become everybody's, at the latest when wait_all() returns; until
  /// then the memory belongs to the broadcasts. `source` has a coordinate for each dim; InvalidArgumentError
  /// where it is not in the grid. Starts what can be started, and waits for nothing.
  void add(const View& buffer, std::span<const int64_t> source);

  /// Starts what can be started by now. For whoever computes between add() and wait_all().
  void progress();

  /// The buffers that have not gone their whole way yet: the last that were added. 0 after a failure, too.
  int64_t in_flight() const { return static_cast<int64_t>(relays_.size()); }

  /// Returns when all have landed. Throws the first failure there was, also in add() and progress(); after
  /// that, and at every later wait, nothing is sent any more.
  void wait_all();

 private:
  /// A buffer on its way.
  struct Relay {
    View buffer;
    std::vector<int64_t> source;
    size_t next = 0;         // the dim in which this rank meets it next; the number of dims: in none
    bool receiving = false;  // it has not landed here
    std::vector<Pending> pending;
  };

  size_t first_dim(std::span<const int64_t> source) const;
  void meet_next(Relay& relay);
  bool advance(Relay& relay, size_t end);
  bool advance_all();
  void wait_for_oldest();
  template <class Step>
  void guarded(Step step);
  void fail();

  const std::vector<BroadcastDim> dims_;
  const int64_t max_in_flight_;
  std::vector<int64_t> own_;  // this rank's coordinates
  std::deque<Relay> relays_;  // the oldest first
  std::exception_ptr error_;
};

}  // namespace spolia
