// Stream plans: in which order whole tensors come into being on ranks that hold parts of them, which part is
// sent by whom and when, and what that takes. Pure values.
//
// Outputs are cut into units: a whole output, or, where it is too large and the consumer takes pieces, blocks
// of it in row-major order. Units are gathered into rounds. All of a round's units are assembled before the
// first is handed out, and while they are being used the next round is on its way, where both fit. No part of
// a source outlives its round, and none is sent before it: parts land in the units that they become.
//
// Ranks stand in a grid. A part goes down its column to the rows that have no rank with it, and in each row
// from one rank to those that lack it. A single group is a grid of one row. The rank of a row that has sent
// least so far sends; rows in which some rank has the part need nothing from other rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/mapping/mapping.h"
#include "spolia/plan/ownership.h"

namespace spolia {

/// Ranks in rows and columns. A seat is a place in the grid: row * columns + column.
struct StreamGrid {
  std::vector<std::vector<int64_t>> rows;  // of ranks; equally long

  size_t columns() const { return rows.front().size(); }
  size_t seats() const { return rows.size() * columns(); }
  size_t row_of(size_t seat) const { return seat / columns(); }
  size_t column_of(size_t seat) const { return seat % columns(); }
  size_t seat(size_t row, size_t column) const { return row * columns() + column; }
  int64_t rank_of(size_t seat) const { return rows[row_of(seat)][column_of(seat)]; }
  /// Nothing where it is not in the grid.
  std::optional<size_t> seat_of(int64_t rank) const;
};

/// One of the tensors that ranks hold. `shape` and boxes are addressable ones (catalog.h).
struct StreamSource {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<HeldBox> boxes;  // they tile the shape; of ranks in the grid
};

struct StreamOutput {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;                         // its own; regions are in the addressable one
  std::vector<SourceRegion> regions;  // they tile it, unless it is filled
  std::optional<double> fill;         // of every element
  /// The seats whose ranks want it, rising; nullptr: all. Outputs should share these.
  std::shared_ptr<const std::vector<size_t>> wanted_by;
};

struct StreamLimits {
  int64_t memory = int64_t{256} << 20;  // bytes on each rank; hard
  bool pieces = false;                  // whether outputs that are too large for it come in pieces
  /// Rounds are no larger, unless a unit is: what is on its way while the round before is used.
  int64_t round_bytes = int64_t{32} << 20;
};

struct StreamPlan {
  /// What is handed out: a box of an output, in its addressable shape. A whole output, unless it is in
  /// pieces.
  struct Unit {
    size_t output = 0;
    Box box;
    int64_t bytes = 0;
  };
  /// Elements of a source that become elements of a unit.
  struct Move {
    size_t unit = 0;
    size_t source = 0;
    size_t held = 0;             // of the source's boxes
    Region region;               // from the source to the output
    DType wire = DType::kUInt8;  // as which they travel: the smaller of both sides' dtypes
    bool stays = false;          // nobody needs it sent
    /// An earlier move of the round that brings the same elements, to be copied from its unit.
    std::optional<size_t> twin;
    std::vector<uint32_t> roots;  // of each row, the seat that sends there; a rank that has it, or relays it
    uint32_t sender = 0;          // the seat that sends it to rows whose root has it not
  };
  /// Moves that are on their way together, within `staging`.
  struct Wave {
    size_t first_move = 0, end_move = 0;
  };
  struct Round {
    size_t first_unit = 0, end_unit = 0;
    size_t first_wave = 0, end_wave = 0;
    bool ahead = false;  // the next one starts while this one's units are being used
  };
  std::vector<Unit> units;
  std::vector<Move> moves;
  std::vector<Wave> waves;
  std::vector<Round> rounds;

  /// Bytes for what is on its way: eight pieces. Two for the casts and relays of each of two rounds, three
  /// for messages, one for copies between the host and devices.
  int64_t staging = 0;
  int64_t piece_bytes = 0;  // no move is larger
  int64_t stage_bytes() const { return 2 * piece_bytes; }
  std::vector<int64_t> arena;  // of each seat: bytes of the units that it has at once, at most

  int64_t delivered = 0;  // bytes of units over all ranks that want them
  int64_t sent = 0;       // bytes over all receivers
  int64_t least = 0;      // what ranks want and have not, every element of a source counted once for a rank
  std::vector<int64_t> sent_by;  // of each seat

  /// The most that a rank holds.
  int64_t peak() const;
};

/// Where the units' bytes begin.
inline constexpr int64_t kUnitAlignment = 64;
/// The least memory for what is on its way.
inline constexpr int64_t kLeastStaging = int64_t{64} << 10;

/// Pure: the same arguments give the same plan on every rank. UnsupportedError stating the least memory that
/// does, where an output is too large and must not come in pieces.
StreamPlan plan_stream(const StreamGrid& grid, std::span<const StreamSource> sources,
                       std::span<const StreamOutput> outputs, const StreamLimits& limits = {});

/// Which ranks of a row take part in a move: its root sends to all others, or to some.
struct RowRoute {
  size_t root = 0;         // a seat
  bool broadcast = false;  // to the whole row
  std::vector<size_t> to;  // where it is none: these seats, one by one
};
/// Nothing where nobody in the row needs it.
std::optional<RowRoute> row_route(const StreamGrid& grid, std::span<const StreamSource> sources,
                                  std::span<const StreamOutput> outputs, const StreamPlan& plan,
                                  const StreamPlan::Move& move, size_t row);

/// The same along the sender's column: the roots of rows in which no rank has it.
std::optional<RowRoute> column_route(const StreamGrid& grid, std::span<const StreamSource> sources,
                                     const StreamPlan& plan, const StreamPlan::Move& move);

/// The source's elements of a region that lie in `source`, which is not empty and lies in region.source.
Region narrowed_to_source(const Region& region, const Box& source);

bool wants(const StreamOutput& output, size_t seat);
bool holds(const StreamGrid& grid, const StreamSource& source, size_t held, size_t seat);

/// A line for every round, unit and move, for people and for comparing.
std::string stream_plan_text(const StreamGrid& grid, std::span<const StreamSource> sources,
                             std::span<const StreamOutput> outputs, const StreamPlan& plan);

}  // namespace spolia
