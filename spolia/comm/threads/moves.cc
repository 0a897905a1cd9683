#include "spolia/comm/threads/moves.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/checked.h"
#include "spolia/device/host_copy.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

/// Small enough to stay in a core's cache while it goes to several targets, large enough that taking a piece
/// costs nothing against copying it. A multiple of every element's size.
constexpr int64_t kPieceBytes = int64_t{128} << 10;

using Kind = CollectiveKind;

void add(std::vector<Move>& moves, Move move) {
  if (move.bytes == 0) return;
  if (move.from.size() == 1 && move.rows == 1) {  // a copy
    const auto ends = std::remove(move.to.begin(), move.to.end(), move.from[0]);
    move.to.resize(static_cast<size_t>(ends - move.to.begin()));
  }
  if (!move.to.empty()) moves.push_back(std::move(move));
}

/// Where the next bytes of a place are.
class Cursor {
 public:
  explicit Cursor(Runs runs) : runs_(std::move(runs)) {}

  bool at_end() const { return at_ == runs_.size(); }
  std::byte* data() const { return run().data + row_ * run().pitch + offset_; }
  /// Bytes up to the end of the row.
  int64_t bytes() const { return run().bytes - offset_; }
  /// How many rows of so many bytes, no more than bytes(), come next at one pitch; and that pitch.
  int64_t rows(int64_t bytes) const { return is_row(bytes) ? run().rows - row_ : this->bytes() / bytes; }
  int64_t pitch(int64_t bytes) const { return is_row(bytes) ? run().pitch : bytes; }
  /// By so many of these.
  void advance(int64_t bytes, int64_t rows) {
    if (is_row(bytes)) {
      row_ += rows;
    } else if ((offset_ += bytes * rows) == run().bytes) {
      offset_ = 0;
      ++row_;
    }
    if (row_ < run().rows) return;
    row_ = 0;
    ++at_;
  }

 private:
  const Run& run() const { return runs_[at_]; }
  bool is_row(int64_t bytes) const { return offset_ == 0 && bytes == run().bytes; }

  const Runs runs_;
  size_t at_ = 0;
  int64_t row_ = 0, offset_ = 0;
};

/// A place's bytes, of an operation that takes runs.
Runs runs_of(const Collective& asked, const Runs& runs) {
  if (!runs.empty()) return runs;
  if (!asked.receive.empty()) return {{asked.receive.data(), std::ssize(asked.receive)}};
  if (asked.send.empty()) return {};
  return {{const_cast<std::byte*>(asked.send.data()), std::ssize(asked.send)}};  // only read
}

/// What the root has goes to all others. A new move wherever the rows change at any place.
std::vector<Move> broadcast(std::span<const Collective> asked, std::span<const Runs> runs, size_t root) {
  std::vector<Cursor> cursors;
  cursors.reserve(asked.size());
  for (size_t r = 0; r < asked.size(); ++r)
    cursors.emplace_back(runs_of(asked[r], runs.empty() ? Runs() : runs[r]));
  std::vector<Move> moves;
  while (!cursors[root].at_end()) {
    Move move = {.from = {cursors[root].data()}, .to = {}, .bytes = cursors[root].bytes()};
    for (const Cursor& cursor : cursors) move.bytes = std::min(move.bytes, cursor.bytes());
    move.rows = cursors[root].rows(move.bytes);
    for (const Cursor& cursor : cursors) move.rows = std::min(move.rows, cursor.rows(move.bytes));
    move.from_pitch = cursors[root].pitch(move.bytes);
    for (size_t r = 0; r < cursors.size(); ++r) {
      if (r == root) continue;
      move.to.push_back(cursors[r].data());
      if (move.rows > 1) move.to_pitch.push_back(cursors[r].pitch(move.bytes));
    }
    for (Cursor& cursor : cursors) cursor.advance(move.bytes, move.rows);
    add(moves, std::move(move));
  }
  return moves;
}

std::vector<Move> all_gather(std::span<const Collective> asked) {
  std::vector<Move> moves;
  int64_t offset = 0;
  for (const Collective& sender : asked) {
    Move move = {.from = {sender.send.data()}, .to = {}, .bytes = std::ssize(sender.send)};
    for (const Collective& receiver : asked) move.to.push_back(receiver.receive.data() + offset);
    offset += move.bytes;
    add(moves, move);
  }
  return moves;
}

std::vector<Move> all_reduce(std::span<const Collective> asked) {
  Move move = {.from = {}, .to = {}, .bytes = std::ssize(asked[0].send)};
  for (const Collective& rank : asked) {
    move.from.push_back(rank.send.data());
    move.to.push_back(rank.receive.data());
  }
  std::vector<Move> moves;
  add(moves, move);
  return moves;
}

