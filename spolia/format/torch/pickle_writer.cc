#include "spolia/format/torch/pickle_writer.h"

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/format/torch/pickle_text.h"

namespace spolia::pickle {

Writer::Writer(Protocol protocol) : protocol_(protocol) {
  byte('\x80');
  byte(static_cast<char>(protocol));
}

void Writer::little_endian(uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) byte(static_cast<char>(value >> (8 * i)));
}

void Writer::integer(int64_t value) {
  if (std::in_range<uint8_t>(value)) {
    byte('K');
    little_endian(static_cast<uint64_t>(value), 1);
  } else if (std::in_range<uint16_t>(value)) {
    byte('M');
    little_endian(static_cast<uint64_t>(value), 2);
  } else if (std::in_range<int32_t>(value)) {
    byte('J');
    little_endian(static_cast<uint64_t>(value), 4);
  } else {
    std::array<char, 8> bytes;
    std::memcpy(bytes.data(), &value, bytes.size());
    long_integer(without_sign_extension({bytes.data(), bytes.size()}));
  }
}

void Writer::big_integer(std::string_view decimal) { long_integer(binary_integer(decimal)); }

void Writer::long_integer(std::string_view bytes) {
  if (std::in_range<uint8_t>(bytes.size())) {
    byte('\x8a');
    little_endian(bytes.size(), 1);
  } else {
    if (!std::in_range<int32_t>(bytes.size())) throw InvalidArgumentError("an integer of 2 GiB or more");
    byte('\x8b');
    little_endian(bytes.size(), 4);
  }
  out_ += bytes;
}

void Writer::floating(double value) {
  byte('G');
  little_endian(__builtin_bswap64(std::bit_cast<uint64_t>(value)), 8);
}

/// Text after the opcode that takes a count of 1, 4 or 8 bytes; '\0' for one that there is not.
void Writer::counted(char short_code, char long_code, char huge_code, std::string_view text) {
  if (short_code != '\0' && std::in_range<uint8_t>(text.size())) {
    byte(short_code);
    little_endian(text.size(), 1);
  } else if (std::in_range<uint32_t>(text.size())) {
    byte(long_code);
    little_endian(text.size(), 4);
  } else {
    if (huge_code == '\0') throw InvalidArgumentError("pickle protocol 2 holds no text of 4 GiB or more");
    byte(huge_code);
    little_endian(text.size(), 8);
  }
  out_ += text;
}

void Writer::string(std::string_view utf8) {
  if (protocol_ == Protocol::k2) {
    counted('\0', 'X', '\0', utf8);
  } else {
    counted('\x8c', 'X', '\x8d', utf8);
  }
}

void Writer::bytes(std::string_view value) {
  if (protocol_ == Protocol::k2) throw InvalidArgumentError("pickle protocol 2 has no bytes");
  counted('C', 'B', '\x8e', value);
}

void Writer::global(std::string_view module, std::string_view name) {
  byte('c');
  out_ += module;
  byte('\n');
  out_ += name;
  byte('\n');
}

void Writer::tuple(std::span<const int64_t> values) {
  if (values.empty()) return empty_tuple();
  if (values.size() > 3) mark();
  for (int64_t value : values) integer(value);
  if (values.size() > 3) return tuple_from_mark();
  byte(static_cast<char>(0x84 + values.size()));  // TUPLE1, TUPLE2, TUPLE3
}

MemoIndex Writer::put() {
  uint32_t index = memoized_++;
  if (std::in_range<uint8_t>(index)) {
    byte('q');
    little_endian(index, 1);
  } else {
    byte('r');
    little_endian(index, 4);
  }
  return MemoIndex{index};
}

void Writer::get(MemoIndex index) {
  uint32_t number = static_cast<uint32_t>(index);
  if (std::in_range<uint8_t>(number)) {
    byte('h');
    little_endian(number, 1);
  } else {
    byte('j');
    little_endian(number, 4);
  }
}

std::string Writer::finish() {
  byte('.');
  std::string done = std::exchange(out_, {});
  *this = Writer(protocol_);
  return done;
}

}  // namespace spolia::pickle
