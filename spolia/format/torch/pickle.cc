#include "spolia/format/torch/pickle.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/pickle_opcodes.h"
#include "spolia/format/torch/pickle_text.h"

namespace spolia::pickle {
namespace {

constexpr int64_t kHighestProtocol = 5;
constexpr size_t kLongestInteger = 512;       // bytes
constexpr size_t kLongestIntegerText = 1235;  // digits and sign of as many bytes

// What Python would make of calling a global that we know to be harmless.
enum NaturalForm : uint8_t {
  kNoForm,
  kDictForm,
  kDefaultDictForm,
  kListForm,
  kTupleForm,
  kSetForm,
  kBytesForm,
  kEncodeForm,
  kSizeForm,
  kGetAttrForm,
  kReconstructorForm,
};

struct KnownGlobal {
  std::string_view module, name;
  NaturalForm form;
};

constexpr KnownGlobal kKnownGlobals[] = {
    {"collections", "OrderedDict", kDictForm},
    {"collections", "defaultdict", kDefaultDictForm},
    {"builtins", "dict", kDictForm},
    {"builtins", "list", kListForm},
    {"builtins", "tuple", kTupleForm},
    {"builtins", "set", kSetForm},
    {"builtins", "frozenset", kSetForm},
    {"builtins", "bytes", kBytesForm},
    {"builtins", "bytearray", kBytesForm},
    {"_codecs", "encode", kEncodeForm},
    {"torch", "Size", kSizeForm},
    {"builtins", "getattr", kGetAttrForm},
    {"copyreg", "_reconstructor", kReconstructorForm},
};

NaturalForm natural_form(std::string_view module, std::string_view name) {
  for (const KnownGlobal& known : kKnownGlobals) {
    if (known.name == name && known.module == module) return known.form;
  }
  return kNoForm;
}

/// The memo, for the entries that the pickle fetches at all: indices are marked first, then those that were
/// have slots. Real indices count up from 0 (or 1), so they are below the pickle's size.
class Memo {
 public:
  explicit Memo(size_t pickle_size) : limit_(pickle_size) {}

  void mark(int64_t index) {
    if (static_cast<uint64_t>(index) >= limit_) throw CorruptError("memo entry {} was never set", index);
    size_t word = static_cast<size_t>(index) / 64;
    if (word >= marks_.size()) marks_.resize(word + 1);
    marks_[word] |= uint64_t{1} << (index % 64);
  }

  void make_slots() {
    size_t slots = 0;
    for (uint64_t word : marks_) {
      first_slots_.push_back(slots);
      slots += static_cast<size_t>(std::popcount(word));
    }
    slots_.resize(slots);
  }

  void put(int64_t index, const Ref& value) {
    size_t word = static_cast<size_t>(index) / 64;
    bool is_marked = word < marks_.size() && (marks_[word] >> (index % 64) & 1) != 0;
    if (is_marked) slots_[slot(index)] = value;
  }

  /// Precondition: the index was marked. nullptr where nothing was put there.
  Ref* get(int64_t index) {
    std::optional<Ref>& value = slots_[slot(index)];
    return value ? &*value : nullptr;
  }

 private:
  /// Precondition: the index was marked.
  size_t slot(int64_t index) const {
    const size_t word = static_cast<size_t>(index) / 64;
    const uint64_t before = marks_[word] & ((uint64_t{1} << (index % 64)) - 1);
    return first_slots_[word] + static_cast<size_t>(std::popcount(before));
  }

  size_t limit_;
  std::vector<uint64_t> marks_;      // a bit an index
  std::vector<size_t> first_slots_;  // for each 64 of them
  std::vector<std::optional<Ref>> slots_;
};

}  // namespace

class Machine {
 public:
  Machine(Heap& heap, std::span<const std::byte> bytes, Hooks* hooks)
      : heap_(heap),
        hooks_(hooks),
        decoder_(bytes),
        bytes_(bytes),
        memo_(bytes.size()),
        copies_left_(bytes.size()),
        empty_tuple_(heap.tuple({})) {}

