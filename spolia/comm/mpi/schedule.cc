#include "spolia/comm/mpi/schedule.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/comm/mpi/transport.h"
#include "spolia/device/buffer.h"

namespace spolia {
namespace {

/// A broadcast of so much or less goes down a tree as a whole; more goes along a chain, in pieces.
constexpr int64_t kTreeBytes = int64_t{128} << 10;
constexpr int64_t kLeastPiece = int64_t{64} << 10, kMostPiece = int64_t{4} << 20;
/// An all-reduce of so much or less is sent to everybody as a whole; of more, each rank reduces a segment.
constexpr int64_t kSmallReduction = int64_t{16} << 10;
/// What a rank reduces in one round; the memory of a round is so much from each rank. A multiple of every
/// element.
constexpr int64_t kMostSegment = int64_t{1} << 20;
constexpr int64_t kSegmentUnit = 16;
/// The longest message: each one that is done is a sign of life.
constexpr int64_t kMostMessage = int64_t{8} << 20;
static_assert(kMostMessage <= Transport::kMostBytes);

/// A run of bytes in a buffer.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t bytes() const { return end - begin; }
};

void add(Step& step, int peer, bool sends, std::byte* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kMostMessage) {
    step.transfers.push_back({peer, sends, data + at, std::min(bytes - at, kMostMessage)});
  }
}
void add_send(Step& step, int peer, const std::byte* data, int64_t bytes) {
  add(step, peer, true, const_cast<std::byte*>(data), bytes);
}
void add_receive(Step& step, int peer, std::byte* data, int64_t bytes) {
  add(step, peer, false, data, bytes);
}

