#include "spolia/comm/nccl/nccl_steps.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/comm/reduce.h"

namespace spolia {
namespace {

using Kind = CollectiveKind;

/// Bytes that the host reduces at a time for each rank.
constexpr int64_t kSlotBytes = int64_t{1} << 20;

std::optional<NcclType> integer_type(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return kNcclInt8;
    case DType::kUInt8:
      return kNcclUInt8;
    case DType::kInt32:
      return kNcclInt32;
    case DType::kUInt32:
      return kNcclUInt32;
    case DType::kInt64:
      return kNcclInt64;
    case DType::kUInt64:
      return kNcclUInt64;
    default:
      return std::nullopt;
  }
}

std::optional<NcclType> float_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kNcclFloat16;
    case DType::kBFloat16:
      return kNcclBFloat16;
    case DType::kFloat32:
      return kNcclFloat32;
    case DType::kFloat64:
      return kNcclFloat64;
    default:
      return std::nullopt;
  }
}

NcclOp nccl_op(ReduceOp op) {
  return op == ReduceOp::kSum ? kNcclSum : op == ReduceOp::kMin ? kNcclMin : kNcclMax;
}

struct Run {
  int64_t begin = 0, bytes = 0;
};

std::vector<Run> runs_of(const std::vector<int64_t>& parts) {
  std::vector<Run> runs;
  int64_t begin = 0;
  for (int64_t bytes : parts) {
    runs.push_back({begin, bytes});
    begin += bytes;
  }
  return runs;
}

/// What each rank reduces of an operation: of a reduce-scatter its part, of an all-reduce an equal share.
std::vector<Run> shares(const Collective& c, int ranks) {
  if (c.kind == Kind::kReduceScatter) return runs_of(c.send_bytes);
  const int64_t width = element_bytes(c.dtype), count = std::ssize(c.send) / width;
  std::vector<int64_t> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back((count / ranks + (r < count % ranks ? 1 : 0)) * width);
  return runs_of(parts);
}

/// The `round`th slot of a run.
Run slot_of(const Run& run, int64_t round, int64_t slot) {
  const int64_t begin = std::min(round * slot, run.bytes);
  return {run.begin + begin, std::min(slot, run.bytes - begin)};
}

