#include "spolia/comm/broadcast_batches.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/runs.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

void check_piece(const Group& group, int root, const View& piece) {
  if (root < 0 || root >= group.size()) {
    throw InvalidArgumentError("a broadcast from place {} of a group of {}", root, group.size());
  }
  if (piece.shape.size() != piece.strides.size()) {
    throw InvalidArgumentError("a piece to broadcast with {} dims and {} strides", piece.shape.size(),
                               piece.strides.size());
  }
  if (piece.bytes() == 0 || piece.is_dense()) return;
  if (is_sub_byte(piece.dtype)) {
    throw UnsupportedError(
        "a piece to broadcast of {} elements, which are packed finer than bytes, at strides",
        name_of(piece.dtype));
  }
  for (size_t d = 0; d < piece.shape.size() && group.place() != root; ++d) {
    if (piece.shape[d] > 1 && piece.strides[d] == 0) {
      throw InvalidArgumentError("the elements of a piece to receive lie on each other (stride 0)");
    }
  }
}

void copy_view(const View& to, const View& from) {
  if (to.is_dense() && from.is_dense()) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
  } else {
    copy_strided(to.shape, element_bytes(to.dtype), to.data, to.strides, from.data, from.strides);
  }
}

/// The pieces as they lie in a batch's buffer: dense, one after the other.
template <class Body>
void for_each_packed(std::span<const View> pieces, std::byte* buffer, Body body) {
  for (const View& piece : pieces) {
    body(piece, dense_view(buffer, piece.dtype, piece.shape));
    buffer += piece.bytes();
  }
}

void gather(std::span<const View> pieces, Buffer& buffer) {
  for_each_packed(pieces, buffer.data(),
                  [](const View& piece, const View& packed) { copy_view(packed, piece); });
}

void deal_out(std::span<const View> pieces, Buffer& buffer) {
  for_each_packed(pieces, buffer.data(),
                  [](const View& piece, const View& packed) { copy_view(piece, packed); });
}

/// All elements of the pieces in one dim, from `data` on.
View view_of_all(std::span<const View> pieces, std::byte* data) {
  int64_t elements = 0;  // no more than there are bits of memory
  for (const View& piece : pieces) elements += numel(piece.shape);
  return dense_view(data, pieces[0].dtype, std::span(&elements, 1));
}

/// Where the pieces' bytes are: those that lie in no runs in the buffer, one after the other.
Runs runs_of(std::span<const View> pieces, Buffer& buffer) {
  Runs runs;
  std::byte* packed = buffer.data();
  for (const View& piece : pieces) {
    if (lies_in_runs(piece)) {
      append_runs(piece, runs);
    } else {
      append_runs(dense_view(packed, piece.dtype, piece.shape), runs);
      packed += piece.bytes();
    }
  }
  return runs;
}

}  // namespace

BroadcastBatches::BroadcastBatches(const BatchOptions& options) : options_(options) {
  if (options.batch_bytes < 0 || options.max_in_flight < 1 || options.max_bytes_in_flight < 0) {
    throw InvalidArgumentError("batches of {} bytes, {} broadcasts and {} bytes in flight",
                               options.batch_bytes, options.max_in_flight, options.max_bytes_in_flight);
  }
}

void BroadcastBatches::add(Group& group, int root, const View& piece) {
  check_piece(group, root, piece);
  const int64_t bytes = piece.bytes();
  ++counts_.pieces;
  counts_.bytes += bytes;
  if (bytes == 0) return;
  // Memory of devices is not gathered by the host.
  if (bytes >= options_.batch_bytes || piece.device.kind != DeviceKind::kCpu) {
    return send({&group, root, {piece}, bytes});
  }
  Batch& batch = open_batch(group, root, piece.dtype);
  if (bytes > options_.batch_bytes - batch.bytes) {
    send(std::exchange(batch, {.group = &group, .root = root, .pieces = {}, .bytes = 0}));
  }
  batch.pieces.push_back(piece);
  batch.bytes += bytes;
}

void BroadcastBatches::flush() {
  numbers_.clear();
  for (Batch& batch : std::exchange(open_, {})) send(std::move(batch));
}

