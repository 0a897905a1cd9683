// Small broadcasts that travel together.
//
// A broadcast costs its time however small it is: 512 of 64 KiB, one by one, take far longer than one of
// 32 MiB. Pieces that go to the same group from the same rank, of one dtype, travel as one broadcast. Where
// the backend takes runs, those that lie in some (runs.h) go from their place to their place; the others are
// gathered into a buffer before, and dealt out when they have landed.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <tuple>
#include <vector>

#include "spolia/comm/group.h"

namespace spolia {

struct BatchOptions {
  int64_t batch_bytes = int64_t{6} << 20;           // a piece of this many or more goes alone; 0: every one
  int64_t max_in_flight = 8;                        // broadcasts started and not waited for, at least 1
  int64_t max_bytes_in_flight = int64_t{64} << 20;  // theirs together; a larger one goes by itself
};

struct BatchCounts {
  int64_t pieces = 0;      // added
  int64_t batched = 0;     // of these, sent together with others
  int64_t broadcasts = 0;  // started
  int64_t bytes = 0;       // of the pieces
};

/// Used by one thread. Holds at most max_in_flight buffers, none larger than batch_bytes.
///
/// Every rank of a group adds the same pieces (root, dtype, bytes) in the same order, and calls flush() at
/// the same points between them. With several groups, all ranks keep to one order of the pieces of all
/// groups, from which each leaves out those of groups that it is not in. Where every rank has the same
/// options, they then start the same broadcasts in the same order.
class BroadcastBatches {
 public:
  /// InvalidArgumentError where a limit is negative, or nothing may be in flight.
  explicit BroadcastBatches(const BatchOptions& options = {});
  /// Waits for what is in flight, as Pending does. Pieces that were not flushed are not sent.
  ~BroadcastBatches() = default;
  BroadcastBatches(const BroadcastBatches&) = delete;
  BroadcastBatches& operator=(const BroadcastBatches&) = delete;

  /// The elements of the root's piece become everybody's, at the latest when wait_all() returns; until then
  /// the group has to live and the memory belongs to the batches. `root` is a place in the group.
  /// InvalidArgumentError or UnsupportedError, before anything is started, where the piece cannot be sent
  /// (group.h). Failures of groups are kept for wait_all(), as other groups may need this rank still.
  void add(Group& group, int root, const View& piece);

  /// Sends what waits in batches, in the order in which their first pieces came.
  void flush();

  /// Flushes and waits for everything. Throws the first failure there was, once all that still can land has
  /// landed; the pieces of a group that failed have unspecified contents then.
  void wait_all();

  const BatchCounts& counts() const { return counts_; }

 private:
  struct Batch {
    Group* group = nullptr;
    int root = 0;
    std::vector<View> pieces;
    int64_t bytes = 0;
  };
  struct Flight {
    Group* group = nullptr;
    int root = 0;
    int64_t bytes = 0;
    std::vector<View> packed;  // pieces that travel through the buffer
    Buffer buffer;             // these, one after the other
    Pending pending;           // goes first
  };
  using Key = std::tuple<Group*, int, DType>;

  Batch& open_batch(Group& group, int root, DType dtype);
  void send(Batch batch);
  Flight start(const Batch& batch);
  void make_room(int64_t bytes);
  void finish_oldest();
  void fail(Group& group);
  Buffer take_buffer(int64_t bytes);
  void give_back(Buffer buffer);

  const BatchOptions options_;
  BatchCounts counts_;
  std::vector<Batch> open_;        // in the order of their first pieces since the last flush
  std::map<Key, size_t> numbers_;  // of those
  std::vector<Buffer> free_;       // for reuse
  std::vector<Buffer> lost_;       // of broadcasts that failed: nobody knows who still writes there
  std::exception_ptr error_;       // the first
  int64_t bytes_in_flight_ = 0;
  std::deque<Flight> in_flight_;  // the oldest first; goes before the buffers
};

}  // namespace spolia
