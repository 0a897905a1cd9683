#include "spolia/comm/mpi/message.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

Arrival an_arrival() {
  Arrival arrival{.number = 1'000'000'000'000, .collective = {}};
  Collective& c = arrival.collective;
  c.kind = CollectiveKind::kAllToAll;
  c.dtype = DType::kBFloat16;
  c.op = ReduceOp::kMax;
  c.peer = 3;
  c.send = std::span(static_cast<const std::byte*>(nullptr), size_t{5} << 32);
  c.send_bytes = {1, 2, 3};
  c.receive_bytes = {int64_t{1} << 40, 0, 7};
  arrival.riding = {std::byte{1}, std::byte{2}, std::byte{3}};
  return arrival;
}

std::vector<std::vector<std::byte>> control_messages() {
  return {packed(ControlMessage{7, Broken{true, {1, 2}, 5, "a reason"}}),
          packed(ControlMessage{8, Question{{}}}), packed(ControlMessage{9, Answer{{2, 1}, 11, true}})};
}

TEST(Message, SaysWhatARankAsksFor) {
  const Arrival sent = an_arrival();
  const std::vector<std::byte> bytes = packed(GroupMessage(sent));
  EXPECT_LE(bytes.size(), most_message_bytes(3));
  const Arrival got = std::get<Arrival>(unpack_group_message(bytes));
  EXPECT_EQ(got.number, sent.number);
  const Collective &a = got.collective, &b = sent.collective;
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.op, b.op);
  EXPECT_EQ(a.peer, b.peer);
  EXPECT_EQ(a.send.size(), b.send.size());
  EXPECT_EQ(a.receive.size(), b.receive.size());
  EXPECT_EQ(a.send_bytes, b.send_bytes);
  EXPECT_EQ(a.receive_bytes, b.receive_bytes);
  EXPECT_EQ(got.riding, sent.riding);
  const Go go = std::get<Go>(unpack_group_message(packed(GroupMessage(Go{4, sent.riding}))));
  EXPECT_EQ(go.number, 4);
  EXPECT_EQ(go.riding, sent.riding);
}

TEST(Message, TellsOtherThreadsAboutAGroup) {
  const auto messages = control_messages();
  const ControlMessage first = unpack_control_message(messages[0]);
  EXPECT_EQ(first.group, 7);
  const Broken& broken = std::get<Broken>(first.what);
  EXPECT_TRUE(broken.is_mismatch);
  EXPECT_EQ(broken.channel, (ChannelName{1, 2}));
  EXPECT_EQ(broken.number, 5);
  EXPECT_EQ(broken.reason, "a reason");
  EXPECT_TRUE(std::get<Question>(unpack_control_message(messages[1]).what).channel.is_all());
  const Answer answer = std::get<Answer>(unpack_control_message(messages[2]).what);
  EXPECT_EQ(answer.channel, (ChannelName{2, 1}));
  EXPECT_EQ(answer.started, 11);
  EXPECT_TRUE(answer.has_left);
}

/// Whatever is cut off or changed is an error, or another message; never more memory than it came with.
TEST(Message, SurvivesDamage) {
  auto messages = control_messages();
  messages.push_back(packed(GroupMessage(an_arrival())));
  for (const std::vector<std::byte>& whole : messages) {
    const bool is_control = &whole != &messages.back();
    const auto unpack = [&](std::span<const std::byte> bytes) {
      if (is_control) {
        unpack_control_message(bytes);
      } else {
        unpack_group_message(bytes);
      }
    };
    for (size_t length = 0; length < whole.size(); ++length)
      EXPECT_THROW(unpack(std::span(whole).first(length)), CorruptError) << length;
    for (size_t at = 0; at < whole.size(); ++at) {
      std::vector<std::byte> damaged = whole;
      damaged[at] = std::byte{0xFF};
      try {
        unpack(damaged);
      } catch (const CorruptError&) {
      }
    }
  }
}

}  // namespace
}  // namespace spolia
