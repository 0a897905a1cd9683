#include "spolia/format/torch/pickle_opcodes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/format/torch/pickle_text.h"

namespace spolia::pickle {
namespace {

struct OpInfo {
  Op op;
  ArgumentForm form;
  std::string_view name;
};

constexpr OpInfo kOps[] = {
    {Op::kMark, kNoArgument, "MARK"},
    {Op::kStop, kNoArgument, "STOP"},
    {Op::kPop, kNoArgument, "POP"},
    {Op::kPopMark, kNoArgument, "POP_MARK"},
    {Op::kDup, kNoArgument, "DUP"},
    {Op::kFloat, kLine, "FLOAT"},
    {Op::kInt, kLine, "INT"},
    {Op::kBinInt, kI4, "BININT"},
    {Op::kBinInt1, kU1, "BININT1"},
    {Op::kLong, kLine, "LONG"},
    {Op::kBinInt2, kU2, "BININT2"},
    {Op::kNone, kNoArgument, "NONE"},
    {Op::kPersId, kLine, "PERSID"},
    {Op::kBinPersId, kNoArgument, "BINPERSID"},
    {Op::kReduce, kNoArgument, "REDUCE"},
    {Op::kString, kLine, "STRING"},
    {Op::kBinString, kTextI4, "BINSTRING"},
    {Op::kShortBinString, kText1, "SHORT_BINSTRING"},
    {Op::kUnicode, kLine, "UNICODE"},
    {Op::kBinUnicode, kText4, "BINUNICODE"},
    {Op::kAppend, kNoArgument, "APPEND"},
    {Op::kBuild, kNoArgument, "BUILD"},
    {Op::kGlobal, kTwoLines, "GLOBAL"},
    {Op::kDict, kNoArgument, "DICT"},
    {Op::kEmptyDict, kNoArgument, "EMPTY_DICT"},
    {Op::kAppends, kNoArgument, "APPENDS"},
    {Op::kGet, kIndexLine, "GET"},
    {Op::kBinGet, kU1, "BINGET"},
    {Op::kInst, kTwoLines, "INST"},
    {Op::kLongBinGet, kU4, "LONG_BINGET"},
    {Op::kList, kNoArgument, "LIST"},
    {Op::kEmptyList, kNoArgument, "EMPTY_LIST"},
    {Op::kObj, kNoArgument, "OBJ"},
    {Op::kPut, kIndexLine, "PUT"},
    {Op::kBinPut, kU1, "BINPUT"},
    {Op::kLongBinPut, kU4, "LONG_BINPUT"},
    {Op::kSetItem, kNoArgument, "SETITEM"},
    {Op::kTuple, kNoArgument, "TUPLE"},
    {Op::kEmptyTuple, kNoArgument, "EMPTY_TUPLE"},
    {Op::kSetItems, kNoArgument, "SETITEMS"},
    {Op::kBinFloat, kF8, "BINFLOAT"},
    {Op::kBinBytes, kText4, "BINBYTES"},
    {Op::kShortBinBytes, kText1, "SHORT_BINBYTES"},
    {Op::kProto, kU1, "PROTO"},
    {Op::kNewObj, kNoArgument, "NEWOBJ"},
    {Op::kExt1, kUnsupported, "EXT1"},
    {Op::kExt2, kUnsupported, "EXT2"},
    {Op::kExt4, kUnsupported, "EXT4"},
    {Op::kTuple1, kNoArgument, "TUPLE1"},
    {Op::kTuple2, kNoArgument, "TUPLE2"},
    {Op::kTuple3, kNoArgument, "TUPLE3"},
    {Op::kNewTrue, kNoArgument, "NEWTRUE"},
    {Op::kNewFalse, kNoArgument, "NEWFALSE"},
    {Op::kLong1, kText1, "LONG1"},
    {Op::kLong4, kTextI4, "LONG4"},
    {Op::kShortBinUnicode, kText1, "SHORT_BINUNICODE"},
    {Op::kBinUnicode8, kText8, "BINUNICODE8"},
    {Op::kBinBytes8, kText8, "BINBYTES8"},
    {Op::kEmptySet, kNoArgument, "EMPTY_SET"},
    {Op::kAddItems, kNoArgument, "ADDITEMS"},
    {Op::kFrozenSet, kNoArgument, "FROZENSET"},
    {Op::kNewObjEx, kNoArgument, "NEWOBJ_EX"},
    {Op::kStackGlobal, kNoArgument, "STACK_GLOBAL"},
    {Op::kMemoize, kNoArgument, "MEMOIZE"},
    {Op::kFrame, kU8, "FRAME"},
    {Op::kByteArray8, kText8, "BYTEARRAY8"},
    {Op::kNextBuffer, kUnsupported, "NEXT_BUFFER"},
    {Op::kReadonlyBuffer, kUnsupported, "READONLY_BUFFER"},
};

constexpr std::array<uint8_t, 256> forms() {
  std::array<uint8_t, 256> forms{};
  for (uint8_t& form : forms) form = kUnknown;
  for (const OpInfo& op : kOps) forms[static_cast<uint8_t>(op.op)] = op.form;
  return forms;
}

}  // namespace

constinit const std::array<uint8_t, 256> kArgumentForms = forms();

std::string_view name_of(Op op) {
  const OpInfo* found = std::ranges::find(kOps, op, &OpInfo::op);
  return found == std::end(kOps) ? "?" : found->name;
}

const char* Decoder::take(uint64_t count) {
  uint64_t left = static_cast<uint64_t>(end_ - at_);
  if (count > left) {
    throw CorruptError("the pickle ends early: {} more bytes are announced, {} are there", count, left);
  }
  const char* taken = at_;
  at_ += count;
  return taken;
}

template <class Integer>
Integer Decoder::little_endian() {
  static_assert(std::endian::native == std::endian::little);
  Integer value;
  std::memcpy(&value, take(sizeof value), sizeof value);
  return value;
}

std::string_view Decoder::line() {
  const void* newline = at_ == end_ ? nullptr : std::memchr(at_, '\n', static_cast<size_t>(end_ - at_));
  if (newline == nullptr)
    throw CorruptError("the pickle ends early: {} lacks its newline", name_of(instruction_.op));
  const char* begin = std::exchange(at_, static_cast<const char*>(newline) + 1);
  return {begin, static_cast<size_t>(at_ - begin - 1)};
}

void Decoder::decode_longer_argument(uint8_t form) {
  auto text = [&](uint64_t count) { instruction_.text = {take(count), static_cast<size_t>(count)}; };
  switch (form) {
    case kU1:
      instruction_.number = little_endian<uint8_t>();
      break;
    case kU2:
      instruction_.number = little_endian<uint16_t>();
      break;
    case kU4:
      instruction_.number = little_endian<uint32_t>();
      break;
    case kU8:
      instruction_.number = little_endian<int64_t>();
      break;
    case kI4:
      instruction_.number = little_endian<int32_t>();
      break;
    case kF8:
      instruction_.number = static_cast<int64_t>(__builtin_bswap64(little_endian<uint64_t>()));
      break;
    case kIndexLine: {
      std::optional<int64_t> index = parse_integer(line());
      if (!index || *index < 0) throw CorruptError("{} lacks a memo index", name_of(instruction_.op));
      instruction_.number = *index;
      break;
    }
    case kLine:
      instruction_.text = line();
      break;
    case kTwoLines:
      instruction_.text = line();
      instruction_.text2 = line();
      break;
    case kText1:
      text(little_endian<uint8_t>());
      break;
    case kText4:
      text(little_endian<uint32_t>());
      break;
    case kText8:
      text(little_endian<uint64_t>());
      break;
    case kTextI4: {
      int32_t count = little_endian<int32_t>();
      if (count < 0) throw CorruptError("{} has a count of {}", name_of(instruction_.op), count);
      text(static_cast<uint64_t>(count));
      break;
    }
    case kUnsupported:
      throw UnsupportedError("the opcode {} needs what lies outside of the pickle", name_of(instruction_.op));
    default:
      throw CorruptError("0x{:02x} is no pickle opcode", static_cast<uint8_t>(instruction_.op));
  }
}

}  // namespace spolia::pickle
