// What the communication threads of a group tell each other besides its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "spolia/comm/collective.h"

namespace spolia {

/// Operations that the same ranks number together: those of the whole group, or those from one place to
/// another.
struct ChannelName {
  int32_t from = -1, to = -1;
  bool is_all() const { return from < 0; }
  friend auto operator<=>(const ChannelName&, const ChannelName&) = default;
};

// On the lane of the groups, before an operation's bytes:

/// "I have arrived at this operation, and this is what I ask for." Buffers are their sizes alone; bytes that
/// ride (ride.h) come along.
struct Arrival {
  int64_t number = 0;
  Collective collective;
  std::vector<std::byte> riding;
};
/// "All have arrived and agree."
struct Go {
  int64_t number = 0;
  std::vector<std::byte> riding;
};
using GroupMessage = std::variant<Arrival, Go>;

std::vector<std::byte> packed(const GroupMessage& message);
/// CorruptError where it is none.
GroupMessage unpack_group_message(std::span<const std::byte> bytes);
/// Bytes of the longest message in a group of so many.
size_t most_message_bytes(size_t ranks);

// On the lane for control, about a group:

/// "It is broken, and this is why." Where ranks disagreed in an operation: in which.
struct Broken {
  bool is_mismatch = false;
  ChannelName channel;
  int64_t number = 0;
  std::string reason;
};
/// "Where are you?"
struct Question {
  ChannelName channel;
};
/// "So many operations of it I have started, and I will start no more" where it has left.
struct Answer {
  ChannelName channel;
  int64_t started = 0;
  bool has_left = false;
};
struct ControlMessage {
  int64_t group = 0;
  std::variant<Broken, Question, Answer> what;
};

std::vector<std::byte> packed(const ControlMessage& message);
/// CorruptError where it is none.
ControlMessage unpack_control_message(std::span<const std::byte> bytes);

}  // namespace spolia
