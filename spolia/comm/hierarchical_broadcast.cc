#include "spolia/comm/hierarchical_broadcast.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/comm/agree.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using Clock = std::chrono::steady_clock;

/// Where nothing has landed for so long, ranks are late, and waiting for the oldest buffer costs nothing.
constexpr milliseconds kStall{100};
/// Nothing has landed for so long: the core is better left to others.
constexpr std::chrono::microseconds kIdle{50};

int64_t rank_of(const Group& group) { return group.ranks()[static_cast<size_t>(group.place())]; }

/// This rank's coordinate in a dim.
int64_t coordinate_in(const BroadcastDim& dim) {
  if (dim.line.size() == 1) return 0;
  if (dim.line.empty() || dim.group == nullptr) {
    throw InvalidArgumentError("a dim of {} ranks without a group", dim.line.size());
  }
  const std::span<const int64_t> ranks = dim.group->ranks();
  if (!std::ranges::is_permutation(dim.line, ranks)) {
    throw InvalidArgumentError("a dim of the ranks {} with the group {}", list_text(dim.line),
                               list_text(ranks));
  }
  return std::ranges::find(dim.line, rank_of(*dim.group)) - dim.line.begin();
}

}  // namespace

HierarchicalBroadcast::HierarchicalBroadcast(std::vector<BroadcastDim> dims, int64_t max_in_flight)
    : dims_(std::move(dims)), max_in_flight_(max_in_flight) {
  if (max_in_flight < 1) throw InvalidArgumentError("{} buffers in flight", max_in_flight);
  for (const BroadcastDim& dim : dims_) own_.push_back(coordinate_in(dim));
}

void HierarchicalBroadcast::add(const View& buffer, std::span<const int64_t> source) {
  bool inside = source.size() == dims_.size();
  for (size_t d = 0; inside && d < dims_.size(); ++d) {
    inside = source[d] >= 0 && source[d] < std::ssize(dims_[d].line);
  }
  if (!inside) {
    Dims sizes;
    for (const BroadcastDim& dim : dims_) sizes.push_back(std::ssize(dim.line));
    throw InvalidArgumentError("a broadcast from the coordinates {} of a grid of {}", list_text(source),
                               shape_text(sizes));
  }
  if (error_) return;
  relays_.push_back({.buffer = buffer,
                     .source = {source.begin(), source.end()},
                     .next = first_dim(source),
                     .receiving = false,
                     .pending = {}});
  progress();
}

void HierarchicalBroadcast::progress() {
  guarded([&] { advance_all(); });
}

void HierarchicalBroadcast::wait_all() {
  Clock::time_point last_landing = Clock::now();
  while (!relays_.empty()) {
    guarded([&] {
      const Clock::duration idle = Clock::now() - last_landing;
      if (advance_all()) {
        last_landing = Clock::now();
      } else if (idle > kStall) {
        wait_for_oldest();
        last_landing = Clock::now();
      } else if (idle > kIdle) {
        std::this_thread::sleep_for(kIdle);
      } else {
        std::this_thread::yield();
      }
    });
  }
  if (error_) std::rethrow_exception(error_);
}

/// The dim in which this rank receives from the source: no earlier one brings it here. The source itself
/// begins with the first.
size_t HierarchicalBroadcast::first_dim(std::span<const int64_t> source) const {
  for (size_t d = dims_.size(); d-- > 0;) {
    if (own_[d] != source[d]) return d;
  }
  return 0;
}

void HierarchicalBroadcast::meet_next(Relay& relay) {
  const size_t d = relay.next++;
  const auto& [group, line] = dims_[d];
  if (line.size() == 1) return;
  const int64_t coordinate = relay.source[d];
  relay.pending.push_back(
      group->broadcast(relay.buffer, group->place_of(line[static_cast<size_t>(coordinate)])));
  relay.receiving = coordinate != own_[d];
}

/// Meets the buffer in as many dims before `end` as can be; whether something has landed.
bool HierarchicalBroadcast::advance(Relay& relay, size_t end) {
  const bool landed = std::erase_if(relay.pending, [](Pending& pending) { return pending.test(); }) > 0;
  if (relay.pending.empty()) relay.receiving = false;
  // What is sent on is only read: all later dims may go at once.
  while (relay.next < end && !relay.receiving) meet_next(relay);
  return landed;
}

bool HierarchicalBroadcast::advance_all() {
  bool landed = false;
  size_t end = dims_.size();  // those from there on have to meet an older buffer first
  const size_t count = std::min(relays_.size(), static_cast<size_t>(max_in_flight_));
  for (size_t i = 0; i < count; ++i) {
    landed |= advance(relays_[i], end);
    end = std::min(end, relays_[i].next);
  }
  const auto is_over = [&](const Relay& relay) {
    return relay.next == dims_.size() && relay.pending.empty();
  };
  while (!relays_.empty() && is_over(relays_.front())) {
    relays_.pop_front();
    landed = true;
  }
  return landed;
}

/// No other rank waits in vain meanwhile: what the oldest one needs comes before it on every rank, so it does
/// not depend on anything that this rank still has to start. Precondition: there is one, and advance_all()
/// has just been called.
void HierarchicalBroadcast::wait_for_oldest() { relays_.front().pending.front().wait(); }

template <class Step>
void HierarchicalBroadcast::guarded(Step step) {
  try {
    step();
  } catch (...) {
    error_ = std::current_exception();
    fail();
  }
}

void HierarchicalBroadcast::fail() {
  for (const auto& [group, line] : dims_) {
    if (line.size() == 1 || !group->backend().broken().empty()) continue;
    group->backend().break_group(
        fmt::format("rank {} cannot go on with its broadcasts: {}", rank_of(*group), text_of(error_)));
  }
  relays_.clear();
}

}  // namespace spolia
