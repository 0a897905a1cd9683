#include "spolia/comm/collective.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

using Kind = CollectiveKind;

/// Bytes that the operation is said to move: the same number on every rank, where it takes all of them.
int64_t said_bytes(const Collective& collective) {
  return std::max(std::ssize(collective.send), std::ssize(collective.receive));
}

void check_parts(const std::vector<int64_t>& parts, int64_t buffer, size_t ranks, std::string_view what,
                 Kind kind) {
  if (parts.size() != ranks) {
    throw InvalidArgumentError("{}: {} parts to {}, in a group of {}", name_of(kind), parts.size(), what,
                               ranks);
  }
  int64_t total = 0;
  for (int64_t part : parts) {
    std::optional<int64_t> sum = part < 0 ? std::nullopt : try_add(total, part);
    if (!sum) throw InvalidArgumentError("{}: a part to {} of {} bytes", name_of(kind), what, part);
    total = *sum;
  }
  if (total != buffer) {
    throw InvalidArgumentError("{}: the parts to {} are {} bytes together, and the buffer is {}",
                               name_of(kind), what, total, buffer);
  }
}

void check_buffer(int64_t bytes, int64_t expected, std::string_view which, Kind kind) {
  if (bytes == expected) return;
  throw InvalidArgumentError("{}: the {} buffer is {} bytes, and has to be {}", name_of(kind), which, bytes,
                             expected);
}

void check_sizes(const Collective& c, int place, size_t ranks) {
  const int64_t send = std::ssize(c.send), receive = std::ssize(c.receive);
  const size_t own = static_cast<size_t>(place);
  switch (c.kind) {
    case Kind::kBarrier:
      check_buffer(send, 0, "send", c.kind);
      return check_buffer(receive, 0, "receive", c.kind);
    case Kind::kBroadcast:
      if (place == c.peer) return check_buffer(receive, 0, "receive", c.kind);
      return check_buffer(send, 0, "send", c.kind);
    case Kind::kAllGather:
      check_parts(c.receive_bytes, receive, ranks, "receive", c.kind);
      return check_buffer(send, c.receive_bytes[own], "send", c.kind);
    case Kind::kAllReduce:
      return check_buffer(receive, send, "receive", c.kind);
    case Kind::kReduceScatter:
      check_parts(c.send_bytes, send, ranks, "send", c.kind);
      return check_buffer(receive, c.send_bytes[own], "receive", c.kind);
    case Kind::kAllToAll:
      check_parts(c.send_bytes, send, ranks, "send", c.kind);
      check_parts(c.receive_bytes, receive, ranks, "receive", c.kind);
      if (c.send_bytes[own] == c.receive_bytes[own]) return;
      throw InvalidArgumentError("all-to-all: {} bytes go to this rank itself, and {} come from it",
                                 c.send_bytes[own], c.receive_bytes[own]);
    case Kind::kSend:
      return check_buffer(receive, 0, "receive", c.kind);
    case Kind::kReceive:
      return check_buffer(send, 0, "send", c.kind);
  }
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) &&
         before(b.data(), a.data() + a.size());
}

/// Bytes of the parts before the one of `place`.
int64_t offset_of(const std::vector<int64_t>& parts, int place) {
  return std::accumulate(parts.begin(), parts.begin() + place, int64_t{0});
}

/// Whether what overlaps does so as an operation in place may.
bool is_in_place(const Collective& c, int place) {
  switch (c.kind) {
    case Kind::kAllReduce:
      return c.receive.data() == c.send.data();
    case Kind::kAllGather:
      return c.send.data() == c.receive.data() + offset_of(c.receive_bytes, place);
    case Kind::kReduceScatter:
      return c.receive.data() == c.send.data() + offset_of(c.send_bytes, place);
    default:
      return false;
  }
}

/// The first place where two lists of the same length differ.
std::optional<size_t> first_difference(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto [at, ignored] = std::mismatch(a.begin(), a.end(), b.begin());
  return at == a.end() ? std::nullopt : std::optional(static_cast<size_t>(at - a.begin()));
}