/// Sends and receives that are under way together. Calls between group_start() and group_end().
class Exchange {
 public:
  explicit Exchange(const NcclEnd& end) : end_(end) {
    check_nccl(end_, end_.library->group_start(), "start a group of calls");
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void send(const std::byte* from, int64_t bytes, int to) {
    if (bytes == 0) return;
    note(end_.library->send(from, static_cast<size_t>(bytes), kNcclUInt8, to, end_.comm,
                            end_.stream->handle()));
  }
  void receive(std::byte* to, int64_t bytes, int from) {
    if (bytes == 0) return;
    note(end_.library->receive(to, static_cast<size_t>(bytes), kNcclUInt8, from, end_.comm,
                               end_.stream->handle()));
  }
  void note(int result) {
    if (result_ == kNcclSuccess && result != kNcclInProgress) result_ = result;
  }
  /// The group is ended whatever was refused in it.
  void end(std::string_view what) {
    const int result = end_.library->group_end();
    check_nccl(end_, result_ == kNcclSuccess ? result : result_, what);
  }

 private:
  const NcclEnd& end_;
  int result_ = kNcclSuccess;
};

NcclSteps broadcast(const Collective& c, const NcclEnd& end) {
  return {[&c, &end] {
    const bool is_root = end.rank == c.peer;
    // The root's buffer is only read: it is what NCCL would write to it.
    auto* buffer = is_root ? const_cast<std::byte*>(c.send.data()) : c.receive.data();
    const size_t bytes = is_root ? c.send.size() : c.receive.size();
    check_nccl(
        end,
        end.library->broadcast(buffer, buffer, bytes, kNcclUInt8, c.peer, end.comm, end.stream->handle()),
        "broadcast");
  }};
}

NcclSteps all_gather(const Collective& c, const NcclEnd& end) {
  const bool equal =
      std::ranges::adjacent_find(c.receive_bytes, std::not_equal_to<>()) == c.receive_bytes.end();
  if (equal) {
    return {[&c, &end] {
      check_nccl(end,
                 end.library->all_gather(c.send.data(), c.receive.data(), c.send.size(), kNcclUInt8, end.comm,
                                         end.stream->handle()),
                 "gather");
    }};
  }
  return {[&c, &end] {
    const std::vector<Run> parts = runs_of(c.receive_bytes);
    std::byte* own = c.receive.data() + parts[static_cast<size_t>(end.rank)].begin;
    if (own != c.send.data()) end.stream->copy(own, c.send.data(), std::ssize(c.send));
    Exchange exchange(end);
    for (int r = 0; r < end.ranks; ++r) {
      const Run& part = parts[static_cast<size_t>(r)];
      if (r == end.rank) continue;
      exchange.send(c.send.data(), std::ssize(c.send), r);
      exchange.receive(c.receive.data() + part.begin, part.bytes, r);
    }
    exchange.end("gather");
  }};
}

NcclSteps all_to_all(const Collective& c, const NcclEnd& end) {
  return {[&c, &end] {
    const std::vector<Run> sent = runs_of(c.send_bytes), received = runs_of(c.receive_bytes);
    const auto own = static_cast<size_t>(end.rank);
    end.stream->copy(c.receive.data() + received[own].begin, c.send.data() + sent[own].begin,
                     sent[own].bytes);
    Exchange exchange(end);
    for (int r = 0; r < end.ranks; ++r) {
      if (r == end.rank) continue;
      const Run &to = sent[static_cast<size_t>(r)], &from = received[static_cast<size_t>(r)];
      exchange.send(c.send.data() + to.begin, to.bytes, r);
      exchange.receive(c.receive.data() + from.begin, from.bytes, r);
    }
    exchange.end("send to all");
  }};
}

/// By NCCL.
NcclSteps native_reduction(const Collective& c, const NcclEnd& end, NcclType type) {
  const auto width = static_cast<size_t>(element_bytes(c.dtype));
  const int op = nccl_op(c.op);
  if (c.kind == Kind::kAllReduce) {
    return {[&c, &end, type, op, width] {
      check_nccl(end,
                 end.library->all_reduce(c.send.data(), c.receive.data(), c.send.size() / width, type, op,
                                         end.comm, end.stream->handle()),
                 "reduce");
    }};
  }
  const bool equal = std::ranges::adjacent_find(c.send_bytes, std::not_equal_to<>()) == c.send_bytes.end();
  if (equal) {
    return {[&c, &end, type, op, width] {
      check_nccl(end,
                 end.library->reduce_scatter(c.send.data(), c.receive.data(), c.receive.size() / width, type,
                                             op, end.comm, end.stream->handle()),
                 "reduce");
    }};
  }
  return {[&c, &end, type, op, width] {
    const std::vector<Run> parts = runs_of(c.send_bytes);
    Exchange exchange(end);
    for (int r = 0; r < end.ranks; ++r) {
      const Run& part = parts[static_cast<size_t>(r)];
      if (part.bytes == 0) continue;
      exchange.note(end.library->reduce(
          c.send.data() + part.begin, r == end.rank ? c.receive.data() : nullptr,
          static_cast<size_t>(part.bytes) / width, type, op, r, end.comm, end.stream->handle()));
    }
    exchange.end("reduce");
  }};
}

/// What the host reduces within a stream.
struct HostReduction {
  DType dtype;
  ReduceOp op;
  std::vector<const std::byte*> from;
  std::byte* to;
  int64_t bytes;
};

void reduce_on_host(void* argument) {
  const auto& job = *static_cast<const HostReduction*>(argument);
  reduce(job.dtype, job.op, job.from, std::span(&job.to, 1), 0, job.bytes);
}

/// In the order of the ranks, by the host, a slot of each rank's share at a time: the share's addends come
/// from all ranks, go to the host, are reduced there and come back; then those of an all-reduce go to all.
class ExactReduction {
 public:
  ExactReduction(const Collective& c, const NcclEnd& end, std::shared_ptr<NcclScratch> scratch)
      : c_(c),
        end_(end),
        scratch_(std::move(scratch)),
        shares_(shares(c, end.ranks)),
        slot_(scratch_slot(c, end.ranks, false)) {
    for (const Run& share : shares_) rounds_ = std::max(rounds_, ceil_div(share.bytes, slot_));
    jobs_.resize(static_cast<size_t>(rounds_));
  }

  int64_t rounds() const { return rounds_; }

  void gather(int64_t round) {
    Exchange exchange(end_);
    for (int r = 0; r < end_.ranks; ++r) {
      if (r == end_.rank) continue;
      const Run theirs = slot(r, round), ours = slot(end_.rank, round);
      exchange.send(c_.send.data() + theirs.begin, theirs.bytes, r);
      exchange.receive(scratch_->on_device.data() + r * slot_, ours.bytes, r);
    }
    exchange.end("exchange addends");
  }

  void compute(int64_t round) {
    const Run ours = slot(end_.rank, round);
    if (ours.bytes == 0) return;
    HostReduction& job = jobs_[static_cast<size_t>(round)];
    job = {c_.dtype, c_.op, {}, host_slot(end_.ranks), ours.bytes};
    for (int r = 0; r < end_.ranks; ++r) {
      const std::byte* given =
          r == end_.rank ? c_.send.data() + ours.begin : scratch_->on_device.data() + r * slot_;
      end_.stream->copy(host_slot(r), given, ours.bytes);
      job.from.push_back(host_slot(r));
    }
    end_.stream->run_on_host(reduce_on_host, &job);
    end_.stream->copy(result(end_.rank, round), job.to, ours.bytes);
  }

