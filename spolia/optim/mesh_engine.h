// Runs a mesh plan: what moves between the ranks in an optimizer's step, and when.
//
// For each batch, on the ranks of a row that owns some of it: the optimizer fills the input of the update
// (momentum, on shards); the pieces of each matrix go to the rank that computes it, in one all-to-all of the
// row; that rank orthogonalises it; the pieces go back; the step is taken on shards; the row's results go to
// the replicas, down the columns. The gather of the next batch runs while this one is computed, and results
// travel while later batches, and later groups, are.
//
// Every rank of a mesh starts the same operations in the same order, which follows from the plan alone: not
// from who owns what, nor from which gradients there are. Gathers and broadcasts have groups of their own,
// for the latter are sent on when they have landed.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "spolia/comm/hierarchical_broadcast.h"
#include "spolia/comm/world.h"
#include "spolia/device/buffer.h"
#include "spolia/optim/mesh_plan.h"

namespace spolia {

/// What an optimizer computes for the engine. Tensors are numbered as in the plan. Called on the thread that
/// uses the engine.
class MeshArithmetic {
 public:
  virtual ~MeshArithmetic() = default;

  /// On each rank of an owning row, for tensors with matrices: the input of the update, in the shape of what
  /// the rank owns of its shard.
  virtual void fill_update(size_t tensor, const View& update) = 0;
  /// On the rank that computes the matrix, which is whole: [rows, columns]. In place. `row_moments`
  /// ([rows, 1], float32) has data where the tensor has such state.
  virtual void compute(size_t tensor, const MatrixUnit& unit, const View& matrix,
                       const View& row_moments) = 0;
  /// On each rank of an owning row: takes the step. `update` has no data where the tensor has no matrices.
  virtual void apply(size_t tensor, const View& update) = 0;
  /// On each rank of the mesh: what replicas are sent, dense, of the plan's dtype and the shape of the shard.
  virtual View result(size_t tensor) = 0;
  /// On each rank of an owning row: NorMuon's state, dense float32: of the matrices that the rank computes;
  /// of all that the row has, where it travels.
  virtual View row_moments(size_t tensor) = 0;
  /// On replicas: a part of result() has been received.
  virtual void received(size_t tensor, const LeadingPart& part) = 0;
};

struct MeshEngineOptions {
  int64_t max_bytes_in_flight = int64_t{256} << 20;  // of results on their way; a larger one goes by itself
  int64_t pack_below = int64_t{512} << 10;           // results of fewer bytes travel together
};

/// Of one rank, since the engine was made.
struct MeshCounters {
  int64_t matrices = 0;               // computed here
  int64_t exchanged_bytes = 0;        // sent within rows
  int64_t received_bytes = 0;         // as a replica
  int64_t collectives = 0;            // started here: all-to-alls, and buffers broadcast
  double arithmetic_seconds = 0;      // in MeshArithmetic
  double compute_seconds = 0;         // of these, in compute(): Newton-Schulz
  double exchange_wait_seconds = 0;   // for all-to-alls
  double broadcast_seconds = 0;       // while results were on their way
  double broadcast_wait_seconds = 0;  // of these, spent waiting for them
  /// The share of the broadcasts' time in which something else was done; 1 where there were none.
  double hidden_share() const {
    return broadcast_seconds > 0 ? 1 - broadcast_wait_seconds / broadcast_seconds : 1;
  }
};

/// One rank's end. Used by one thread.
class MeshEngine {
 public:
  /// Collective over the world: makes the groups that the plan needs, which is the same on all ranks.
  MeshEngine(World& world, MeshPlan plan, const MeshEngineOptions& options = {});
  MeshEngine(const MeshEngine&) = delete;
  MeshEngine& operator=(const MeshEngine&) = delete;

  const MeshPlan& plan() const { return plan_; }
  const MeshCounters& counters() const { return counters_; }

  /// Steps the parameters of a group of the plan; results may be on their way to the replicas when it
  /// returns: `arithmetic`, and the memory of results, are used until wait_all() has returned, and a group is
  /// not flushed twice before. Every rank flushes the groups in the same order.
  ///
  /// Throws what the arithmetic throws, on the rank where it does; the groups are then broken, so that the
  /// other ranks do not wait. Values of parameters are unspecified after a failure.
  void flush_group(size_t group, MeshArithmetic& arithmetic);
  /// Runs what this rank does for a step; where it throws, the groups are broken, so that the others do not
  /// wait.
  void guarded(const std::function<void()>& step);
  /// Returns when all results have landed everywhere. Throws the first failure of a broadcast, unless
  /// flush_group() has met and thrown it.
  void wait_all();

