#include "spolia/format/torch/pickle_value.h"

#include <algorithm>
#include <string>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia::pickle {
namespace {

class TreeBuilder {
 public:
  TreeBuilder(std::string_view where, const TreeLimits& limits, const HandleToValue& handle_to_value)
      : where_(where), limits_(limits), handle_to_value_(handle_to_value) {}

  Value build(const Ref& ref) {
    count(nodes_, 1, limits_.nodes, "values");
    if (depth_ == limits_.depth) {
      throw CorruptError("{}: a value is nested deeper than {}, or holds itself", where_, limits_.depth);
    }
    ++depth_;
    Value value = convert(ref);
    --depth_;
    return value;
  }

 private:
  void count(size_t& used, size_t more, size_t limit, std::string_view what) const {
    if (more > limit - used) {
      throw CorruptError("{}: a value unfolds to more than {} {}, which its pickle does not justify", where_,
                         limit, what);
    }
    used += more;
  }

  std::string_view text(const Ref& ref) {
    count(bytes_, ref.text().size(), limits_.bytes, "bytes");
    return ref.text();
  }

  std::vector<Value> build_all(std::span<const Ref> refs) {
    std::vector<Value> values;
    values.reserve(std::min(refs.size(), limits_.nodes - nodes_));
    for (const Ref& ref : refs) values.push_back(build(ref));
    return values;
  }

  Dict build_dict(const Ref& ref) {
    std::span<const Ref> items = ref.items();
    Dict dict;
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      Value key = build(items[i]);
      dict.items.emplace_back(std::move(key), build(items[i + 1]));
    }
    check_keys(dict);
    return dict;
  }

  void check_keys(const Dict& dict) const {
    std::vector<std::string_view> texts;
    std::vector<int64_t> numbers;
    for (const auto& [key, value] : dict.items) {
      if (const auto* t = key.get_if<std::string>()) texts.push_back(*t);
      if (const auto* n = key.get_if<int64_t>()) numbers.push_back(*n);
    }
    std::ranges::sort(texts);
    std::ranges::sort(numbers);
    auto text_twice = std::ranges::adjacent_find(texts);
    if (text_twice != texts.end())
      throw CorruptError("{}: a dict has the key {} twice", where_, quote(*text_twice));
    auto number_twice = std::ranges::adjacent_find(numbers);
    if (number_twice != numbers.end())
      throw CorruptError("{}: a dict has the key {} twice", where_, *number_twice);
  }

  Bytes build_bytes(const Ref& ref) {
    std::span<const char> bytes = text(ref);
    auto data = std::as_bytes(bytes);
    return {{data.begin(), data.end()}};
  }

  Global build_global(const Ref& ref) {
    const GlobalName& global = ref.global();
    count(bytes_, global.module.size() + global.name.size(), limits_.bytes, "bytes");
    return {std::string(global.module), std::string(global.name)};
  }

  Value build_object(const Ref& ref) {
    auto record = std::make_unique<Record>();
    const Ref& callable = ref.callable();
    if (callable.is(Kind::kGlobal)) {
      record->type = build_global(callable);
      record->construction = construction_of(ref);
    } else {
      record->type.name = callable.is_none() ? "persistent_id" : "call";
      if (!callable.is_none()) record->args.push_back(build(callable));
      if (!callable.is_none() && construction_of(ref) == Record::Construction::kCall) {
        record->construction = Record::Construction::kCallOfFirst;
      }
    }
    if (ref.args().is(Kind::kTuple)) {
      for (const Ref& arg : ref.args().items()) record->args.push_back(build(arg));
    } else {
      record->args.push_back(build(ref.args()));
    }
    if (!ref.kwargs().is_none()) record->args.push_back(build(ref.kwargs()));
    record->state = build(ref.state());
    if (!ref.appended().is_none()) record->items = build_all(ref.appended().items());
    if (!ref.entries().is_none()) record->entries = build_dict(ref.entries()).items;
    return Value(std::move(record));
  }

  static Record::Construction construction_of(const Ref& ref) {
    if (!ref.kwargs().is_none()) return Record::Construction::kNewWithKeywords;
    return ref.is_made_by_new() ? Record::Construction::kNew : Record::Construction::kCall;
  }

  Value build_handle(const Ref& ref) {
    if (handle_to_value_) {
      if (std::optional<Value> value = handle_to_value_(ref)) return std::move(*value);
    }
    auto record = std::make_unique<Record>();
    record->type.name = "handle";
    return Value(std::move(record));
  }

  Value convert(const Ref& ref) {
    switch (ref.kind()) {
      case Kind::kNone:
        return Value();
      case Kind::kBool:
        return Value(ref.as_bool());
      case Kind::kInt:
        return Value(ref.as_int());
      case Kind::kFloat:
        return Value(ref.as_float());
      case Kind::kString:
        return Value(std::string(text(ref)));
      case Kind::kBytes:
        return Value(build_bytes(ref));
      case Kind::kBigInt:
        return Value(BigInt{std::string(text(ref))});
      case Kind::kGlobal:
        return Value(build_global(ref));
      case Kind::kHandle:
        return build_handle(ref);
      case Kind::kTuple:
        return Value(Tuple{build_all(ref.items())});
      case Kind::kList:
        return Value(List{build_all(ref.items())});
      case Kind::kDict:
        return Value(build_dict(ref));
      case Kind::kSet:
        return Value(Set{build_all(ref.items())});
      case Kind::kObject:
        return build_object(ref);
    }
    return Value();
  }

  std::string_view where_;
  const TreeLimits& limits_;
  const HandleToValue& handle_to_value_;
  size_t depth_ = 0;
  size_t nodes_ = 0;
  size_t bytes_ = 0;
};

}  // namespace

TreeLimits TreeLimits::for_pickle(size_t bytes) {
  constexpr size_t kSlack = size_t{1} << 16;  // for small pickles that share a lot
  TreeLimits limits;
  limits.nodes = kSlack + 4 * bytes;
  limits.bytes = kSlack + 16 * bytes;
  return limits;
}

Value to_value(const Ref& root, std::string_view where, const TreeLimits& limits,
               const HandleToValue& handle_to_value) {
  return TreeBuilder(where, limits, handle_to_value).build(root);
}

}  // namespace spolia::pickle
