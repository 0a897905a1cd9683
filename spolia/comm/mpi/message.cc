#include "spolia/comm/mpi/message.h"

#include <cstring>
#include <type_traits>

#include "spolia/base/error.h"
#include "spolia/comm/mpi/ride.h"

namespace spolia {
namespace {

constexpr size_t kFixedBytes = 128;  // more than all numbers of an arrival take

class Packer {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  Packer& operator<<(const T& value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
    return *this;
  }
  Packer& operator<<(const std::vector<int64_t>& values) {
    *this << static_cast<uint64_t>(values.size());
    for (int64_t value : values) *this << value;
    return *this;
  }
  Packer& operator<<(const std::string& text) {
    *this << static_cast<uint64_t>(text.size());
    for (char c : text) *this << c;
    return *this;
  }
  Packer& operator<<(const std::vector<std::byte>& bytes) {
    *this << static_cast<uint64_t>(bytes.size());
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
    requires std::is_trivially_copyable_v<T>
  Unpacker& operator>>(T& value) {
    if (bytes_.size() < sizeof value) fail();
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return *this;
  }
  Unpacker& operator>>(bool& value) {
    uint8_t byte = 0;
    *this >> byte;
    if (byte > 1) fail();
    value = byte != 0;
    return *this;
  }
  Unpacker& operator>>(std::vector<int64_t>& values) {
    values.resize(count(sizeof(int64_t)));
    for (int64_t& value : values) *this >> value;
    return *this;
  }
  Unpacker& operator>>(std::string& text) {
    text.resize(count(1));
    for (char& c : text) *this >> c;
    return *this;
  }
  Unpacker& operator>>(std::vector<std::byte>& bytes) {
    const auto run = bytes_.first(count(1));
    bytes.assign(run.begin(), run.end());
    bytes_ = bytes_.subspan(run.size());
    return *this;
  }
  /// An enumeration's value, up to `last`.
  template <class E>
  E take_enum(E last) {
    std::underlying_type_t<E> value;
    *this >> value;
    if (value > static_cast<std::underlying_type_t<E>>(last)) fail();
    return static_cast<E>(value);
  }
  [[noreturn]] static void fail() {
    throw CorruptError("a message between ranks is damaged, or of another version of Spolia");
  }

 private:
  size_t count(size_t width) {
    uint64_t number = 0;
    *this >> number;
    if (number > bytes_.size() / width) fail();
    return static_cast<size_t>(number);
  }

  std::span<const std::byte> bytes_;
};

enum class Tag : uint8_t { kArrival, kGo, kBroken, kQuestion, kAnswer };

/// A buffer of which only the size is known.
template <class Span>
Span sized(int64_t bytes) {
  if (bytes < 0) Unpacker::fail();
  return Span(static_cast<typename Span::pointer>(nullptr), static_cast<size_t>(bytes));
}

Collective unpack_collective(Unpacker& in) {
  Collective c;
  c.kind = in.take_enum(CollectiveKind::kReceive);
  c.dtype = in.take_enum(static_cast<DType>(kDTypeCount - 1));
  c.op = in.take_enum(ReduceOp::kMax);
  int64_t send = 0, receive = 0;
  c.device.kind = in.take_enum(DeviceKind::kCuda);
  in >> c.device.index >> c.peer >> send >> receive >> c.send_bytes >> c.receive_bytes;
  c.send = sized<std::span<const std::byte>>(send);
  c.receive = sized<std::span<std::byte>>(receive);
  return c;
}

}  // namespace

std::vector<std::byte> packed(const GroupMessage& message) {
  Packer out;
  if (const Go* go = std::get_if<Go>(&message)) {
    out << Tag::kGo << go->number << go->riding;
    return out.take();
  }
  const Arrival& arrival = std::get<Arrival>(message);
  const Collective& c = arrival.collective;
  out << Tag::kArrival << arrival.number << c.kind << c.dtype << c.op << c.device.kind << c.device.index
      << c.peer << int64_t{std::ssize(c.send)} << int64_t{std::ssize(c.receive)} << c.send_bytes
      << c.receive_bytes << arrival.riding;
  return out.take();
}

GroupMessage unpack_group_message(std::span<const std::byte> bytes) {
  Unpacker in(bytes);
  int64_t number = 0;
  const Tag tag = in.take_enum(Tag::kGo);
  in >> number;
  if (tag == Tag::kGo) {
    Go go{.number = number};
    in >> go.riding;
    return go;
  }
  Arrival arrival{.number = number, .collective = unpack_collective(in)};
  in >> arrival.riding;
  return arrival;
}

size_t most_message_bytes(size_t ranks) {
  return kFixedBytes + 2 * sizeof(int64_t) * ranks + static_cast<size_t>(kMostRiding);
}

std::vector<std::byte> packed(const ControlMessage& message) {
  Packer out;
  if (const Broken* broken = std::get_if<Broken>(&message.what)) {
    out << Tag::kBroken << message.group << broken->is_mismatch << broken->channel << broken->number
        << broken->reason;
  } else if (const Question* question = std::get_if<Question>(&message.what)) {
    out << Tag::kQuestion << message.group << question->channel;
  } else {
    const Answer& answer = std::get<Answer>(message.what);
    out << Tag::kAnswer << message.group << answer.channel << answer.started << answer.has_left;
  }
  return out.take();
}

ControlMessage unpack_control_message(std::span<const std::byte> bytes) {
  Unpacker in(bytes);
  ControlMessage message;
  const Tag tag = in.take_enum(Tag::kAnswer);
  in >> message.group;
  if (tag == Tag::kBroken) {
    Broken broken;
    in >> broken.is_mismatch >> broken.channel >> broken.number >> broken.reason;
    message.what = std::move(broken);
  } else if (tag == Tag::kQuestion) {
    Question question;
    in >> question.channel;
    message.what = question;
  } else if (tag == Tag::kAnswer) {
    Answer answer;
    in >> answer.channel >> answer.started >> answer.has_left;
    message.what = answer;
  } else {
    Unpacker::fail();
  }
  return message;
}

}  // namespace spolia