/// How sizes differ; nothing where they suit each other.
std::optional<std::string> size_difference(const Collective& of_a, size_t a, const Collective& of_b, size_t b,
                                           std::span<const int64_t> ranks) {
  switch (of_a.kind) {
    case Kind::kAllGather:
      if (auto r = first_difference(of_a.receive_bytes, of_b.receive_bytes)) {
        return fmt::format("rank {} expects {} bytes from rank {}, rank {} expects {}", ranks[a],
                           of_a.receive_bytes[*r], ranks[*r], ranks[b], of_b.receive_bytes[*r]);
      }
      return std::nullopt;
    case Kind::kReduceScatter:
      if (auto r = first_difference(of_a.send_bytes, of_b.send_bytes)) {
        return fmt::format("rank {} has {} bytes for rank {}, rank {} has {}", ranks[a], of_a.send_bytes[*r],
                           ranks[*r], ranks[b], of_b.send_bytes[*r]);
      }
      return std::nullopt;
    case Kind::kAllToAll:
      if (of_a.send_bytes[b] != of_b.receive_bytes[a]) {
        return fmt::format("rank {} sends {} bytes to rank {}, which expects {}", ranks[a],
                           of_a.send_bytes[b], ranks[b], of_b.receive_bytes[a]);
      }
      if (of_b.send_bytes[a] != of_a.receive_bytes[b]) {
        return fmt::format("rank {} sends {} bytes to rank {}, which expects {}", ranks[b],
                           of_b.send_bytes[a], ranks[a], of_a.receive_bytes[b]);
      }
      return std::nullopt;
    default:
      if (said_bytes(of_a) != said_bytes(of_b)) return "the sizes differ";
      return std::nullopt;
  }
}

std::optional<std::string> difference(const Collective& of_a, int a, const Collective& of_b, int b,
                                      std::span<const int64_t> ranks) {
  // A send meets a receive.
  const bool meets = is_between_two(of_a.kind) ? is_between_two(of_b.kind) && of_a.kind != of_b.kind
                                               : of_a.kind == of_b.kind;
  if (!meets) return "these are different operations";
  if (of_a.dtype != of_b.dtype) return "the dtypes differ";
  if (of_a.device.kind != of_b.device.kind) return "the devices differ";
  if (is_reduction(of_a.kind) && of_a.op != of_b.op) return "the reductions differ";
  if (of_a.kind == Kind::kBroadcast && of_a.peer != of_b.peer) return "the roots differ";
  return size_difference(of_a, static_cast<size_t>(a), of_b, static_cast<size_t>(b), ranks);
}

/// The description, with the device where it is not the host's memory.
std::string request(const Collective& collective, std::span<const int64_t> ranks) {
  std::string text = describe(collective, ranks);
  if (collective.device.kind != DeviceKind::kCpu) text += " on " + name_of(collective.device);
  return text;
}

}  // namespace

std::string_view name_of(CollectiveKind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return "barrier";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllGather:
      return "all-gather";
    case Kind::kAllReduce:
      return "all-reduce";
    case Kind::kReduceScatter:
      return "reduce-scatter";
    case Kind::kAllToAll:
      return "all-to-all";
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "receive";
  }
  return "unknown";
}

std::string describe(const Collective& collective, std::span<const int64_t> ranks) {
  const Kind kind = collective.kind;
  if (kind == Kind::kBarrier) return "barrier";
  std::string text(name_of(kind));
  if (is_reduction(kind)) text += fmt::format(" ({})", name_of(collective.op));
  // What the ranks of an all-to-all move differs by rank.
  if (kind != Kind::kAllToAll) text += fmt::format(" of {} bytes", said_bytes(collective));
  text += fmt::format(" ({})", name_of(collective.dtype));
  const auto peer = static_cast<size_t>(collective.peer);
  if (kind == Kind::kBroadcast || kind == Kind::kReceive) text += fmt::format(" from rank {}", ranks[peer]);
  if (kind == Kind::kSend) text += fmt::format(" to rank {}", ranks[peer]);
  return text;
}

void check(const Collective& collective, int place, std::span<const int64_t> ranks) {
  const Kind kind = collective.kind;
  if ((kind == Kind::kBroadcast || is_between_two(kind)) &&
      (collective.peer < 0 || collective.peer >= std::ssize(ranks))) {
    throw InvalidArgumentError("{}: place {} of a group of {}", name_of(kind), collective.peer, ranks.size());
  }
  check_sizes(collective, place, ranks.size());
  if (is_reduction(kind) && !can_reduce(collective.dtype, collective.op)) {
    throw UnsupportedError("{}: the {} of {} elements is not defined", name_of(kind), name_of(collective.op),
                           name_of(collective.dtype));
  }
  if (overlap(collective.send, collective.receive) && !is_in_place(collective, place)) {
    throw InvalidArgumentError("{}: the send and receive buffers overlap", name_of(kind));
  }
}

std::optional<std::string> disagreement(const Collective& of_a, int a, const Collective& of_b, int b,
                                        std::span<const int64_t> ranks) {
  std::optional<std::string> what = difference(of_a, a, of_b, b, ranks);
  if (!what) return std::nullopt;
  return fmt::format("rank {} asks for {}, rank {} for {}: {}", ranks[static_cast<size_t>(a)],
                     request(of_a, ranks), ranks[static_cast<size_t>(b)], request(of_b, ranks), *what);
}

}  // namespace spolia
