#include <limits>

#include "spolia/base/error.h"
#include "spolia/format/torch/pickle.h"

namespace spolia::pickle {

std::string_view name_of(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return "a bool";
    case Kind::kInt:
    case Kind::kBigInt:
      return "an integer";
    case Kind::kFloat:
      return "a float";
    case Kind::kString:
      return "a string";
    case Kind::kBytes:
      return "bytes";
    case Kind::kGlobal:
      return "a global";
    case Kind::kHandle:
      return "a handle";
    case Kind::kTuple:
      return "a tuple";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kSet:
      return "a set";
    case Kind::kObject:
      return "an object";
  }
  return "?";
}

// Out of line: where g++ sees a constant in a reference that goes out of scope it warns of a bad pointer.
Ref Ref::boolean(bool value) { return Ref(Kind::kBool, 0, value); }
Ref Ref::integer(int64_t value) { return Ref(Kind::kInt, 0, value); }
Ref Ref::handle(uint32_t tag, int64_t value) { return Ref(Kind::kHandle, tag, value); }

Ref Ref::floating(double value) {
  Ref ref;
  ref.kind_ = Kind::kFloat;
  ref.number_ = value;
  return ref;
}

Ref Ref::text_of(Kind kind, std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    throw UnsupportedError("a text of {} bytes is too long", text.size());
  }
  Ref ref;
  ref.kind_ = kind;
  ref.length_ = static_cast<uint32_t>(text.size());
  ref.text_ = text.data();
  return ref;
}

const Ref* Ref::find(std::string_view key) const {
  constexpr size_t kMostAttributes = 256;  // a huge dict may be the state of many objects
  if (kind_ != Kind::kDict || items().size() > 2 * kMostAttributes) return nullptr;
  std::span<const Ref> all = items();
  for (size_t i = all.size(); i >= 2; i -= 2) {
    const Ref& candidate = all[i - 2];
    if (candidate.is(Kind::kString) && candidate.text() == key) return &all[i - 1];
  }
  return nullptr;
}

const Ref& Ref::none() {
  static const Ref kNone;
  return kNone;
}

Ref& Ref::writable_slot(Slot slot) const {
  std::vector<Ref>& slots = contents();
  if (slots.size() <= slot) slots.resize(slot + 1);
  return slots[slot];
}

Heap::~Heap() {
  // Cycles may be left, so nothing is counted any more.
  for (Node& node : nodes_) {
    for (Ref& item : node.items) item.kind_ = Kind::kNone;
  }
}

Ref Heap::fresh(Kind kind) {
  if (free_ == nullptr) {
    free_ = &nodes_.emplace_back();
    free_->heap = this;
  }
  Ref ref;
  ref.kind_ = kind;
  ref.node_ = std::exchange(free_, free_->next);
  ref.node_->references = 1;
  return ref;
}

Ref Heap::node(Kind kind, std::vector<Ref> items) {
  Ref ref = fresh(kind);
  ref.contents() = std::move(items);
  return ref;
}

Ref Heap::object(Ref callable, Ref args, bool is_made_by_new, Ref kwargs) {
  Ref ref = fresh(Kind::kObject);
  if (is_made_by_new) ref.length_ = Ref::kMadeByNew;
  std::vector<Ref>& slots = ref.contents();
  slots.push_back(std::move(callable));
  slots.push_back(std::move(args));
  if (!kwargs.is_none()) ref.writable_slot(Ref::kKwargs) = std::move(kwargs);
  return ref;
}

void Heap::release(Node* node) noexcept {
  constexpr size_t kKeptCapacity = 32;  // more is given back, less is what the next node needs
  node->next = nullptr;
  for (Node* doomed = node; doomed != nullptr;) {
    Node* current = std::exchange(doomed, doomed->next);
    while (!current->items.empty()) {
      Ref& item = current->items.back();
      if (item.is_node() && --item.node_->references == 0) {
        item.node_->next = doomed;
        doomed = item.node_;
      }
      item.kind_ = Kind::kNone;
      current->items.pop_back();
    }
    if (current->items.capacity() > kKeptCapacity) std::vector<Ref>().swap(current->items);
    current->next = std::exchange(free_, current);
  }
}

std::string_view Heap::keep(std::string text) { return texts_.emplace_back(std::move(text)); }

GlobalName& Heap::intern(std::string_view module, std::string_view name) {
  constexpr size_t kLongest = 1024;  // so that names which are looked up again and again cost little
  if (module.size() > kLongest || name.size() > kLongest) {
    throw CorruptError("the name of a global is {} bytes long", module.size() + name.size());
  }
  if (module == "__builtin__") module = "builtins";
  if (module == "copy_reg") module = "copyreg";
  auto [at, is_new] = globals_.try_emplace({module, name}, GlobalName{module, name});
  return at->second;
}

Ref Heap::global(std::string_view module, std::string_view name) {
  Ref ref;
  ref.kind_ = Kind::kGlobal;
  ref.global_ = &intern(module, name);
  return ref;
}

}  // namespace spolia::pickle
