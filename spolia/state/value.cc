#include "spolia/state/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "spolia/base/text.h"
#include "spolia/tensor/dtype.h"

namespace spolia {
namespace {

template <class... Fs>
struct Overload : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overload(Fs...) -> Overload<Fs...>;

using Json = nlohmann::ordered_json;

std::string_view last_component(std::string_view dotted) { return dotted.substr(dotted.rfind('.') + 1); }

bool is_dtype(const Global& global) {
  return global.module == "torch" && dtype_from_name(global.name).has_value();
}

/// A float as Python writes it: the shortest digits that mean it, with a point or an exponent.
std::string float_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

bool is_json_key(const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return is_utf8(*text);
  return key.get_if<std::monostate>() || key.get_if<bool>() || key.get_if<int64_t>() ||
         key.get_if<BigInt>() || key.get_if<double>();
}

std::string json_key(const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return *text;
  if (const auto* number = key.get_if<double>()) return float_text(*number);
  if (const auto* big = key.get_if<BigInt>()) return big->decimal;
  return key.to_json().dump();
}

Json big_to_json(const BigInt& big) {
  uint64_t number = 0;
  const char* end = big.decimal.data() + big.decimal.size();
  auto [at, error] = std::from_chars(big.decimal.data(), end, number);
  return error == std::errc() && at == end ? Json(number) : Json(big.decimal);
}

Json dict_to_json(const Dict& dict) {
  // Appended to the vector that an ordered object is: inserting by key would look through all of it.
  Json::object_t object;
  auto& members = static_cast<Json::object_t::Container&>(object);
  for (const auto& [key, value] : dict.items) members.emplace_back(json_key(key), value.to_json());
  return Json(std::move(object));
}

Json items_to_json(const std::vector<Value>& items) {
  Json array = Json::array();
  for (const Value& item : items) array.push_back(item.to_json());
  return array;
}

/// Draws a value until the line is full.
class Picture {
 public:
  explicit Picture(size_t limit) : limit_(limit) {}

  std::string draw(const Value& value) {
    add(value);
    return std::move(out_);
  }

 private:
  bool full() const { return out_.size() >= limit_; }

  /// Adds `count` things, with commas between them, until the line is full.
  template <class AddOne>
  void add_list(size_t count, const AddOne& add_one) {
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) out_ += ", ";
      if (full()) {
        out_ += "...";
        return;
      }
      add_one(i);
    }
  }

  void add_text(std::string_view text) {
    size_t room = full() ? 0 : limit_ - out_.size();
    size_t shown = std::min(text.size(), room);
    while (shown < text.size() && shown > 0 && (text[shown] & 0xC0) == 0x80) --shown;  // whole characters
    out_ += quote(text.substr(0, shown));
    if (shown < text.size()) out_ += "...";
  }

  void add_items(const std::vector<Value>& items, std::string_view open, std::string_view close) {
    out_ += open;
    add_list(items.size(), [&](size_t i) { add(items[i]); });
    out_ += close;
  }

  void add_entry(const std::pair<Value, Value>& entry) {
    add(entry.first);
    out_ += ": ";
    add(entry.second);
  }

  void add_name(const Global& global) {
    // In quotes where the name holds what could harm a terminal.
    std::string name = global.module.empty() ? global.name : fmt::format("{}.{}", global.module, global.name);
    std::string quoted = quote(name);
    out_ += quoted.size() == name.size() + 2 ? name : quoted;
  }

  void add_record(const Record& record) {
    const Dict* attributes = record.state.get_if<Dict>();
    bool has_other_state = attributes == nullptr && !record.state.get_if<std::monostate>();
    size_t args = record.args.size();
    size_t states = attributes != nullptr ? attributes->items.size() : has_other_state ? 1 : 0;
    size_t items = record.items.size();
    add_name({"", record.type.name});
    out_ += '(';
    add_list(args + states + items + record.entries.size(), [&](size_t i) {
      if (i < args) {
        add(record.args[i]);
      } else if (i < args + states) {
        attributes != nullptr ? add_attribute(attributes->items[i - args]) : add(record.state);
      } else if (i < args + states + items) {
        add(record.items[i - args - states]);
      } else {
        add_entry(record.entries[i - args - states - items]);
      }
    });
    out_ += ')';
  }

  void add_attribute(const std::pair<Value, Value>& attribute) {
    const auto* name = attribute.first.get_if<std::string>();
    if (name == nullptr) return add_entry(attribute);
    add_name({"", *name});
    out_ += '=';
    add(attribute.second);
  }

