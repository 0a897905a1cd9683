#include "spolia/assemble/pair_batches.h"

#include <algorithm>
#include <utility>

#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

void copy(const View& to, const ConstView& from) {
  copy_strided(to.shape, element_bytes(to.dtype), to.data, to.strides, from.data, from.strides);
}

}  // namespace

void PairBatches::add(Group& group, int peer, bool sends, const View& piece) {
  const int64_t bytes = piece.bytes();
  if (bytes == 0) return;
  if (bytes >= options_.batch_bytes) return start({&group, peer, sends, {piece}, bytes});
  const auto same = [&](const Batch& batch) {
    return batch.group == &group && batch.peer == peer && batch.sends == sends;
  };
  auto batch = std::ranges::find_if(open_, same);
  if (batch == open_.end()) batch = open_.insert(batch, Batch{&group, peer, sends, {}, 0});
  if (bytes > options_.batch_bytes - batch->bytes)
    start(std::exchange(*batch, Batch{&group, peer, sends, {}, 0}));
  batch->pieces.push_back(piece);
  batch->bytes += bytes;
}

void PairBatches::flush() {
  for (Batch& batch : std::exchange(open_, {})) start(std::move(batch));
}

void PairBatches::wait_all() {
  flush();
  while (!in_flight_.empty()) finish_oldest();
}

void PairBatches::start(Batch batch) {
  while (!in_flight_.empty() && (std::ssize(in_flight_) >= options_.max_in_flight ||
                                 bytes_in_flight_ + batch.bytes > options_.max_bytes_in_flight)) {
    finish_oldest();
  }
  Flight flight;
  flight.bytes = batch.bytes;
  View message = batch.pieces.front();
  if (batch.pieces.size() > 1) {
    flight.buffer = Buffer(batch.bytes);
    message = byte_view(flight.buffer.bytes());
    std::byte* packed = flight.buffer.data();
    for (const View& piece : batch.pieces) {
      if (batch.sends) copy(dense_view(packed, piece.dtype, piece.shape), piece);
      packed += piece.bytes();
    }
    if (!batch.sends) flight.received = std::move(batch.pieces);
  }
  flight.pending =
      batch.sends ? batch.group->send(message, batch.peer) : batch.group->receive(message, batch.peer);
  bytes_in_flight_ += flight.bytes;
  in_flight_.push_back(std::move(flight));
}

void PairBatches::finish_oldest() {
  Flight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  bytes_in_flight_ -= flight.bytes;
  flight.pending.wait();
  const std::byte* packed = flight.buffer.data();
  for (const View& piece : flight.received) {
    copy(piece, dense_view(packed, piece.dtype, piece.shape));
    packed += piece.bytes();
  }
}

}  // namespace spolia