std::vector<Move> reduce_scatter(std::span<const Collective> asked) {
  std::vector<Move> moves;
  int64_t offset = 0;
  for (const Collective& receiver : asked) {
    Move move = {.from = {}, .to = {receiver.receive.data()}, .bytes = std::ssize(receiver.receive)};
    for (const Collective& sender : asked) move.from.push_back(sender.send.data() + offset);
    offset += move.bytes;
    add(moves, move);
  }
  return moves;
}

std::vector<Move> all_to_all(std::span<const Collective> asked) {
  std::vector<Move> moves;
  std::vector<int64_t> received(asked.size(), 0);
  for (size_t s = 0; s < asked.size(); ++s) {
    int64_t sent = 0;
    for (size_t r = 0; r < asked.size(); ++r) {
      const int64_t bytes = asked[s].send_bytes[r];
      add(moves, {.from = {asked[s].send.data() + sent},
                  .to = {asked[r].receive.data() + received[r]},
                  .bytes = bytes});
      sent += bytes;
      received[r] += bytes;
    }
  }
  return moves;
}

/// Rows shorter than this are copied element by element: nothing of them is a line.
constexpr int64_t kShortRow = kLineBytes;

void copy(std::byte* to, const std::byte* from, int64_t bytes, bool streaming) {
  copy_rows_on_host(to, bytes, from, bytes, bytes, 1, streaming);
}

/// The bytes [begin, end) of rows.
void copy_rows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t row,
               int64_t begin, int64_t end, bool streaming) {
  int64_t number = begin / row;
  if (const int64_t inside = begin % row; inside > 0) {
    const int64_t bytes = std::min(row - inside, end - begin);
    copy(to + number * to_pitch + inside, from + number * from_pitch + inside, bytes, streaming);
    ++number;
  }
  const int64_t last = end / row;
  if (last > number && row < kShortRow) {
    const int64_t sizes[] = {last - number, row}, to_strides[] = {to_pitch, 1},
                  from_strides[] = {from_pitch, 1};
    copy_strided(sizes, 1, to + number * to_pitch, to_strides, from + number * from_pitch, from_strides);
  } else if (last > number) {
    copy_rows_on_host(to + number * to_pitch, to_pitch, from + number * from_pitch, from_pitch, row,
                      last - number, streaming);
  }
  if (last >= number && end % row > 0)
    copy(to + last * to_pitch, from + last * from_pitch, end % row, streaming);
}

}  // namespace

std::vector<Move> moves_of(std::span<const Collective> asked, std::span<const Runs> runs) {
  if (asked[0].meets_only) return {};
  switch (asked[0].kind) {
    case Kind::kBarrier:
      return {};
    case Kind::kBroadcast:
      return broadcast(asked, runs, static_cast<size_t>(asked[0].peer));
    case Kind::kAllGather:
      return all_gather(asked);
    case Kind::kAllReduce:
      return all_reduce(asked);
    case Kind::kReduceScatter:
      return reduce_scatter(asked);
    case Kind::kAllToAll:
      return all_to_all(asked);
    case Kind::kSend:
    case Kind::kReceive:
      return broadcast(asked, runs, 0);
  }
  return {};
}

Pieces::Pieces(std::vector<Move> moves, DType dtype, ReduceOp op)
    : moves_(std::move(moves)), dtype_(dtype), op_(op) {
  begins_.reserve(moves_.size());
  for (const Move& move : moves_) {
    begins_.push_back(bytes_);
    bytes_ += move.total();
    bytes_written_ += move.total() * std::ssize(move.to);
  }
  count_ = ceil_div(bytes_, kPieceBytes);
}

/// The bytes [begin, end) of a move.
void Pieces::carry_out(const Move& move, int64_t begin, int64_t end) noexcept {
  if (move.from.size() > 1) return reduce(dtype_, op_, move.from, move.to, begin, end);
  const bool streaming = bytes_written_ >= kStreamBytes;
  for (size_t t = 0; t < move.to.size(); ++t) {
    if (move.rows == 1) {
      copy(move.to[t] + begin, move.from[0] + begin, end - begin, streaming);
    } else {
      copy_rows(move.to[t], move.to_pitch[t], move.from[0], move.from_pitch, move.bytes, begin, end,
                streaming);
    }
  }
}

Pieces::Step Pieces::carry_out_one() noexcept {
  if (taken_.load(std::memory_order_relaxed) >= count_) return Step::kNothingLeft;
  const int64_t piece = taken_.fetch_add(1, std::memory_order_relaxed);
  if (piece >= count_) return Step::kNothingLeft;

  const int64_t begin = piece * kPieceBytes, end = std::min(bytes_, begin + kPieceBytes);
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), begin);
  for (size_t m = static_cast<size_t>(next - begins_.begin()) - 1; m < moves_.size() && begins_[m] < end;
       ++m) {
    carry_out(moves_[m], std::max(begin - begins_[m], int64_t{0}),
              std::min(end - begins_[m], moves_[m].total()));
  }
  finish_streaming();
  return done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_ ? Step::kDoneTheLast : Step::kDone;
}

}  // namespace spolia