  void add(const Value& value) {
    std::visit(
        Overload{
            [&](std::monostate) { out_ += "None"; },
            [&](bool flag) { out_ += flag ? "True" : "False"; },
            [&](int64_t number) { out_ += std::to_string(number); },
            [&](const BigInt& big) { out_ += big.decimal; },
            [&](double number) { out_ += float_text(number); },
            [&](const std::string& text) { add_text(text); },
            [&](const Bytes& bytes) { out_ += fmt::format("<{} bytes>", bytes.data.size()); },
            [&](const List& list) { add_items(list.items, "[", "]"); },
            [&](const Tuple& tuple) { add_items(tuple.items, "(", tuple.items.size() == 1 ? ",)" : ")"); },
            [&](const Set& set) { add_items(set.items, "{", "}"); },
            [&](const Dict& dict) {
              out_ += '{';
              add_list(dict.items.size(), [&](size_t i) { add_entry(dict.items[i]); });
              out_ += '}';
            },
            [&](const Global& global) { add_name(global); },
            [&](const std::unique_ptr<Record>& record) { add_record(*record); },
        },
        value.data());
  }

  size_t limit_;
  std::string out_;
};

bool same_float(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same_record(const Record& a, const Record& b) {
  return a.type == b.type && a.construction == b.construction && a.args == b.args && a.state == b.state &&
         a.items == b.items && a.entries == b.entries;
}

}  // namespace

Value::Value() = default;
Value::Value(Data data) : data_(std::move(data)) {}
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(Value&&) noexcept = default;
Value::~Value() = default;

Value::Value(const Value& other)
    : data_(std::visit(
          Overload{
              [](const std::unique_ptr<Record>& record) -> Data { return std::make_unique<Record>(*record); },
              [](const auto& plain) -> Data { return plain; },
          },
          other.data_)) {}

Value& Value::operator=(const Value& other) {
  if (this != &other) *this = Value(other);
  return *this;
}

const Record* Value::record() const {
  const auto* record = get_if<std::unique_ptr<Record>>();
  return record == nullptr ? nullptr : record->get();
}

std::string Value::python_type() const {
  return std::visit(
      Overload{
          [](std::monostate) -> std::string { return "NoneType"; },
          [](bool) -> std::string { return "bool"; },
          [](int64_t) -> std::string { return "int"; },
          [](const BigInt&) -> std::string { return "int"; },
          [](double) -> std::string { return "float"; },
          [](const std::string&) -> std::string { return "str"; },
          [](const Bytes&) -> std::string { return "bytes"; },
          [](const List&) -> std::string { return "list"; },
          [](const Tuple&) -> std::string { return "tuple"; },
          [](const Set&) -> std::string { return "set"; },
          [](const Dict&) -> std::string { return "dict"; },
          [](const Global& global) -> std::string { return is_dtype(global) ? "dtype" : "type"; },
          [](const std::unique_ptr<Record>& record) {
            return std::string(last_component(record->type.name));
          },
      },
      data_);
}

bool Value::is_json() const {
  auto all = [](const std::vector<Value>& items) { return std::ranges::all_of(items, &Value::is_json); };
  return std::visit(Overload{
                        [](const std::string& text) { return is_utf8(text); },
                        [](const Bytes&) { return false; },
                        [&](const List& list) { return all(list.items); },
                        [&](const Tuple& tuple) { return all(tuple.items); },
                        [](const Set&) { return false; },
                        [](const Dict& dict) {
                          return std::ranges::all_of(dict.items, [](const auto& entry) {
                            return is_json_key(entry.first) && entry.second.is_json();
                          });
                        },
                        [](const Global&) { return false; },
                        [](const std::unique_ptr<Record>&) { return false; },
                        [](const auto&) { return true; },
                    },
                    data_);
}

nlohmann::ordered_json Value::to_json() const {
  return std::visit(
      Overload{
          [](std::monostate) { return Json(); },
          [](const BigInt& big) { return big_to_json(big); },
          [](double number) { return std::isfinite(number) ? Json(number) : Json(float_text(number)); },
          [](const List& list) { return items_to_json(list.items); },
          [](const Tuple& tuple) { return items_to_json(tuple.items); },
          [](const Dict& dict) { return dict_to_json(dict); },
          [](const Bytes&) { return Json(); },  // the others are no JSON
          [](const Set&) { return Json(); },
          [](const Global&) { return Json(); },
          [](const std::unique_ptr<Record>&) { return Json(); },
          [](const auto& plain) { return Json(plain); },
      },
      data_);
}

std::string Value::text(size_t limit) const { return Picture(limit).draw(*this); }

bool operator==(const List& a, const List& b) { return a.items == b.items; }
bool operator==(const Tuple& a, const Tuple& b) { return a.items == b.items; }
bool operator==(const Set& a, const Set& b) { return a.items == b.items; }
bool operator==(const Dict& a, const Dict& b) { return a.items == b.items; }

bool operator==(const Value& a, const Value& b) {
  if (a.data_.index() != b.data_.index()) return false;
  return std::visit(
      Overload{
          [&](double number) { return same_float(number, *b.get_if<double>()); },
          [&](const std::unique_ptr<Record>& record) { return same_record(*record, *b.record()); },
          [&](const auto& plain) { return plain == std::get<std::decay_t<decltype(plain)>>(b.data_); },
      },
      a.data_);
}

}  // namespace spolia
