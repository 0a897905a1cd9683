// Numbers and texts packed into bytes, for what ranks send each other: 64 bits a number, in the order of this
// machine; a text after its length.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "spolia/base/error.h"

namespace spolia {

class Packer {
 public:
  void number(int64_t value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
  }
  void text(std::string_view value) {
    number(std::ssize(value));
    out_ += value;
  }
  /// Their count, then the numbers.
  void numbers(std::span<const int64_t> values) {
    number(std::ssize(values));
    for (int64_t value : values) number(value);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// The reverse. CorruptError where there is less than is asked for. The bytes outlive it.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}

  bool at_end() const { return rest_.empty(); }
  int64_t number() {
    int64_t value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() { return bytes(count()); }
  /// A number of things that follow, each of a byte or more.
  size_t count() {
    const int64_t value = number();
    if (value < 0 || value > std::ssize(rest_)) refuse();
    return static_cast<size_t>(value);
  }
  void end() const {
    if (!at_end()) refuse();
  }

 private:
  [[noreturn]] static void refuse() { throw CorruptError("what a rank sent is not what was to be sent"); }
  std::string_view bytes(size_t length) {
    if (length > rest_.size()) refuse();
    const std::string_view taken = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return taken;
  }

  std::string_view rest_;
};

}  // namespace spolia
