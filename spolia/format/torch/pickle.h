// An allow-list pickle machine: it reads Python's pickles (protocols 0 to 5) and executes nothing.
//
// A pickle is a program for a small stack machine. Here its plain values become values; whatever it would
// call, construct or look up becomes an inert object that records what was asked for. A caller who knows a
// class gives Hooks, which may put a value of their own in an object's place.
//
// Cost: one pass marks the memo entries that are fetched at all, a second one runs the program and keeps only
// those alive; what the program drops is freed at once. Memory is linear in the pickle (at most about 100
// bytes for each byte of a hostile one), whatever counts and indices it claims. Nothing recurses.
//
// Source of the format: CPython's Lib/pickletools.py, which documents every opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spolia::pickle {

enum class Kind : uint8_t {
  // These lie in the reference itself.
  kNone,
  kBool,
  kInt,  // fits in 64 bits
  kFloat,
  kString,  // UTF-8 as the file has it, not validated
  kBytes,   // bytes and bytearray
  kBigInt,  // beyond 64 bits, as decimal text
  kGlobal,  // a class, a function, torch.float32
  kHandle,  // whatever a hook put there
  // These are nodes with identity: shared by those who refer to them, and seen by all when changed.
  kTuple,
  kList,
  kDict,
  kSet,
  kObject,
};

/// "a string", "a tuple": for messages.
std::string_view name_of(Kind kind);

/// A named global, one for each distinct name of a heap. Python 2's module names are given as Python 3's
/// (__builtin__ is builtins).
struct GlobalName {
  std::string_view module;
  std::string_view name;
  uint32_t tag = 0;          // what Hooks::recognise() said; 0 for a name it does not know
  uint8_t natural_form = 0;  // the machine's own
  bool is_classified = false;

  bool is(std::string_view m, std::string_view n) const { return name == n && module == m; }
};

class Heap;
struct Node;

/// A value of the machine: 16 bytes, cheap to copy. Nodes are counted, by one thread at a time.
///
/// Must not outlive its heap.
class Ref {
 public:
  Ref() : kind_(Kind::kNone), length_(0), integer_(0) {}
  static Ref boolean(bool value);
  static Ref integer(int64_t value);
  static Ref floating(double value);
  /// The text is not copied: it must outlive the reference (Heap::keep() sees to that). Below 4 GiB.
  static Ref string(std::string_view text) { return text_of(Kind::kString, text); }
  static Ref bytes(std::string_view text) { return text_of(Kind::kBytes, text); }
  static Ref big_integer(std::string_view decimal) { return text_of(Kind::kBigInt, decimal); }
  /// A hook's own value: a tag and a number that mean what the hook says.
  static Ref handle(uint32_t tag, int64_t value);

  inline Ref(const Ref& other) noexcept;
  inline Ref(Ref&& other) noexcept;
  inline Ref& operator=(const Ref& other) noexcept;
  inline Ref& operator=(Ref&& other) noexcept;
  inline ~Ref();

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_handle(uint32_t tag) const { return kind_ == Kind::kHandle && length_ == tag; }
  bool is_global(std::string_view module, std::string_view name) const {
    return kind_ == Kind::kGlobal && global_->is(module, name);
  }
  bool is_node() const { return kind_ >= Kind::kTuple; }

  // Each has a precondition on kind().
  bool as_bool() const { return integer_ != 0; }
  int64_t as_int() const { return integer_; }
  double as_float() const { return number_; }
  std::string_view text() const { return {text_, length_}; }  // kString, kBytes, kBigInt
  const GlobalName& global() const { return *global_; }
  uint32_t handle_tag() const { return length_; }
  int64_t handle_value() const { return integer_; }

  /// The items of a tuple, list or set. A dict's, as key, value, key, value, ... in the file's order: a key
  /// that was set twice is there twice. Precondition: is_node(), but not kObject.
  inline std::span<const Ref> items() const;
  /// An attribute: the value of a dict's text key, the last one set. nullptr where it is missing, where this
  /// is no dict, or where the dict is larger than an object's attributes ever are, for it is searched from
  /// end to end.
  const Ref* find(std::string_view key) const;

  // An object: what the pickle asked for instead of what that would have made. Precondition: kObject.
  /// Whether __new__ of the callable, a class, would be called, and not the callable itself.
  bool is_made_by_new() const { return length_ == kMadeByNew; }
  /// What would be called, mostly a global. None for a persistent id.
  const Ref& callable() const { return slot(kCallable); }
  /// What it would be called with: a tuple. For a persistent id the id itself.
  const Ref& args() const { return slot(kArgs); }
  /// Keyword arguments (NEWOBJ_EX): a dict, or None.
  const Ref& kwargs() const { return slot(kKwargs); }
  /// What BUILD set, or None.
  const Ref& state() const { return slot(kState); }
  /// A list of what APPEND(S) and ADDITEMS added, or None.
  const Ref& appended() const { return slot(kAppended); }
  /// A dict of what SETITEM(S) set, or None.
  const Ref& entries() const { return slot(kEntries); }

  /// The node's identity, for walkers that look for cycles. Precondition: is_node().
  const Node* node() const { return node_; }

 private:
  friend class Heap;
  friend class Machine;
  static constexpr uint32_t kMadeByNew = 1;
  // Most objects have the first ones alone.
  enum Slot : size_t { kCallable, kArgs, kState, kKwargs, kAppended, kEntries, kReplacement };

  Ref(Kind kind, uint32_t length, int64_t value) : kind_(kind), length_(length), integer_(value) {}
  static Ref text_of(Kind kind, std::string_view text);
  inline const Ref& slot(Slot slot) const;
  Ref& writable_slot(Slot slot) const;
  static const Ref& none();
  inline std::vector<Ref>& contents() const;

