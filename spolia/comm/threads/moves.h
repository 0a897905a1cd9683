// What an operation comes down to once all its ranks have arrived: bytes from some memory to some other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spolia/base/inline_vector.h"
#include "spolia/comm/backend.h"

namespace spolia {

/// Bytes that land in one place or several: one source copied, or several reduced in their order. A copy may
/// be of several rows, which lie at pitches of their own in each place.
struct Move {
  InlineVector<const std::byte*, 4> from;
  InlineVector<std::byte*, 4> to;
  int64_t bytes = 0;  // of a row
  int64_t rows = 1;
  int64_t from_pitch = 0;
  InlineVector<int64_t, 4> to_pitch;  // empty where there is one row

  int64_t total() const { return bytes * rows; }
};

/// The moves of an operation, from what each place asks for; of one between two: the sender, the receiver.
/// `runs`: where its bytes lie at a place, if they lie in runs (GroupBackend::start_in_runs()). None of the
/// moves is empty, and a single row that would be copied onto itself is left out. Precondition: the places
/// agree.
std::vector<Move> moves_of(std::span<const Collective> asked, std::span<const Runs> runs = {});

/// The moves of an operation, laid end to end and cut into pieces of equal bytes, which any number of threads
/// carry out together.
class Pieces {
 public:
  Pieces() = default;
  Pieces(std::vector<Move> moves, DType dtype, ReduceOp op);

  int64_t count() const { return count_; }
  /// Bytes that are written, all targets together.
  int64_t bytes_written() const { return bytes_written_; }

  enum class Step { kNothingLeft, kDone, kDoneTheLast };
  /// Carries out a piece that no other thread has taken. kDoneTheLast where all pieces are done with it. What
  /// any thread wrote is visible to whoever got kDoneTheLast.
  Step carry_out_one() noexcept;

 private:
  void carry_out(const Move& move, int64_t begin, int64_t end) noexcept;

  std::vector<Move> moves_;
  std::vector<int64_t> begins_;  // of each move
  DType dtype_ = DType::kUInt8;
  ReduceOp op_ = ReduceOp::kSum;
  int64_t bytes_ = 0, bytes_written_ = 0;
  int64_t count_ = 0;
  std::atomic<int64_t> taken_{0};
  std::atomic<int64_t> done_{0};
};

}  // namespace spolia
