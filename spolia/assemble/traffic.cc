#include "spolia/assemble/traffic.h"

#include <algorithm>
#include <utility>

namespace spolia {
namespace {

/// A piece of this many bytes or more goes alone.
constexpr int64_t kMostBatched = int64_t{2} << 20;
/// Operations started and not waited for, and their bytes on this rank: as many as keep all busy. More only
/// drive each other out of the caches.
constexpr size_t kMostInFlight = 64;
constexpr int64_t kMostBytesInFlight = int64_t{32} << 20;

View bytes_at(std::byte* data, int64_t bytes, Device device) {
  const int64_t shape[] = {bytes};
  return dense_view(data, DType::kUInt8, shape, device);
}

Pending start_one(Group& group, CollectiveKind kind, int peer, const View& message) {
  switch (kind) {
    case CollectiveKind::kSend:
      return group.send(message, peer);
    case CollectiveKind::kReceive:
      return group.receive(message, peer);
    default:
      return group.broadcast(message, peer);
  }
}

Pending start_runs(Group& group, CollectiveKind kind, int peer, Runs runs) {
  switch (kind) {
    case CollectiveKind::kSend:
      return group.send(std::move(runs), DType::kUInt8, peer);
    case CollectiveKind::kReceive:
      return group.receive(std::move(runs), DType::kUInt8, peer);
    default:
      return group.broadcast(std::move(runs), DType::kUInt8, peer);
  }
}

}  // namespace

Traffic::Traffic(Buffer memory, ElementCopier& copier, LocalFailure& failure)
    : copier_(copier),
      failure_(failure),
      slot_bytes_(memory.size() / kSlots),
      batch_bytes_(std::min(slot_bytes_, kMostBatched)),
      memory_(std::move(memory)) {}

void Traffic::broadcast(Group& group, int root, const View& piece) {
  add(group, CollectiveKind::kBroadcast, root, piece);
}
void Traffic::send(Group& group, int peer, const View& piece) {
  add(group, CollectiveKind::kSend, peer, piece);
}
void Traffic::receive(Group& group, int peer, const View& piece) {
  add(group, CollectiveKind::kReceive, peer, piece);
}

void Traffic::add(Group& group, CollectiveKind kind, int peer, const View& piece) {
  const int64_t bytes = piece.bytes();
  if (bytes == 0) return;
  Batch fresh{&group, kind, peer, {}, 0};
  if (bytes >= batch_bytes_) {
    fresh.pieces.push_back(piece);
    fresh.bytes = bytes;
    return start(fresh);
  }
  const auto same = [&](const Batch& b) { return b.group == &group && b.kind == kind && b.peer == peer; };
  auto batch = std::ranges::find_if(open_, same);
  if (batch == open_.end()) batch = open_.insert(batch, fresh);
  if (bytes > batch_bytes_ - batch->bytes) start(std::exchange(*batch, std::move(fresh)));
  batch->pieces.push_back(piece);
  batch->bytes += bytes;
}

void Traffic::flush() {
  for (const Batch& batch : std::exchange(open_, {})) start(batch);
}

void Traffic::wait_until(int64_t point) {
  while (landed_ < point) finish_oldest();
}

void Traffic::give_up() noexcept {
  open_.clear();
  while (!in_flight_.empty()) {
    try {
      in_flight_.front().pending.wait();
    } catch (...) {
      // Why is known already.
    }
    in_flight_.pop_front();
    ++landed_;
  }
}

bool Traffic::Batch::goes_direct(const View& piece) const {
  const GroupBackend& backend = group->backend();
  if (!backend.reaches(piece.device)) return false;
  if (backend.takes_runs()) return lies_in_runs(piece);
  return pieces.size() == 1 && piece.is_dense();
}

void Traffic::start(const Batch& batch) {
  Flight flight;
  std::vector<View> packed;
  for (const View& piece : batch.pieces) {
    if (!batch.goes_direct(piece)) packed.push_back(piece);
  }
  while (!in_flight_.empty() &&
         (in_flight_.size() >= kMostInFlight || bytes_in_flight_ + batch.bytes > kMostBytesInFlight)) {
    finish_oldest();
  }
  if (!packed.empty()) flight.slot = take_slot();
  if (batch.sends()) {
    for_each_in_slot(packed, flight.slot, [&](const View& piece, const View& in_slot) {
      failure_.guard([&] { copier_.copy(in_slot, piece); });
    });
  }
  if (batch.group->backend().takes_runs()) {
    Runs runs;
    std::byte* next = flight.slot < 0 ? nullptr : slot(flight.slot);
    for (const View& piece : batch.pieces) {
      if (batch.goes_direct(piece)) {
        append_runs(piece, runs);
      } else {
        append_runs(bytes_at(next, piece.bytes(), {}), runs);
        next += piece.bytes();
      }
    }
    flight.pending = start_runs(*batch.group, batch.kind, batch.peer, std::move(runs));
  } else if (packed.empty()) {
    const View& piece = batch.pieces[0];
    flight.pending =
        start_one(*batch.group, batch.kind, batch.peer, bytes_at(piece.data, piece.bytes(), piece.device));
  } else {
    int64_t bytes = 0;
    for (const View& piece : packed) bytes += piece.bytes();
    flight.pending =
        start_one(*batch.group, batch.kind, batch.peer, bytes_at(slot(flight.slot), bytes, memory_.device()));
  }
  if (!batch.sends()) flight.received = std::move(packed);
  flight.bytes = batch.bytes;
  bytes_in_flight_ += batch.bytes;
  in_flight_.push_back(std::move(flight));
  ++started_;
}

/// The pieces as they lie in a slot: dense, one after the other.
template <class Body>
void Traffic::for_each_in_slot(std::span<const View> pieces, int number, Body body) {
  std::byte* at = pieces.empty() ? nullptr : slot(number);
  for (const View& piece : pieces) {
    body(piece, dense_view(at, piece.dtype, piece.shape, memory_.device()));
    at += piece.bytes();
  }
}

int Traffic::take_slot() {
  while (true) {
    bool* const free = std::ranges::find(used_, false);
    if (free != std::end(used_)) {
      *free = true;
      return static_cast<int>(free - used_);
    }
    finish_oldest();
  }
}

void Traffic::finish_oldest() {
  Flight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  bytes_in_flight_ -= flight.bytes;
  ++landed_;
  flight.pending.wait();
  for_each_in_slot(flight.received, flight.slot, [&](const View& piece, const View& in_slot) {
    failure_.guard([&] { copier_.copy(piece, in_slot); });
  });
  if (flight.slot >= 0) used_[flight.slot] = false;
}

}  // namespace spolia