void copy(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

std::vector<Run> runs_of(const std::vector<int64_t>& parts) {
  std::vector<Run> runs;
  int64_t at = 0;
  for (int64_t part : parts) {
    runs.push_back({at, at + part});
    at += part;
  }
  return runs;
}

/// Calls body(to, from) for every distance round the group, so that at each moment all ranks talk to others.
template <class Body>
void for_each_distance(int place, int ranks, Body body) {
  for (int i = 1; i < ranks; ++i) body((place + i) % ranks, (place - i + ranks) % ranks);
}

Schedule steps(std::vector<Step> list) {
  return [list = std::move(list), at = size_t{0}]() mutable -> std::optional<Step> {
    return at < list.size() ? std::optional(std::move(list[at++])) : std::nullopt;
  };
}

/// From the root to whoever is nearest a power of two away, and so on.
Schedule tree_broadcast(std::span<std::byte> buffer, int root, int place, int ranks) {
  const int own = (place - root + ranks) % ranks;  // the distance from the root
  const auto peer = [=](int distance) { return (distance + root) % ranks; };
  const int64_t bytes = std::ssize(buffer);
  std::vector<Step> list(2);
  if (own != 0) add_receive(list[0], peer(own & (own - 1)), buffer.data(), bytes);
  std::vector<int> children;
  for (int bit = 1; (own & bit) == 0 && bit < ranks; bit <<= 1) {
    if (own + bit < ranks) children.push_back(own + bit);
  }
  // The largest subtree first.
  for (auto child = children.rbegin(); child != children.rend(); ++child)
    add_send(list[1], peer(*child), buffer.data(), bytes);
  return steps(std::move(list));
}

/// From each rank to the next: while a piece arrives, the one before it goes on.
Schedule chain_broadcast(std::span<std::byte> buffer, int root, int place, int ranks) {
  const int own = (place - root + ranks) % ranks;
  const int previous = (place - 1 + ranks) % ranks, next = (place + 1) % ranks;
  const int64_t bytes = std::ssize(buffer);
  const int64_t piece = std::clamp(bytes / (4 * ranks), kLeastPiece, kMostPiece);
  const int64_t pieces = ceil_div(bytes, piece);
  const auto run = [=](int64_t i) { return Run{i * piece, std::min(bytes, (i + 1) * piece)}; };
  return [=, i = int64_t{0}]() mutable -> std::optional<Step> {
    // A rank that receives is a step behind with what it sends.
    const int64_t arrives = own == 0 ? pieces : i, leaves = own == 0 ? i : i - 1;
    ++i;
    if (leaves >= pieces) return std::nullopt;
    Step step;
    if (arrives < pieces) {
      add_receive(step, previous, buffer.data() + run(arrives).begin, run(arrives).bytes());
    }
    if (leaves >= 0 && own != ranks - 1) {
      add_send(step, next, buffer.data() + run(leaves).begin, run(leaves).bytes());
    }
    return step;
  };
}

Schedule broadcast(const Collective& c, int place, int ranks) {
  const std::span<std::byte> buffer =
      place == c.peer ? std::span(const_cast<std::byte*>(c.send.data()), c.send.size()) : c.receive;
  const bool small = std::ssize(buffer) <= kTreeBytes;
  return small ? tree_broadcast(buffer, c.peer, place, ranks) : chain_broadcast(buffer, c.peer, place, ranks);
}

Schedule all_gather(const Collective& c, int place, int ranks) {
  const std::vector<Run> runs = runs_of(c.receive_bytes);
  const auto run = [&](int p) { return runs[static_cast<size_t>(p)]; };
  copy(c.receive.data() + run(place).begin, c.send.data(), std::ssize(c.send));
  Step step;
  for_each_distance(place, ranks, [&](int to, int from) {
    add_send(step, to, c.send.data(), std::ssize(c.send));
    add_receive(step, from, c.receive.data() + run(from).begin, run(from).bytes());
  });
  return steps({std::move(step)});
}

Schedule all_to_all(const Collective& c, int place, int ranks) {
  const std::vector<Run> sent = runs_of(c.send_bytes), received = runs_of(c.receive_bytes);
  const auto at = [](const std::vector<Run>& runs, int p) { return runs[static_cast<size_t>(p)]; };
  copy(c.receive.data() + at(received, place).begin, c.send.data() + at(sent, place).begin,
       at(sent, place).bytes());
  Step step;
  for_each_distance(place, ranks, [&](int to, int from) {
    add_send(step, to, c.send.data() + at(sent, to).begin, at(sent, to).bytes());
    add_receive(step, from, c.receive.data() + at(received, from).begin, at(received, from).bytes());
  });
  return steps({std::move(step)});
}

/// What a rank holds of others while it reduces.
class Reduction {
 public:
  Reduction(const Collective& c, int place, int ranks, int64_t segment)
      : dtype_(c.dtype),
        op_(c.op),
        place_(place),
        ranks_(ranks),
        segment_(segment),
        memory_(segment * (ranks - 1)) {}

  std::byte* from(int place) { return memory_.data() + segment_ * (place < place_ ? place : place - 1); }
  /// The reduction of `own` and what has come from the others, into `to`.
  void reduce_into(std::byte* to, const std::byte* own, int64_t bytes) {
    if (bytes == 0) return;
    std::vector<const std::byte*> all;
    for (int p = 0; p < ranks_; ++p) all.push_back(p == place_ ? own : from(p));
    std::byte* const targets[] = {to};
    reduce(dtype_, op_, all, targets, 0, bytes);
  }

 private:
  const DType dtype_;
  const ReduceOp op_;
  const int place_, ranks_;
  const int64_t segment_;
  Buffer memory_;
};

Schedule small_all_reduce(const Collective& c, int place, int ranks) {
  const int64_t bytes = std::ssize(c.send);
  const auto reduction = std::make_shared<Reduction>(c, place, ranks, bytes);
  Step step;
  for_each_distance(place, ranks, [&](int to, int from) {
    add_send(step, to, c.send.data(), bytes);
    add_receive(step, from, reduction->from(from), bytes);
  });
  step.then = [=, send = c.send.data(), receive = c.receive.data()] {
    reduction->reduce_into(receive, send, bytes);
  };
  return steps({std::move(step)});
}

/// The bytes that `place` reduces of `bytes` that begin at `begin`.
Run segment_of(int64_t begin, int64_t bytes, int place, int ranks) {
  const int64_t each = align_up(ceil_div(bytes, ranks), kSegmentUnit);
  return {begin + std::min(bytes, each * place), begin + std::min(bytes, each * (place + 1))};
}

Schedule all_reduce(const Collective& c, int place, int ranks) {
  const int64_t bytes = std::ssize(c.send);
  if (bytes <= kSmallReduction || ranks == 1) return small_all_reduce(c, place, ranks);
  const int64_t round = std::min(align_up(bytes, kSegmentUnit * ranks), kMostSegment * ranks);
  const auto reduction = std::make_shared<Reduction>(c, place, ranks, round / ranks);
  return [=, send = c.send.data(), receive = c.receive.data(), begin = int64_t{0},
          gathers = false]() mutable -> std::optional<Step> {
    if (begin >= bytes) return std::nullopt;
    const auto segment = [=](int p) { return segment_of(begin, std::min(round, bytes - begin), p, ranks); };
    const Run own = segment(place);
    Step step;
    for_each_distance(place, ranks, [&](int to, int from) {
      if (gathers) {
        add_send(step, to, receive + own.begin, own.bytes());
        add_receive(step, from, receive + segment(from).begin, segment(from).bytes());
      } else {
        add_send(step, to, send + segment(to).begin, segment(to).bytes());
        add_receive(step, from, reduction->from(from), own.bytes());
      }
    });
    if (gathers) {
      begin += round;
    } else {
      step.then = [=] { reduction->reduce_into(receive + own.begin, send + own.begin, own.bytes()); };
    }
    gathers = !gathers;
    return step;
  };
}

Schedule reduce_scatter(const Collective& c, int place, int ranks) {
  const std::vector<Run> parts = runs_of(c.send_bytes);
  const int64_t longest = *std::ranges::max_element(c.send_bytes);
  const int64_t segment = std::min(longest, kMostSegment);
  const auto reduction = std::make_shared<Reduction>(c, place, ranks, segment);
  return [=, send = c.send.data(), receive = c.receive.data(),
          begin = int64_t{0}]() mutable -> std::optional<Step> {
    if (begin >= longest) return std::nullopt;
    // The bytes of the round, in a rank's part.
    const auto run = [=](int p) {
      const Run part = parts[static_cast<size_t>(p)];
      return Run{std::min(part.end, part.begin + begin), std::min(part.end, part.begin + begin + segment)};
    };
    const Run own = run(place);
    Step step;
    for_each_distance(place, ranks, [&](int to, int from) {
      add_send(step, to, send + run(to).begin, run(to).bytes());
      add_receive(step, from, reduction->from(from), own.bytes());
    });
    step.then = [=, to = receive + begin] { reduction->reduce_into(to, send + own.begin, own.bytes()); };
    begin += segment;
    return step;
  };
}

Schedule one_transfer(const Collective& c) {
  Step step;
  if (c.kind == CollectiveKind::kSend) {
    add_send(step, c.peer, c.send.data(), std::ssize(c.send));
  } else {
    add_receive(step, c.peer, c.receive.data(), std::ssize(c.receive));
  }
  return steps({std::move(step)});
}

}  // namespace

Schedule schedule(const Collective& collective, int place, int ranks) {
  if (collective.meets_only) return steps({});
  switch (collective.kind) {
    case CollectiveKind::kBroadcast:
      return broadcast(collective, place, ranks);
    case CollectiveKind::kAllGather:
      return all_gather(collective, place, ranks);
    case CollectiveKind::kAllReduce:
      return all_reduce(collective, place, ranks);
    case CollectiveKind::kReduceScatter:
      return reduce_scatter(collective, place, ranks);
    case CollectiveKind::kAllToAll:
      return all_to_all(collective, place, ranks);
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return one_transfer(collective);
    case CollectiveKind::kBarrier:
      break;
  }
  return steps({});
}

}  // namespace spolia
