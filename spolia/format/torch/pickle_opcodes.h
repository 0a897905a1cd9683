// Pickle's opcodes, and a decoder that turns bytes into instructions without running them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace spolia::pickle {

enum class Op : uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kFloat = 'F',
  kInt = 'I',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kLong = 'L',
  kBinInt2 = 'M',
  kNone = 'N',
  kPersId = 'P',
  kBinPersId = 'Q',
  kReduce = 'R',
  kString = 'S',
  kBinString = 'T',
  kShortBinString = 'U',
  kUnicode = 'V',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kDict = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kGet = 'g',
  kBinGet = 'h',
  kInst = 'i',
  kLongBinGet = 'j',
  kList = 'l',
  kEmptyList = ']',
  kObj = 'o',
  kPut = 'p',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinFloat = 'G',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kNewObj = 0x81,
  kExt1 = 0x82,
  kExt2 = 0x83,
  kExt4 = 0x84,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
  kNextBuffer = 0x97,
  kReadonlyBuffer = 0x98,
};

/// Whether the opcode pushes a memo entry.
inline bool fetches(Op op) { return op == Op::kBinGet || op == Op::kLongBinGet || op == Op::kGet; }

/// One opcode with its argument, which is in `number`, `text` or (GLOBAL, INST) both texts.
struct Instruction {
  Op op = Op::kStop;
  int64_t number = 0;     // an integer, a memo index, a float's bits
  std::string_view text;  // counted bytes, or a line without its end
  std::string_view text2;
};

/// Reads instruction after instruction. No count is believed beyond the bytes that are there.
class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes)
      : begin_(reinterpret_cast<const char*>(bytes.data())), at_(begin_), end_(begin_ + bytes.size()) {}

  /// CorruptError where the bytes end early or are no opcode; UnsupportedError, by name, for what Spolia does
  /// not read. The reference holds until the next call.
  const Instruction& next();

  /// The next instruction that fetches from the memo, or STOP.
  const Instruction& next_fetch();

  /// Where the last instruction started, and where the next one does.
  size_t offset() const { return static_cast<size_t>(start_ - begin_); }
  size_t position() const { return static_cast<size_t>(at_ - begin_); }

 private:
  void decode_argument(uint8_t form);
  void decode_longer_argument(uint8_t form);
  const char* take(uint64_t count);
  template <class Integer>
  Integer little_endian();
  std::string_view line();

  const char* begin_;
  const char* at_;
  const char* end_;
  const char* start_ = nullptr;
  Instruction instruction_;
};

/// An opcode's name in CPython's pickletools, "?" for bytes that are none.
std::string_view name_of(Op op);

/// How an opcode's argument is written.
enum ArgumentForm : uint8_t {
  kNoArgument,
  kU1,
  kU2,
  kU4,
  kU8,
  kI4,
  kF8,         // a big-endian double
  kIndexLine,  // a decimal memo index and a newline
  kLine,
  kTwoLines,
  kText1,  // a count of 1, 4 or 8 bytes, then as many bytes
  kText4,
  kText8,
  kTextI4,  // a signed count
  kUnsupported,
  kUnknown,
};
extern const std::array<uint8_t, 256> kArgumentForms;  // by opcode

// Inline, since most of a pickle is opcodes without an argument and memo indices.

inline const Instruction& Decoder::next() {
  start_ = at_;
  uint8_t code = static_cast<uint8_t>(at_ < end_ ? *at_++ : *take(1));
  instruction_.op = static_cast<Op>(code);
  if (uint8_t form = kArgumentForms[code]; form != kNoArgument) decode_argument(form);
  return instruction_;
}

inline const Instruction& Decoder::next_fetch() {
  while (true) {
    while (at_ < end_ && kArgumentForms[static_cast<uint8_t>(*at_)] == kNoArgument && *at_ != '.') ++at_;
    const Instruction& instruction = next();
    if (instruction.op == Op::kStop || fetches(instruction.op)) return instruction;
  }
}

inline void Decoder::decode_argument(uint8_t form) {
  if (form == kU1 && at_ < end_) {
    instruction_.number = static_cast<uint8_t>(*at_++);
  } else if (form == kU4 && end_ - at_ >= 4) {
    uint32_t number;
    std::memcpy(&number, at_, 4);
    instruction_.number = number;
    at_ += 4;
  } else {
    decode_longer_argument(form);
  }
}

}  // namespace spolia::pickle
