// Writes pickles, one opcode after the other (protocol 2, or 4 where asked for).
//
// The writer knows the opcodes and the memo, not the objects: callers say what to push and what to make of
// it, in the order in which Python's machine is to run it. Output is what Python's unpickler accepts in any
// version that knows the protocol.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace spolia::pickle {

/// A memo entry's index, to fetch the value again.
enum class MemoIndex : uint32_t {};

class Writer {
 public:
  enum class Protocol : uint8_t { k2 = 2, k4 = 4 };

  explicit Writer(Protocol protocol = Protocol::k2);

  // Each pushes a value.
  void none() { byte('N'); }
  void boolean(bool value) { byte(value ? '\x88' : '\x89'); }
  void integer(int64_t value);
  /// An integer of any size, in decimal (is_decimal()). InvalidArgumentError for one of 2 GiB or more.
  void big_integer(std::string_view decimal);
  void floating(double value);
  void string(std::string_view utf8);
  /// Bytes. InvalidArgumentError in protocol 2, which has none.
  void bytes(std::string_view value);
  void global(std::string_view module, std::string_view name);
  void empty_tuple() { byte(')'); }
  void empty_list() { byte(']'); }
  void empty_dict() { byte('}'); }
  /// A tuple of integers, as shapes and offsets are.
  void tuple(std::span<const int64_t> values);

  /// Marks where the values for one of the next three start.
  void mark() { byte('('); }
  /// Makes a tuple of the values since the mark.
  void tuple_from_mark() { byte('t'); }
  /// Appends the values since the mark to the list below it.
  void append_from_mark() { byte('e'); }
  /// Sets the keys and values since the mark in the dict below it.
  void set_from_mark() { byte('u'); }

  /// Makes a tuple of the last value, or the last two or three.
  void tuple1() { byte('\x85'); }
  void tuple2() { byte('\x86'); }
  void tuple3() { byte('\x87'); }

  /// Calls the callable below the argument tuple that is on top.
  void reduce() { byte('R'); }
  /// Makes an object of the class below the argument tuple that is on top.
  void new_object() { byte('\x81'); }
  /// The same with a dict of keyword arguments above the tuple. The opcode is of protocol 4; Python's
  /// unpicklers know it whatever protocol a pickle says it has.
  void new_object_with_keywords() { byte('\x92'); }
  /// Gives the object below the state that is on top.
  void build() { byte('b'); }
  /// Makes a persistent id of the value on top.
  void persistent() { byte('Q'); }

  /// Keeps the value on top in the memo; it stays on top.
  MemoIndex put();
  /// Pushes what was kept.
  void get(MemoIndex index);

  /// Ends the pickle with the value on top and gives its bytes, those that take() did not give before. The
  /// writer is empty afterwards.
  std::string finish();

  /// How many bytes are written and were not taken yet.
  size_t size() const { return out_.size(); }
  /// Gives these bytes, so that a long pickle need not lie in memory as a whole.
  std::string take() { return std::exchange(out_, {}); }

 private:
  void byte(char code) { out_ += code; }
  void little_endian(uint64_t value, size_t bytes);
  void long_integer(std::string_view bytes);
  void counted(char short_code, char long_code, char huge_code, std::string_view text);

  Protocol protocol_;
  uint32_t memoized_ = 0;
  std::string out_;
};

}  // namespace spolia::pickle
