#include "spolia/format/native/tagged_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/format/json_text.h"
#include "spolia/format/native/hex.h"

namespace spolia {
namespace {

constexpr char kTagStart = '$';

/// An integer beyond 64 bits in the one way to spell it.
bool is_big_integer(std::string_view decimal) {
  std::string_view digits = decimal.starts_with('-') ? decimal.substr(1) : decimal;
  if (digits.empty() || digits.starts_with('0')) return false;
  if (digits.find_first_not_of("0123456789") != std::string_view::npos) return false;
  int64_t small = 0;
  return std::from_chars(decimal.data(), decimal.data() + decimal.size(), small).ec != std::errc();
}

bool can_tag(const Value& value, size_t depth) {
  if (depth == 0) return false;
  auto all = [&](const std::vector<Value>& items) {
    return std::ranges::all_of(items, [&](const Value& item) { return can_tag(item, depth - 1); });
  };
  if (const auto* list = value.get_if<List>()) return all(list->items);
  if (const auto* tuple = value.get_if<Tuple>()) return all(tuple->items);
  if (const auto* set = value.get_if<Set>()) return all(set->items);
  if (const auto* dict = value.get_if<Dict>()) {
    return std::ranges::all_of(dict->items, [&](const auto& entry) {
      return can_tag(entry.first, depth - 1) && can_tag(entry.second, depth - 1);
    });
  }
  if (const auto* big = value.get_if<BigInt>()) return is_big_integer(big->decimal);
  return value.record() == nullptr;
}

/// Whether the dict can be a JSON object that nothing takes for a tag.
bool is_plain_object(const Dict& dict) {
  std::set<std::string_view> keys;
  return std::ranges::all_of(dict.items, [&](const auto& entry) {
    const auto* key = entry.first.template get_if<std::string>();
    return key != nullptr && !key->starts_with(kTagStart) && is_utf8(*key) && keys.insert(*key).second;
  });
}

class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  void add(const Value& value) { std::visit(*this, value.data()); }

  void operator()(std::monostate) { out_ += "null"; }
  void operator()(bool flag) { out_ += flag ? "true" : "false"; }
  void operator()(int64_t number) { fmt::format_to(std::back_inserter(out_), "{}", number); }
  void operator()(const BigInt& big) {
    add_tag("int", [&] { out_ += json_string(big.decimal); });
  }
  void operator()(double number) {
    if (!std::isfinite(number)) {
      std::string_view name = std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
      return add_tag("float", [&] { out_ += json_string(name); });
    }
    std::string text = fmt::format("{}", number);
    out_ += text;
    if (text.find_first_of(".e") == std::string::npos) out_ += ".0";  // or it would be an integer
  }
  void operator()(std::string_view text) {
    if (is_utf8(text)) {
      out_ += json_string(text);
    } else {
      add_tag("text", [&] { add_hex(bytes_of(text)); });
    }
  }
  void operator()(const Bytes& bytes) {
    add_tag("bytes", [&] { add_hex(bytes.data); });
  }
  void operator()(const List& list) { add_items(list.items); }
  void operator()(const Tuple& tuple) {
    add_tag("tuple", [&] { add_items(tuple.items); });
  }
  void operator()(const Set& set) {
    add_tag("set", [&] { add_items(set.items); });
  }
  void operator()(const Dict& dict) {
    if (!is_plain_object(dict)) return add_tag("dict", [&] { add_pairs(dict); });
    add_all('{', dict.items, '}', [&](const auto& entry) {
      add(entry.first);
      out_ += ": ";
      add(entry.second);
    });
  }
  void operator()(const Global& global) {
    add_tag("global", [&] {
      out_ += '[';
      (*this)(global.module);
      out_ += ", ";
      (*this)(global.name);
      out_ += ']';
    });
  }
  void operator()(const std::unique_ptr<Record>&) {
    throw InvalidArgumentError("a value that holds objects of classes has no form in tagged JSON");
  }

 private:
  template <class Content>
  void add_tag(std::string_view tag, Content content) {
    fmt::format_to(std::back_inserter(out_), "{{\"{}{}\": ", kTagStart, tag);
    content();
    out_ += '}';
  }

  template <class Items, class AddOne>
  void add_all(char open, const Items& items, char close, AddOne add_one) {
    out_ += open;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += ", ";
      add_one(items[i]);
    }
    out_ += close;
  }

  void add_items(const std::vector<Value>& items) {
    add_all('[', items, ']', [&](const Value& item) { add(item); });
  }

  void add_pairs(const Dict& dict) {
    add_all('[', dict.items, ']', [&](const auto& entry) {
      out_ += '[';
      add(entry.first);
      out_ += ", ";
      add(entry.second);
      out_ += ']';
    });
  }

  void add_hex(std::span<const std::byte> bytes) {
    out_ += '"';
    out_ += hex_of_bytes(bytes);
    out_ += '"';
  }

  std::string& out_;
};

