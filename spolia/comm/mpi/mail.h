// The transport, with the memory of the messages that nobody waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "spolia/comm/mpi/transport.h"

namespace spolia {

/// A message that is expected, with its memory.
struct Expected {
  int from = 0;  // rank of the world
  Transport::Request request;
  std::vector<std::byte> memory;
};

/// Used by the communication thread. Functions throw an IoError with MPI's own words where MPI refuses.
class Mail {
 public:
  explicit Mail(Transport& transport) : transport_(transport) {}

  Transport& transport() { return transport_; }

  /// Sends, and keeps the message until it has left.
  void send(Transport::Lane lane, int to, int tag, std::vector<std::byte> message);
  Expected expect(int from, int tag, size_t most_bytes);
  /// The message's bytes, where it has come; the memory is then empty.
  std::optional<std::vector<std::byte>> take(Expected& expected);
  /// Asks for its end, and keeps its memory until then.
  void forget(Expected expected);

  /// A message on the control lane, and who sent it.
  std::optional<std::pair<int, std::vector<std::byte>>> next_control();

  Transport::Request start(bool sends, std::byte* data, int64_t bytes, int peer, int tag);
  bool is_done(Transport::Request& request);
  void cancel(Transport::Request& request) { transport_.cancel(&request); }

  /// Lets go of what is done; whether there was any.
  bool sweep();
  /// Whether something that was sent has not left.
  bool is_sending() const { return !leaving_.empty(); }

 private:
  struct Kept {
    Transport::Request request;
    std::vector<std::byte> memory;
  };
  void check(int error);
  bool sweep(std::deque<Kept>& list);

  Transport& transport_;
  std::deque<Kept> leaving_;    // sent
  std::deque<Kept> forgotten_;  // to be received, by nobody
};

}  // namespace spolia