  /// From the owning rows, of each its part, to the replicas, as results go; until wait_all() the memory is
  /// the engine's. Dense, of the same shape on every rank of a column. Every rank of the mesh calls it alike.
  void send_to_replicas(size_t tensor, const View& memory);

 private:
  /// Pieces that one rank of the row and the one that computes a matrix send each other, and where in the
  /// message.
  struct Transfer {
    size_t item = 0;  // of BatchWork::owned, or BatchWork::computed
    size_t unit = 0;
    std::optional<size_t> peer;  // place in the group; nothing: it is this rank
    int64_t offset = 0;          // bytes in the buffer
    std::vector<UnitPiece> pieces;
  };
  struct Owned {  // a tensor whose step this row takes, or takes for its part
    size_t tensor = 0;
    Dims local_shape;    // of what this rank owns
    int64_t offset = 0;  // in the buffer of updates
    std::vector<MatrixUnit> units;
  };
  struct Computed {  // a matrix that this rank computes
    size_t owned = 0, unit = 0;
    int64_t offset = 0;  // in the buffer of matrices, or where it is in place, in that of updates
    bool in_place = false;
  };
  struct Result {
    size_t tensor = 0;
    LeadingPart part;
    int64_t bytes = 0;
  };
  struct Sending {  // results of one row
    size_t row = 0;
    std::vector<Result> alone, packed;
    int64_t packed_bytes = 0;
  };
  /// What this rank does for a batch. Messages have one layout both ways.
  struct BatchWork {
    bool exchanges = false;
    std::vector<Owned> owned;
    std::vector<Computed> computed;
    std::vector<Transfer> to_owners, from_row;
    std::vector<int64_t> outer_counts, inner_counts;  // bytes with each rank of the row's group
    int64_t updates_bytes = 0, matrices_bytes = 0, outer_bytes = 0, inner_bytes = 0;
    std::vector<Sending> sendings;
  };
  struct GroupWork {
    std::optional<MeshGroup::Position> position;
    std::shared_ptr<Group> row;  // null where nothing is exchanged
    std::optional<size_t> channel;
    std::vector<BatchWork> batches;
  };
  /// A batch under way, in memory that the next ones use again.
  struct Flight {
    Buffer updates, matrices, outer, inner;
    Pending pending;  // goes first
  };
  /// Results on their way, in the order in which they were added.
  struct Parcel {
    Buffer buffer;
    std::vector<std::pair<View, int64_t>> unpack;  // where parts of the buffer go, and where they lie in it
    std::vector<Result> results;                   // received by this rank
    MeshArithmetic* arithmetic = nullptr;
    int64_t bytes = 0;
  };
  struct Channel {  // the columns of a mesh
    std::vector<std::shared_ptr<Group>> groups;
    std::deque<Parcel> parcels;                        // of the broadcasts in flight
    std::unique_ptr<HierarchicalBroadcast> broadcast;  // goes before the parcels
    bool flat = false;                                 // one dim: the rows of a replica group
  };
  using Clock = std::chrono::steady_clock;

  void make_groups(World& world);
  void prepare(GroupWork& work, const MeshGroup& group);
  BatchWork prepare_batch(const GroupWork& work, const MeshGroup& group, const MeshBatch& batch) const;
  View update_of(const BatchWork& work, Flight& flight, const Owned& owned) const;
  View matrix_of(const BatchWork& work, Flight& flight, const Computed& computed) const;
  View moments_of(const MatrixUnit& unit);

  void gather(GroupWork& group, size_t batch, MeshArithmetic& arithmetic);
  void compute(GroupWork& group, size_t batch, MeshArithmetic& arithmetic);
  void apply(GroupWork& group, size_t batch, MeshArithmetic& arithmetic);
  void exchange(GroupWork& group, const BatchWork& work, Flight& flight, bool to_owners);
  void send(const GroupWork& group, const MeshGroup& plan, const BatchWork& work, MeshArithmetic& arithmetic);
  void add(Channel& channel, const MeshGroup& group, size_t row, const View& memory, Parcel parcel);

  void poll();
  template <class Done>
  void poll_until(Done done, const std::function<void()>& give_up);
  template <class Body>
  double timed(Body body);
  void note_in_flight();

  const MeshPlan plan_;
  const MeshEngineOptions options_;
  const int64_t rank_;
  milliseconds timeout_;
  MeshCounters counters_;
  std::vector<GroupWork> groups_;
  std::vector<std::shared_ptr<Group>> all_groups_;
  int64_t bytes_in_flight_ = 0;
  std::optional<Clock::time_point> in_flight_since_;
  Buffer moments_;
  std::vector<Buffer> free_;
  std::array<Flight, 3> flights_;
  std::deque<Channel> channels_;
};

}  // namespace spolia