void BroadcastBatches::wait_all() {
  flush();
  while (!in_flight_.empty()) finish_oldest();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

BroadcastBatches::Batch& BroadcastBatches::open_batch(Group& group, int root, DType dtype) {
  const auto [at, is_new] = numbers_.try_emplace({&group, root, dtype}, open_.size());
  if (is_new) open_.push_back({.group = &group, .root = root, .pieces = {}, .bytes = 0});
  return open_[at->second];
}

void BroadcastBatches::send(Batch batch) {
  make_room(batch.bytes);
  try {
    in_flight_.push_back(start(batch));
    bytes_in_flight_ += batch.bytes;
  } catch (...) {
    fail(*batch.group);
  }
}

BroadcastBatches::Flight BroadcastBatches::start(const Batch& batch) {
  Flight flight = {.group = batch.group, .root = batch.root, .bytes = batch.bytes, .packed = {}};
  Group& group = *batch.group;
  const std::vector<View>& pieces = batch.pieces;
  if (pieces.size() == 1) {
    flight.pending = group.broadcast(pieces[0], batch.root);
  } else {
    const bool in_runs = group.backend().takes_runs();
    int64_t packed_bytes = 0;
    for (const View& piece : pieces) {
      if (in_runs && lies_in_runs(piece)) continue;
      flight.packed.push_back(piece);
      packed_bytes += piece.bytes();
    }
    if (packed_bytes > 0) flight.buffer = take_buffer(packed_bytes);
    if (group.place() == batch.root) gather(flight.packed, flight.buffer);
    if (in_runs) {
      flight.pending = group.broadcast(runs_of(pieces, flight.buffer), pieces[0].dtype, batch.root);
    } else {
      flight.pending = group.broadcast(view_of_all(pieces, flight.buffer.data()), batch.root);
    }
    counts_.batched += std::ssize(pieces);
  }
  ++counts_.broadcasts;
  return flight;
}

void BroadcastBatches::make_room(int64_t bytes) {
  const auto fits = [&] {
    return in_flight_.empty() || (std::ssize(in_flight_) < options_.max_in_flight &&
                                  bytes <= options_.max_bytes_in_flight - bytes_in_flight_);
  };
  while (!fits()) finish_oldest();
}

void BroadcastBatches::finish_oldest() {
  Flight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  bytes_in_flight_ -= flight.bytes;
  Group& group = *flight.group;
  try {
    flight.pending.wait();
  } catch (...) {
    fail(group);
    lost_.push_back(std::move(flight.buffer));
    return;
  }
  if (flight.buffer.size() == 0) return;
  if (group.place() != flight.root) deal_out(flight.packed, flight.buffer);
  give_back(std::move(flight.buffer));
}

/// Keeps the error that is being handled, and sees to it that nobody waits for this rank in the group.
void BroadcastBatches::fail(Group& group) {
  const std::exception_ptr error = std::current_exception();
  if (!error_) error_ = error;
  if (!group.backend().broken().empty()) return;
  group.backend().break_group(fmt::format("rank {} cannot go on with its broadcasts: {}",
                                          group.ranks()[static_cast<size_t>(group.place())], text_of(error)));
}

/// Of a few sizes, so that one fits the next batch too.
Buffer BroadcastBatches::take_buffer(int64_t bytes) {
  const auto fits = [&](const Buffer& buffer) { return buffer.size() >= bytes; };
  const auto at = std::ranges::find_if(free_, fits);
  if (at != free_.end()) {
    Buffer buffer = std::move(*at);
    free_.erase(at);
    return buffer;
  }
  if (!free_.empty()) free_.erase(free_.begin());  // so that there are never more than may be in flight
  const auto rounded = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  return Buffer(std::min(rounded, options_.batch_bytes));
}

void BroadcastBatches::give_back(Buffer buffer) {
  const auto smaller = [](const Buffer& a, const Buffer& b) { return a.size() < b.size(); };
  free_.insert(std::ranges::upper_bound(free_, buffer, smaller), std::move(buffer));
}

}  // namespace spolia