  Result run();
  size_t offset() const { return decoder_.offset(); }

 private:
  void mark_fetched();
  // Inline, since a call for each opcode would be felt.
  [[gnu::always_inline]] inline void step(const Instruction& instruction);

  // The stack. What lies below the last mark cannot be popped.
  void push(Ref&& value) { stack_.push_back(std::move(value)); }
  void push(const Ref& value) { stack_.push_back(value); }
  size_t fence() const { return marks_.empty() ? 0 : marks_.back(); }
  void need(size_t count) const;
  Ref& top();
  Ref pop();
  Ref pop(Kind kind);
  size_t pop_mark();
  void drop(size_t from) { stack_.erase(stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end()); }
  void move_to(std::vector<Ref>& items, size_t from);
  void push_node(Kind kind, size_t from);
  Ref pop_tuple(size_t from);
  Ref& container_below(size_t from);
  void check_pairs(size_t from) const;

  void push_number(const Instruction& instruction);
  void push_text(const Instruction& instruction);
  void push_long(std::string_view bytes);
  void push_decimal(std::string_view text);
  void push_global(std::string_view module, std::string_view name);
  void push_object(Ref&& callable, Ref&& args, bool by_new);
  void push_persistent(Ref id);
  void new_object_with_keywords();

  void get(int64_t index);
  void append(size_t from);
  void add_items(size_t from);
  void set_items(size_t from);
  void build();

  std::optional<Ref> call_natural(const GlobalName& callable, const Ref& args);
  std::optional<Ref> copy_of(Kind kind, std::span<const Ref> args);
  std::optional<Ref> dict_of(std::span<const Ref> args);
  std::optional<Ref> plain_bytes(std::span<const Ref> args);
  std::optional<Ref> encoded(std::span<const Ref> args);
  std::optional<Ref> attribute(std::span<const Ref> args);
  void pay_for_copies(size_t count);