class Reader {
 public:
  Value read(const Value& json) {
    if (const auto* list = json.get_if<List>()) return Value(List{read_all(list->items)});
    if (const auto* dict = json.get_if<Dict>()) return read_object(*dict);
    if (json.get_if<BigInt>()) {
      throw CorruptError("the integer {} has more than 64 bits and should be tagged", json.text());
    }
    return json;
  }

 private:
  /// Counts how deep the values are nested while it lives.
  class Level {
   public:
    explicit Level(size_t& depth) : depth_(depth) {
      if (++depth_ > kMaxTaggedDepth) throw CorruptError("a value is nested deeper than {}", kMaxTaggedDepth);
    }
    ~Level() { --depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    size_t& depth_;
  };

  std::vector<Value> read_all(const std::vector<Value>& items) {
    Level level(depth_);
    std::vector<Value> values;
    values.reserve(items.size());
    for (const Value& item : items) values.push_back(read(item));
    return values;
  }

  Value read_object(const Dict& object) {
    auto is_tag = [](const auto& member) {
      return member.first.template get_if<std::string>()->starts_with(kTagStart);
    };
    if (std::ranges::any_of(object.items, is_tag)) {
      if (object.items.size() != 1) throw CorruptError("an object has other keys beside a tag");
      const auto& [key, content] = object.items.front();
      return read_tagged(std::string_view(*key.get_if<std::string>()).substr(1), content);
    }
    Level level(depth_);
    Dict dict;
    for (const auto& [key, value] : object.items) dict.items.emplace_back(key, read(value));
    return Value(std::move(dict));
  }

  Value read_tagged(std::string_view tag, const Value& content) {
    if (tag == "tuple") return Value(Tuple{read_all(list_of(tag, content))});
    if (tag == "set") return Value(Set{read_all(list_of(tag, content))});
    if (tag == "dict") return read_pairs(list_of(tag, content));
    if (tag == "bytes") return Value(Bytes{bytes_of_hex(text_of(tag, content))});
    if (tag == "text") return read_text(text_of(tag, content));
    if (tag == "int") return read_int(text_of(tag, content));
    if (tag == "float") return read_float(text_of(tag, content));
    if (tag == "global") return read_global(list_of(tag, content));
    throw CorruptError("the tag {} is unknown", quote(tag));
  }

  static const std::vector<Value>& list_of(std::string_view tag, const Value& content) {
    if (const auto* list = content.get_if<List>()) return list->items;
    throw CorruptError("the tag {} wants an array, not {}", quote(tag), content.text());
  }

  static const std::string& text_of(std::string_view tag, const Value& content) {
    if (const auto* text = content.get_if<std::string>()) return *text;
    throw CorruptError("the tag {} wants a string, not {}", quote(tag), content.text());
  }

  Value read_pairs(const std::vector<Value>& pairs) {
    Level level(depth_);
    Dict dict;
    for (const Value& pair : pairs) {
      const auto* both = pair.get_if<List>();
      if (both == nullptr || both->items.size() != 2) {
        throw CorruptError("a dict wants pairs of a key and a value, not {}", pair.text());
      }
      Value key = read(both->items[0]);
      dict.items.emplace_back(std::move(key), read(both->items[1]));
    }
    return Value(std::move(dict));
  }

  static Value read_text(const std::string& hex) {
    const std::vector<std::byte> bytes = bytes_of_hex(hex);
    return Value(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }

  static Value read_int(const std::string& decimal) {
    if (is_big_integer(decimal)) return Value(BigInt{decimal});
    throw CorruptError("{} is no integer of more than 64 bits", quote(decimal));
  }

  static Value read_float(const std::string& name) {
    if (name == "nan") return Value(std::numeric_limits<double>::quiet_NaN());
    if (name == "inf") return Value(std::numeric_limits<double>::infinity());
    if (name == "-inf") return Value(-std::numeric_limits<double>::infinity());
    throw CorruptError("{} is none of nan, inf and -inf", quote(name));
  }

  static Value read_global(const std::vector<Value>& names) {
    if (names.size() != 2) throw CorruptError("a global wants a module and a name");
    return Value(Global{untagged_text(names[0]), untagged_text(names[1])});
  }

  size_t depth_ = 0;
};

}  // namespace

bool can_tag(const Value& value) { return can_tag(value, kMaxTaggedDepth); }

void append_tagged_json(std::string& out, const Value& value) { Writer(out).add(value); }

void append_tagged_json(std::string& out, std::string_view text) {
  Writer writer(out);
  writer(text);
}

std::string tagged_json(const Value& value) {
  std::string out;
  append_tagged_json(out, value);
  return out;
}

Value untagged(const Value& json) { return Reader().read(json); }

std::string untagged_text(const Value& json) {
  Value value = untagged(json);
  if (const auto* text = value.get_if<std::string>()) return *text;
  throw CorruptError("a string is expected here, not {}", value.text());
}

}  // namespace spolia