  Kind kind_;
  uint32_t length_;  // a text's length, a handle's tag, kMadeByNew of an object
  union {
    int64_t integer_;
    double number_;
    const char* text_;
    const GlobalName* global_;
    Node* node_;
  };
};
static_assert(sizeof(Ref) == 16);

/// What a counted reference points to. An object's items are its slots.
struct Node {
  Heap* heap = nullptr;
  Node* next = nullptr;  // in the free list, or among those about to be freed
  uint64_t references = 0;
  std::vector<Ref> items;
};

/// Where nodes, global names and decoded texts live. Declare it before whatever holds references; the bytes
/// that are read must outlive it.
class Heap {
 public:
  Heap() = default;
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  Ref tuple(std::vector<Ref> items) { return node(Kind::kTuple, std::move(items)); }
  Ref list(std::vector<Ref> items = {}) { return node(Kind::kList, std::move(items)); }
  /// `items`: key, value, key, value, ...
  Ref dict(std::vector<Ref> items = {}) { return node(Kind::kDict, std::move(items)); }
  Ref set(std::vector<Ref> items = {}) { return node(Kind::kSet, std::move(items)); }
  Ref object(Ref callable, Ref args, bool is_made_by_new = false, Ref kwargs = {});
  Ref global(std::string_view module, std::string_view name);

  /// A copy of `text` that lives as long as the heap.
  std::string_view keep(std::string text);

 private:
  friend class Ref;
  friend class Machine;

  Ref node(Kind kind, std::vector<Ref> items);
  Ref fresh(Kind kind);  // a node without items
  void release(Node* node) noexcept;
  GlobalName& intern(std::string_view module, std::string_view name);

  std::deque<Node> nodes_;
  Node* free_ = nullptr;  // nodes to use again, with the capacity they had
  std::deque<std::string> texts_;
  std::map<std::pair<std::string_view, std::string_view>, GlobalName> globals_;
};

/// Lets a caller put values of its own in the place of objects. Errors that a function throws get the
/// pickle's description and the offset put before their message.
class Hooks {
 public:
  virtual ~Hooks() = default;

  /// Called once for each distinct global of a heap: a tag (> 0) where the hooks know it, else 0. The
  /// functions below see only globals with a tag.
  virtual uint32_t recognise(std::string_view /*module*/, std::string_view /*name*/) { return 0; }

  /// `callable(*args)` by REDUCE, NEWOBJ, OBJ or INST; `args` is a tuple. Nothing: as without hooks.
  virtual std::optional<Ref> call(Heap& /*heap*/, const GlobalName& /*callable*/, const Ref& /*args*/) {
    return std::nullopt;
  }

  /// BUILD of an inert object whose callable has a tag, or of a handle. Nothing: the state is noted in the
  /// object, or dropped on a handle. A value (not None)
  /// takes the object's place, in the memo too.
  virtual std::optional<Ref> build(Heap& /*heap*/, const Ref& /*object*/, const Ref& /*state*/) {
    return std::nullopt;
  }

  /// A persistent id (BINPERSID: any value; PERSID: a string).
  virtual std::optional<Ref> persistent(Heap& /*heap*/, const Ref& /*id*/) { return std::nullopt; }
};

struct Result {
  Ref root;
  size_t end = 0;  // bytes read: the pickle may stand at the start of something longer
};

/// Says where a pickle is, "/ckpt/.metadata"; asked only for a message.
using Where = std::function<std::string()>;

/// Runs the pickle at the start of `bytes`.
///
/// Without hooks these have their natural form: OrderedDict, defaultdict, dict -> dict (attributes
/// that BUILD sets on one are dropped); list, tuple, set, frozenset; bytes, bytearray and _codecs.encode ->
/// bytes; torch.Size -> tuple; getattr(a global, name) -> the global "outer.name". Everything else is an
/// object.
///
/// CorruptError for bytes that are no pickle: truncated, unknown opcodes, an empty stack, a memo index never
/// set, a value of the wrong kind. UnsupportedError for protocols above 5, extension registries and
/// out-of-band buffers, integers of more than 512 bytes, and calls that copy more than the pickle holds. All
/// name `where` and the offset.
Result read(Heap& heap, std::span<const std::byte> bytes, const Where& where, Hooks* hooks = nullptr);
inline Result read(Heap& heap, std::span<const std::byte> bytes, std::string_view where,
                   Hooks* hooks = nullptr) {
  return read(
      heap, bytes, [&] { return std::string(where); }, hooks);
}

// Implementation of what must be fast.

inline Ref::Ref(const Ref& other) noexcept
    : kind_(other.kind_), length_(other.length_), integer_(other.integer_) {
  if (is_node()) ++node_->references;
}
inline Ref::Ref(Ref&& other) noexcept : kind_(other.kind_), length_(other.length_), integer_(other.integer_) {
  other.kind_ = Kind::kNone;
}
inline Ref& Ref::operator=(const Ref& other) noexcept {
  Ref copy(other);
  return *this = std::move(copy);
}
inline Ref& Ref::operator=(Ref&& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(length_, other.length_);
  std::swap(integer_, other.integer_);
  return *this;
}
inline Ref::~Ref() {
  if (is_node() && --node_->references == 0) node_->heap->release(node_);
}
inline std::span<const Ref> Ref::items() const { return node_->items; }
inline const Ref& Ref::slot(Slot slot) const {
  return slot < node_->items.size() ? node_->items[slot] : none();
}
inline std::vector<Ref>& Ref::contents() const { return node_->items; }

}  // namespace spolia::pickle