  void spread(int64_t round) {
    Exchange exchange(end_);
    for (int r = 0; r < end_.ranks; ++r) {
      if (r == end_.rank) continue;
      exchange.send(result(end_.rank, round), slot(end_.rank, round).bytes, r);
      exchange.receive(result(r, round), slot(r, round).bytes, r);
    }
    exchange.end("exchange sums");
  }

 private:
  Run slot(int rank, int64_t round) const {
    return slot_of(shares_[static_cast<size_t>(rank)], round, slot_);
  }
  std::byte* host_slot(int index) const { return scratch_->on_host.data() + index * slot_; }
  std::byte* result(int rank, int64_t round) const {
    const int64_t before = c_.kind == Kind::kReduceScatter ? shares_[static_cast<size_t>(rank)].begin : 0;
    return c_.receive.data() + slot(rank, round).begin - before;
  }

  const Collective& c_;
  const NcclEnd& end_;
  const std::shared_ptr<NcclScratch> scratch_;
  const std::vector<Run> shares_;
  const int64_t slot_;  // the same on all ranks, whatever the scratch has room for
  int64_t rounds_ = 0;
  std::vector<HostReduction> jobs_;  // their addresses are in the stream
};

NcclSteps exact_reduction(const Collective& c, const NcclEnd& end, std::shared_ptr<NcclScratch> scratch) {
  const auto reduction = std::make_shared<ExactReduction>(c, end, std::move(scratch));
  NcclSteps steps;
  for (int64_t round = 0; round < reduction->rounds(); ++round) {
    steps.push_back([=] { reduction->gather(round); });
    steps.push_back([=] { reduction->compute(round); });
    if (c.kind == Kind::kAllReduce) steps.push_back([=] { reduction->spread(round); });
  }
  return steps;
}

NcclSteps reduction(const Collective& c, const NcclEnd& end, bool any_order,
                    std::shared_ptr<NcclScratch> scratch) {
  if (nccl_reduces(c.dtype, c.op, any_order)) {
    const std::optional<NcclType> type = integer_type(c.dtype);
    return native_reduction(c, end, type ? *type : *float_type(c.dtype));
  }
  if (end.ranks > 1) return exact_reduction(c, end, std::move(scratch));
  return {[&c, &end] {
    if (c.receive.data() != c.send.data())
      end.stream->copy(c.receive.data(), c.send.data(), std::ssize(c.receive));
  }};
}

bool moves_nothing(const Collective& c) { return c.send.empty() && c.receive.empty(); }

}  // namespace

void check_nccl(const NcclEnd& end, int result, std::string_view what) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  const char* last = end.library->last_error(end.comm);
  throw IoError("NCCL cannot {}: {}{}{}", what, end.library->error_text(result),
                last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
}

NcclScratch::NcclScratch(const CudaBackend& backend, int ranks, int64_t slot_bytes)
    : slot(slot_bytes),
      on_device(ranks * slot_bytes, backend.device()),
      on_host(backend, (ranks + 1) * slot_bytes) {}

bool nccl_reduces(DType dtype, ReduceOp, bool any_order) {
  return integer_type(dtype) || (any_order && float_type(dtype));
}

int64_t scratch_slot(const Collective& c, int ranks, bool any_order) {
  if (!is_reduction(c.kind) || ranks == 1 || nccl_reduces(c.dtype, c.op, any_order)) return 0;
  int64_t longest = 0;
  for (const Run& share : shares(c, ranks)) longest = std::max(longest, share.bytes);
  return std::min(longest, kSlotBytes);
}

NcclSteps nccl_steps(const Collective& c, const NcclEnd& end, bool any_order,
                     std::shared_ptr<NcclScratch> scratch) {
  if (moves_nothing(c)) return {};
  switch (c.kind) {
    case Kind::kBroadcast:
      return broadcast(c, end);
    case Kind::kAllGather:
      return all_gather(c, end);
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return reduction(c, end, any_order, std::move(scratch));
    case Kind::kAllToAll:
      return all_to_all(c, end);
    default:
      return {};
  }
}

NcclSteps nccl_transfer_steps(const Collective& c, const NcclEnd& end) {
  if (moves_nothing(c)) return {};
  return {[&c, &end] {
    Exchange exchange(end);
    exchange.send(c.send.data(), std::ssize(c.send), 1);
    exchange.receive(c.receive.data(), std::ssize(c.receive), 0);
    exchange.end(c.kind == Kind::kSend ? "send" : "receive");
  }};
}

}  // namespace spolia
