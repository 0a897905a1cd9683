#include "spolia/comm/threads/moves.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/checked.h"
#include "spolia/device/host_copy.h"

namespace spolia {
namespace {

/// Small enough to stay in a core's cache while it goes to several targets, large enough that taking a piece
/// costs nothing against copying it. A multiple of every element's size.
constexpr int64_t kPieceBytes = int64_t{128} << 10;

using Kind = CollectiveKind;

void add(std::vector<Move>& moves, Move move) {
  if (move.bytes == 0) return;
  if (move.from.size() == 1) {  // a copy
    const auto ends = std::remove(move.to.begin(), move.to.end(), move.from[0]);
    move.to.resize(static_cast<size_t>(ends - move.to.begin()));
  }
  if (!move.to.empty()) moves.push_back(move);
}

std::vector<Move> broadcast(std::span<const Collective> asked) {
  const std::span<const std::byte> sent = asked[static_cast<size_t>(asked[0].peer)].send;
  Move move = {.from = {sent.data()}, .to = {}, .bytes = std::ssize(sent)};
  for (size_t r = 0; r < asked.size(); ++r) {
    if (static_cast<int>(r) != asked[0].peer) move.to.push_back(asked[r].receive.data());
  }
  std::vector<Move> moves;
  add(moves, move);
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

std::vector<Move> between_two(std::span<const Collective> asked) {
  std::vector<Move> moves;
  add(moves,
      {.from = {asked[0].send.data()}, .to = {asked[1].receive.data()}, .bytes = std::ssize(asked[0].send)});
  return moves;
}

void copy(std::byte* to, const std::byte* from, int64_t bytes, bool streaming) {
  copy_rows_on_host(to, bytes, from, bytes, bytes, 1, streaming);
}

}  // namespace

std::vector<Move> moves_of(std::span<const Collective> asked) {
  switch (asked[0].kind) {
    case Kind::kBarrier:
      return {};
    case Kind::kBroadcast:
      return broadcast(asked);
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
      return between_two(asked);
  }
  return {};
}

Pieces::Pieces(std::vector<Move> moves, DType dtype, ReduceOp op)
    : moves_(std::move(moves)), dtype_(dtype), op_(op) {
  first_piece_.reserve(moves_.size());
  for (const Move& move : moves_) {
    first_piece_.push_back(count_);
    count_ += ceil_div(move.bytes, kPieceBytes);
    bytes_written_ += move.bytes * std::ssize(move.to);
  }
}

Pieces::Step Pieces::carry_out_one() noexcept {
  if (taken_.load(std::memory_order_relaxed) >= count_) return Step::kNothingLeft;
  const int64_t piece = taken_.fetch_add(1, std::memory_order_relaxed);
  if (piece >= count_) return Step::kNothingLeft;

  const auto next = std::upper_bound(first_piece_.begin(), first_piece_.end(), piece);
  const size_t m = static_cast<size_t>(next - first_piece_.begin()) - 1;
  const Move& move = moves_[m];
  const int64_t offset = (piece - first_piece_[m]) * kPieceBytes;
  const int64_t bytes = std::min(kPieceBytes, move.bytes - offset);
  if (move.from.size() == 1) {
    const bool streaming = bytes_written_ >= kStreamBytes;
    for (std::byte* to : move.to) copy(to + offset, move.from[0] + offset, bytes, streaming);
    if (streaming) finish_streaming();
  } else {
    reduce(dtype_, op_, move.from, move.to, offset, offset + bytes);
  }
  return done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_ ? Step::kDoneTheLast : Step::kDone;
}

}  // namespace spolia
