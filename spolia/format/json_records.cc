#include "spolia/format/json_records.h"

#include <algorithm>
#include <set>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/json_reader.h"

namespace spolia {
namespace {

/// An object or array whose end has not come yet.
struct OpenTree {
  bool is_object = false;
  std::string key;  // of the member that comes next
  std::vector<std::pair<Value, Value>> members;
  std::vector<Value> items;
};

class RecordReader : public JsonReader {
 public:
  RecordReader(std::string_view file, const std::function<void(JsonRecord&)>& on_record)
      : file_(file), on_record_(on_record) {}

  bool null() override { return add({}); }
  bool boolean(bool flag) override { return add(Value(flag)); }
  bool number_integer(int64_t number) override { return add(Value(number)); }
  bool number_unsigned(uint64_t number) override {
    return add(std::in_range<int64_t>(number) ? Value(static_cast<int64_t>(number))
                                              : Value(BigInt{std::to_string(number)}));
  }
  bool number_float(double number, const std::string& text) override {
    return add(text.find_first_of(".eE") == std::string::npos ? Value(BigInt{text}) : Value(number));
  }
  bool string(std::string& text) override { return add(Value(std::move(text))); }

  bool start_object(size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kMembers;
    } else {
      open(true);
    }
    return true;
  }
  bool start_array(size_t) override {
    if (place_ == Place::kMembers && open_.empty()) {
      place_ = Place::kElements;
      elements_ = 0;
    } else {
      open(false);
    }
    return true;
  }
  bool end_object() override {
    if (open_.empty()) return true;
    OpenTree tree = close();
    check_keys(tree);
    return add(Value(Dict{std::move(tree.members)}));
  }
  bool end_array() override {
    if (open_.empty()) {
      place_ = Place::kMembers;
      return true;
    }
    return add(Value(List{close().items}));
  }

  bool key(std::string& key) override {
    if (!open_.empty()) {
      open_.back().key = std::move(key);
      return true;
    }
    key_ = std::move(key);
    if (!keys_.insert(key_).second) refuse("a key for the second time");
    return true;
  }

 protected:
  std::string where() const override {
    if (place_ == Place::kOutside || keys_.empty()) return quote(file_);
    std::string text = fmt::format("{}: {}", quote(file_), quote(key_));
    return place_ == Place::kElements ? fmt::format("{}[{}]", text, elements_) : text;
  }

 private:
  enum class Place { kOutside, kMembers, kElements };

  void open(bool is_object) {
    if (open_.size() == kMaxJsonNesting) refuse("what is nested so deeply");
    open_.emplace_back().is_object = is_object;
  }

  OpenTree close() {
    OpenTree tree = std::move(open_.back());
    open_.pop_back();
    return tree;
  }

  void check_keys(const OpenTree& tree) const {
    std::vector<std::string_view> keys;
    for (const auto& [key, value] : tree.members) keys.push_back(*key.get_if<std::string>());
    std::ranges::sort(keys);
    auto twice = std::ranges::adjacent_find(keys);
    if (twice != keys.end()) refuse(fmt::format("the key {} for the second time", quote(*twice)));
  }

  bool add(Value value) {
    if (open_.empty()) {
      hand_on(std::move(value));
    } else if (OpenTree& tree = open_.back(); tree.is_object) {
      tree.members.emplace_back(Value(std::move(tree.key)), std::move(value));
    } else {
      tree.items.push_back(std::move(value));
    }
    return true;
  }

  void hand_on(Value value) {
    JsonRecord record{key_, place_ == Place::kElements, std::move(value)};
    try {
      on_record_(record);
    } catch (const Error& error) {
      rethrow_with_context(error, where());
    }
    ++elements_;
  }

  std::string_view file_;
  const std::function<void(JsonRecord&)>& on_record_;
  Place place_ = Place::kOutside;
  std::string key_;  // the key met last in the outermost object
  std::set<std::string> keys_;
  size_t elements_ = 0;  // of the array that is handed on
  std::vector<OpenTree> open_;
};

}  // namespace

void read_json_records(std::string_view text, std::string_view file,
                       const std::function<void(JsonRecord&)>& on_record) {
  RecordReader reader(file, on_record);
  read_json(text, reader);
}

JsonObject::JsonObject(const Value& value) : dict_(value.get_if<Dict>()) {
  if (dict_ == nullptr) throw CorruptError("an object is expected here, not {}", value.text());
}

const Value* JsonObject::find(std::string_view key) const {
  auto at = std::ranges::find_if(dict_->items, [&](const auto& member) {
    const auto* text = member.first.template get_if<std::string>();
    return text != nullptr && *text == key;
  });
  return at == dict_->items.end() ? nullptr : &at->second;
}

const Value& JsonObject::at(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) throw CorruptError("the key {} is missing", quote(key));
  return *value;
}

const std::string& JsonObject::text(std::string_view key) const {
  const Value& value = at(key);
  if (const auto* text = value.get_if<std::string>()) return *text;
  throw CorruptError("{} should be a string, not {}", quote(key), value.text());
}

int64_t JsonObject::integer(std::string_view key, int64_t most) const {
  const Value& value = at(key);
  const auto* number = value.get_if<int64_t>();
  if (number != nullptr && *number >= 0 && *number <= most) return *number;
  throw CorruptError("{} should be a whole number from 0 to {}, not {}", quote(key), most, value.text());
}

const std::vector<Value>& JsonObject::list(std::string_view key) const {
  const Value& value = at(key);
  if (const auto* list = value.get_if<List>()) return list->items;
  throw CorruptError("{} should be an array, not {}", quote(key), value.text());
}

std::vector<int64_t> json_integers(const Value& value, std::string_view what) {
  std::vector<int64_t> numbers;
  const auto* list = value.get_if<List>();
  auto is_size = [](const Value& item) { return item.get_if<int64_t>() && *item.get_if<int64_t>() >= 0; };
  if (list == nullptr || !std::ranges::all_of(list->items, is_size)) {
    throw CorruptError("{} should be a list of whole numbers from 0 up, not {}", what, value.text());
  }
  for (const Value& item : list->items) numbers.push_back(*item.get_if<int64_t>());
  return numbers;
}

}  // namespace spolia