  Heap& heap_;
  Hooks* hooks_;
  Decoder decoder_;
  std::span<const std::byte> bytes_;
  Memo memo_;
  std::vector<Ref> stack_;
  std::vector<size_t> marks_;  // the stack's size when each was set
  int64_t memoized_ = 0;
  size_t copies_left_;
  Ref empty_tuple_;
};

namespace {

/// What object.__reduce__ writes in protocols 0 and 1 for `cls.__new__(cls)`.
bool is_plain_reconstruction(std::span<const Ref> args) {
  return args.size() == 3 && args[1].is_global("builtins", "object") && args[2].is_none();
}

}  // namespace

void Machine::mark_fetched() {
  while (true) {
    const Instruction& instruction = decoder_.next_fetch();
    if (instruction.op == Op::kStop) return;
    memo_.mark(instruction.number);
  }
}

void Machine::step(const Instruction& instruction) {
  switch (instruction.op) {
    case Op::kProto:
      if (instruction.number > kHighestProtocol) {
        throw UnsupportedError("pickle protocol {} is newer than {}", instruction.number, kHighestProtocol);
      }
      break;
    case Op::kFrame:  // a hint for buffered reading
      break;

    case Op::kMark:
      marks_.push_back(stack_.size());
      break;
    case Op::kPop:
      if (!marks_.empty() && marks_.back() == stack_.size()) {
        marks_.pop_back();
      } else {
        pop();
      }
      break;
    case Op::kPopMark:
      drop(pop_mark());
      break;
    case Op::kDup:
      push(Ref(top()));
      break;

    case Op::kGet:
    case Op::kBinGet:
    case Op::kLongBinGet:
      get(instruction.number);
      break;
    case Op::kPut:
    case Op::kBinPut:
    case Op::kLongBinPut:
      memo_.put(instruction.number, top());
      ++memoized_;
      break;
    case Op::kMemoize:
      memo_.put(memoized_++, top());
      break;

    case Op::kNone:
      push(Ref());
      break;
    case Op::kNewTrue:
      push(Ref::boolean(true));
      break;
    case Op::kNewFalse:
      push(Ref::boolean(false));
      break;
    case Op::kBinInt:
    case Op::kBinInt1:
    case Op::kBinInt2:
      push(Ref(Kind::kInt, 0, instruction.number));
      break;
    case Op::kBinFloat:
      push(Ref::floating(std::bit_cast<double>(instruction.number)));
      break;
    case Op::kInt:
    case Op::kLong:
    case Op::kFloat:
      push_number(instruction);
      break;
    case Op::kLong1:
    case Op::kLong4:
      push_long(instruction.text);
      break;

    case Op::kBinString:
    case Op::kShortBinString:
    case Op::kShortBinUnicode:
    case Op::kBinUnicode:
    case Op::kBinUnicode8:
      push(Ref::string(instruction.text));
      break;
    case Op::kShortBinBytes:
    case Op::kBinBytes:
    case Op::kBinBytes8:
    case Op::kByteArray8:
      push(Ref::bytes(instruction.text));
      break;
    case Op::kString:
    case Op::kUnicode:
      push_text(instruction);
      break;

    case Op::kEmptyTuple:
      push(empty_tuple_);  // tuples do not change, so one is enough
      break;
    case Op::kTuple1:
      need(1);
      push_node(Kind::kTuple, stack_.size() - 1);
      break;
    case Op::kTuple2:
      need(2);
      push_node(Kind::kTuple, stack_.size() - 2);
      break;
    case Op::kTuple3:
      need(3);
      push_node(Kind::kTuple, stack_.size() - 3);
      break;
    case Op::kTuple:
      push_node(Kind::kTuple, pop_mark());
      break;
    case Op::kEmptyList:
      push_node(Kind::kList, stack_.size());
      break;
    case Op::kList:
      push_node(Kind::kList, pop_mark());
      break;
    case Op::kEmptySet:
      push_node(Kind::kSet, stack_.size());
      break;
    case Op::kFrozenSet:
      push_node(Kind::kSet, pop_mark());
      break;
    case Op::kEmptyDict:
      push_node(Kind::kDict, stack_.size());
      break;
    case Op::kDict: {
      size_t from = pop_mark();
      check_pairs(from);
      push_node(Kind::kDict, from);
      break;
    }

    case Op::kAppend:
      need(2);
      append(stack_.size() - 1);
      break;
    case Op::kAppends:
      append(pop_mark());
      break;
    case Op::kAddItems:
      add_items(pop_mark());
      break;
    case Op::kSetItem:
      need(3);
      set_items(stack_.size() - 2);
      break;
    case Op::kSetItems:
      set_items(pop_mark());
      break;

    case Op::kGlobal:
      push_global(instruction.text, instruction.text2);
      break;
    case Op::kStackGlobal: {
      Ref name = pop(Kind::kString);
      Ref module = pop(Kind::kString);
      push_global(module.text(), name.text());
      break;
    }
    case Op::kReduce:
    case Op::kNewObj: {
      Ref args = pop(Kind::kTuple);
      push_object(pop(), std::move(args), instruction.op == Op::kNewObj);
      break;
    }
    case Op::kNewObjEx:
      new_object_with_keywords();
      break;
    case Op::kObj: {
      size_t from = pop_mark();
      if (from == stack_.size()) throw CorruptError("OBJ lacks its class");
      Ref args = pop_tuple(from + 1);
      bool by_new = args.items().empty();
      push_object(pop(), std::move(args), by_new);
      break;
    }
    case Op::kInst: {
      Ref args = pop_tuple(pop_mark());
      push_global(instruction.text, instruction.text2);
      bool by_new = args.items().empty();
      push_object(pop(), std::move(args), by_new);
      break;
    }
    case Op::kBuild:
      build();
      break;
    case Op::kPersId:
      push_persistent(Ref::string(instruction.text));
      break;
    case Op::kBinPersId:
      push_persistent(pop());
      break;

    case Op::kStop:  // ends the run before it gets here
    case Op::kExt1:  // the decoder refuses these
    case Op::kExt2:
    case Op::kExt4:
    case Op::kNextBuffer:
    case Op::kReadonlyBuffer:
      break;
  }
}

Result Machine::run() {
  mark_fetched();
  memo_.make_slots();
  decoder_ = Decoder(bytes_);
  while (true) {
    const Instruction& instruction = decoder_.next();
    if (instruction.op == Op::kStop) return {pop(), decoder_.position()};
    step(instruction);
  }
}

void Machine::need(size_t count) const {
  if (stack_.size() - fence() < count) throw CorruptError("an opcode needs more than the stack holds");
}

Ref& Machine::top() {
  need(1);
  return stack_.back();
}

Ref Machine::pop() {
  Ref value = std::move(top());
  stack_.pop_back();
  return value;
}

Ref Machine::pop(Kind kind) {
  Ref value = pop();
  if (!value.is(kind))
    throw CorruptError("{} stands where {} is needed", name_of(value.kind()), name_of(kind));
  return value;
}

size_t Machine::pop_mark() {
  if (marks_.empty()) throw CorruptError("an opcode needs a mark, and there is none");
  size_t at = marks_.back();
  marks_.pop_back();
  return at;
}

/// Moves what lies above `from` to the end of `items`.
void Machine::move_to(std::vector<Ref>& items, size_t from) {
  if (items.empty()) items.reserve(stack_.size() - from);
  for (size_t i = from; i < stack_.size(); ++i) items.push_back(std::move(stack_[i]));
  drop(from);
}

void Machine::push_node(Kind kind, size_t from) {
  Ref node = heap_.fresh(kind);
  move_to(node.contents(), from);
  push(std::move(node));
}

Ref Machine::pop_tuple(size_t from) {
  push_node(Kind::kTuple, from);
  return pop();
}

/// What the values above `from` are put into.
Ref& Machine::container_below(size_t from) {
  if (from <= fence()) throw CorruptError("items are added to nothing");
  return stack_[from - 1];
}

void Machine::check_pairs(size_t from) const {
  if ((stack_.size() - from) % 2 != 0) throw CorruptError("a dict's key lacks its value");
}

void Machine::push_number(const Instruction& instruction) {
  std::string_view text = instruction.text;
  if (instruction.op == Op::kFloat) {
    std::optional<double> value = parse_float(text);
    if (!value) throw CorruptError("FLOAT without a number");
    push(Ref::floating(*value));
  } else if (instruction.op == Op::kInt && (text == "00" || text == "01")) {
    push(Ref::boolean(text == "01"));
  } else {
    if (text.ends_with('L')) text.remove_suffix(1);
    push_decimal(text);
  }
}

void Machine::push_decimal(std::string_view text) {
  if (std::optional<int64_t> value = parse_integer(text)) {
    push(Ref::integer(*value));
  } else if (text.size() > kLongestIntegerText) {
    throw UnsupportedError("an integer of {} digits", text.size());
  } else if (is_decimal(text)) {
    push(Ref::big_integer(heap_.keep(plain_decimal(text))));
  } else {
    throw CorruptError("an integer without digits");
  }
}

void Machine::push_long(std::string_view bytes) {
  bytes = without_sign_extension(bytes);
  if (bytes.size() <= 8) {
    push(Ref::integer(small_integer(bytes)));
  } else if (bytes.size() <= kLongestInteger) {
    push(Ref::big_integer(heap_.keep(decimal_text(bytes))));
  } else {
    throw UnsupportedError("an integer of {} bytes", bytes.size());
  }
}

void Machine::push_text(const Instruction& instruction) {
  std::optional<std::string> text =
      instruction.op == Op::kString ? string_literal(instruction.text) : raw_unicode(instruction.text);
  if (!text) throw CorruptError("{} holds no text", name_of(instruction.op));
  push(Ref::string(heap_.keep(std::move(*text))));
}

void Machine::push_global(std::string_view module, std::string_view name) {
  Ref ref = heap_.global(module, name);
  GlobalName& global = heap_.intern(module, name);
  if (!global.is_classified) {
    global.is_classified = true;
    global.natural_form = natural_form(global.module, global.name);
    if (hooks_ != nullptr) global.tag = hooks_->recognise(global.module, global.name);
  }
  push(std::move(ref));
}

/// callable(*args), or callable.__new__(callable, *args).
void Machine::push_object(Ref&& callable, Ref&& args, bool by_new) {
  std::optional<Ref> value;
  if (callable.is(Kind::kGlobal)) {
    const GlobalName& global = callable.global();
    if (global.tag != 0) value = hooks_->call(heap_, global, args);
    if (!value && global.natural_form == kReconstructorForm && is_plain_reconstruction(args.items())) {
      return push_object(Ref(args.items()[0]), Ref(empty_tuple_), true);
    }
    if (!value) value = call_natural(global, args);
  }
  push(value ? std::move(*value) : heap_.object(std::move(callable), std::move(args), by_new));
}

void Machine::push_persistent(Ref id) {
  std::optional<Ref> value;
  if (hooks_ != nullptr) value = hooks_->persistent(heap_, id);
  push(value ? std::move(*value) : heap_.object(Ref(), std::move(id)));
}

void Machine::new_object_with_keywords() {
  Ref kwargs = pop(Kind::kDict);
  Ref args = pop(Kind::kTuple);
  Ref callable = pop();
  if (kwargs.items().empty()) return push_object(std::move(callable), std::move(args), true);
  push(heap_.object(std::move(callable), std::move(args), true, std::move(kwargs)));
}

void Machine::get(int64_t index) {
  Ref* value = memo_.get(index);
  if (value == nullptr) throw CorruptError("memo entry {} was never set", index);
  if (value->is(Kind::kObject) && !value->slot(Ref::kReplacement).is_none()) {
    *value = Ref(value->slot(Ref::kReplacement));
  }
  push(*value);
}

void Machine::append(size_t from) {
  Ref& target = container_below(from);
  if (target.is(Kind::kList)) return move_to(target.contents(), from);
  if (!target.is(Kind::kObject)) throw CorruptError("items are appended to {}", name_of(target.kind()));
  Ref& list = target.writable_slot(Ref::kAppended);
  if (list.is_none()) list = heap_.list();
  move_to(list.contents(), from);
}

void Machine::add_items(size_t from) {
  Ref& target = container_below(from);
  if (target.is(Kind::kSet)) return move_to(target.contents(), from);
  if (!target.is(Kind::kObject)) throw CorruptError("members are added to {}", name_of(target.kind()));
  append(from);
}

void Machine::set_items(size_t from) {
  check_pairs(from);
  Ref& target = container_below(from);
  if (target.is(Kind::kDict)) return move_to(target.contents(), from);
  if (!target.is(Kind::kObject)) throw CorruptError("entries are set in {}", name_of(target.kind()));
  Ref& dict = target.writable_slot(Ref::kEntries);
  if (dict.is_none()) dict = heap_.dict();
  move_to(dict.contents(), from);
}

void Machine::build() {
  Ref state = pop();
  Ref& object = top();
  switch (object.kind()) {
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kDict:
    case Kind::kSet:
      return;  // attributes of an instance of OrderedDict, torch.Size, ...
    case Kind::kHandle:
    case Kind::kObject:
      break;
    default:
      throw CorruptError("{} is given a state", name_of(object.kind()));
  }
  bool is_object = object.is(Kind::kObject);
  std::optional<Ref> value;
  if (!is_object || (object.callable().is(Kind::kGlobal) && object.callable().global().tag != 0)) {
    value = hooks_->build(heap_, object, state);
  }
  if (value) {
    bool is_shared = is_object && object.node_->references > 1;  // the memo may give it to others
    if (is_shared) object.writable_slot(Ref::kReplacement) = *value;
    object = std::move(*value);
  } else if (is_object) {
    object.writable_slot(Ref::kState) = std::move(state);
  }
}

std::optional<Ref> Machine::call_natural(const GlobalName& callable, const Ref& args) {
  std::span<const Ref> items = args.items();
  switch (callable.natural_form) {
    case kDictForm:
      return dict_of(items);
    case kDefaultDictForm:
      return dict_of(items.subspan(std::min<size_t>(items.size(), 1)));  // without the factory
    case kListForm:
      return copy_of(Kind::kList, items);
    case kTupleForm:
      return copy_of(Kind::kTuple, items);
    case kSetForm:
      return copy_of(Kind::kSet, items);
    case kBytesForm:
      return plain_bytes(items);
    case kEncodeForm:
      return encoded(items);
    case kSizeForm:
      if (items.size() == 1 && items[0].is(Kind::kTuple)) return items[0];
      return copy_of(Kind::kTuple, items);
    case kGetAttrForm:
      return attribute(items);
    default:
      return std::nullopt;
  }
}

/// A new container with the items of the one that `args` holds, or an empty one.
std::optional<Ref> Machine::copy_of(Kind kind, std::span<const Ref> args) {
  if (args.empty()) return heap_.fresh(kind);
  const Ref& from = args[0];
  if (args.size() != 1 || !(from.is(Kind::kList) || from.is(Kind::kTuple) || from.is(Kind::kSet)))
    return std::nullopt;
  std::span<const Ref> items = from.items();
  pay_for_copies(items.size());
  return heap_.node(kind, {items.begin(), items.end()});
}

/// A new dict from a dict, or from a sequence of pairs.
std::optional<Ref> Machine::dict_of(std::span<const Ref> args) {
  if (args.empty()) return heap_.dict();
  const Ref& from = args[0];
  if (args.size() != 1 || !(from.is(Kind::kList) || from.is(Kind::kTuple) || from.is(Kind::kDict)))
    return std::nullopt;
  pay_for_copies(from.items().size());
  if (from.is(Kind::kDict)) return heap_.dict({from.items().begin(), from.items().end()});
  std::vector<Ref> entries;
  for (const Ref& pair : from.items()) {
    if (!(pair.is(Kind::kTuple) || pair.is(Kind::kList)) || pair.items().size() != 2) return std::nullopt;
    entries.insert(entries.end(), pair.items().begin(), pair.items().end());
  }
  return heap_.dict(std::move(entries));
}

/// bytes() and bytearray(), of bytes or of a string that is given with the encoding latin-1.
std::optional<Ref> Machine::plain_bytes(std::span<const Ref> args) {
  if (args.empty()) return Ref::bytes("");
  if (args.size() == 1 && args[0].is(Kind::kBytes)) return args[0];
  return encoded(args);
}

std::optional<Ref> Machine::encoded(std::span<const Ref> args) {
  if (args.size() != 2 || !args[0].is(Kind::kString) || !args[1].is(Kind::kString)) return std::nullopt;
  if (args[1].text() != "latin1" && args[1].text() != "latin-1") return std::nullopt;
  pay_for_copies(args[0].text().size());
  std::optional<std::string> bytes = latin1(args[0].text());
  if (!bytes) return std::nullopt;
  return Ref::bytes(heap_.keep(std::move(*bytes)));
}

/// A class or enum member inside of a class.
std::optional<Ref> Machine::attribute(std::span<const Ref> args) {
  if (args.size() != 2 || !args[0].is(Kind::kGlobal) || !args[1].is(Kind::kString)) return std::nullopt;
  const GlobalName& outer = args[0].global();
  pay_for_copies(outer.name.size() + args[1].text().size());
  push_global(outer.module, heap_.keep(fmt::format("{}.{}", outer.name, args[1].text())));
  return pop();
}

/// Copies are paid for with the pickle's bytes, so that a few which copy one long thing again and again do
/// not fill the memory.
void Machine::pay_for_copies(size_t count) {
  if (count > copies_left_) throw UnsupportedError("the pickle copies more than it holds");
  copies_left_ -= count;
}

Result read(Heap& heap, std::span<const std::byte> bytes, const Where& where, Hooks* hooks) {
  Machine machine(heap, bytes, hooks);
  try {
    return machine.run();
  } catch (const Error& error) {
    rethrow_with_context(error, fmt::format("{}, byte {} of the pickle", where(), machine.offset()));
  }
}

}  // namespace spolia::pickle
