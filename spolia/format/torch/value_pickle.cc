#include "spolia/format/torch/value_pickle.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spolia/format/byte_source.h"
#include "spolia/format/torch/pickle_text.h"
#include "spolia/format/torch/pickle_value.h"
#include "spolia/format/torch/pickle_writer.h"
#include "spolia/format/torch/tensor_pickle.h"
#include "spolia/format/torch/torch_archive.h"
#include "spolia/format/torch/torch_zip_writer.h"

namespace spolia {
namespace {

using Construction = Record::Construction;
using Entries = std::vector<std::pair<Value, Value>>;

constexpr size_t kMostText = std::numeric_limits<uint32_t>::max() / 2;  // twice as long where it was Latin-1

class Check {
 public:
  /// `hashed`: as a dict's key or a set's member.
  bool is_fine(const Value& value, bool hashed) {
    if (depth_ == pickle::TreeLimits().depth) return false;
    ++depth_;
    bool result = std::visit([&](const auto& data) { return is_fine_data(data, hashed); }, value.data());
    --depth_;
    return result;
  }

 private:
  template <class Plain>
  bool is_fine_data(const Plain&, bool) {
    return true;
  }
  bool is_fine_data(const BigInt& big, bool) { return pickle::is_decimal(big.decimal); }
  bool is_fine_data(const std::string& text, bool) {
    return text.size() <= kMostText && pickle::is_python_text(text);
  }
  bool is_fine_data(const Bytes& bytes, bool) { return bytes.data.size() <= kMostText; }
  bool is_fine_data(const List& list, bool hashed) { return !hashed && all_of(list.items, false); }
  bool is_fine_data(const Tuple& tuple, bool hashed) { return all_of(tuple.items, hashed); }
  bool is_fine_data(const Set& set, bool) { return all_of(set.items, true); }
  bool is_fine_data(const Dict& dict, bool hashed) { return !hashed && are_fine(dict.items); }
  bool is_fine_data(const Global& global, bool) { return is_name(global.module) && is_name(global.name); }
  bool is_fine_data(const std::unique_ptr<Record>& record, bool) {
    return can_be_made(*record) && all_of(record->args, false) && all_of(record->items, false) &&
           are_fine(record->entries) && is_fine(record->state, false);
  }

  bool can_be_made(const Record& record) {
    switch (record.construction) {
      case Construction::kUnknown:
        return false;
      case Construction::kCallOfFirst:
        return !record.args.empty();
      case Construction::kNewWithKeywords:
        return is_fine_data(record.type, false) && !record.args.empty() && record.args.back().get_if<Dict>();
      case Construction::kCall:
      case Construction::kNew:
        return is_fine_data(record.type, false);
    }
    return false;
  }

  bool all_of(const std::vector<Value>& values, bool hashed) {
    return std::ranges::all_of(values, [&](const Value& value) { return is_fine(value, hashed); });
  }
  bool are_fine(const Entries& entries) {
    return std::ranges::all_of(entries, [&](const auto& entry) {
      return is_fine(entry.first, true) && is_fine(entry.second, false);
    });
  }

  static bool is_name(std::string_view name) {
    return !name.empty() && name.find('\n') == std::string_view::npos && pickle::is_python_text(name);
  }

  size_t depth_ = 0;
};

/// Writes protocol 2, as torch.save does.
class ValuePickleWriter {
 public:
  std::string write(const Value& value) {
    add(value, false);
    return out_.finish();
  }

 private:
  void add(const Value& value, bool hashed) {
    std::visit([&](const auto& data) { add_data(data, hashed); }, value.data());
  }

  void add_data(std::monostate, bool) { out_.none(); }
  void add_data(bool flag, bool) { out_.boolean(flag); }
  void add_data(int64_t number, bool) { out_.integer(number); }
  void add_data(const BigInt& big, bool) { out_.big_integer(big.decimal); }
  void add_data(double number, bool) { out_.floating(number); }
  void add_data(const std::string& text, bool) { out_.string(text); }

  /// Protocol 2 has no bytes: they are what text is when it is encoded.
  void add_data(const Bytes& bytes, bool) {
    out_.global("_codecs", "encode");
    out_.string(
        pickle::utf8_of_latin1({reinterpret_cast<const char*>(bytes.data.data()), bytes.data.size()}));
    out_.string("latin1");
    out_.tuple2();
    out_.reduce();
  }

  void add_data(const List& list, bool) {
    out_.empty_list();
    append(list.items);
  }
  void add_data(const Tuple& tuple, bool hashed) { add_tuple(tuple.items, hashed); }

  /// Nor has it sets. What is hashed must be one that does not change.
  void add_data(const Set& set, bool hashed) {
    add_global("builtins", hashed ? "frozenset" : "set");
    out_.empty_list();
    append(set.items, true);
    out_.tuple1();
    out_.reduce();
  }
  void add_data(const Dict& dict, bool) {
    out_.empty_dict();
    set_entries(dict.items);
  }

  /// A name with dots is one inside of a class, which protocol 2 gets from there.
  void add_data(const Global& global, bool) {
    const size_t dot = global.name.rfind('.');
    if (dot == std::string::npos || dot == 0) return add_global(global.module, global.name);
    add_global("builtins", "getattr");
    add_data(Global{global.module, global.name.substr(0, dot)}, false);
    out_.string(std::string_view(global.name).substr(dot + 1));
    out_.tuple2();
    out_.reduce();
  }

  void add_data(const std::unique_ptr<Record>& record, bool) {
    make(*record);
    append(record->items);
    set_entries(record->entries);
    if (!record->state.get_if<std::monostate>()) {
      add(record->state, false);
      out_.build();
    }
  }

  void make(const Record& record) {
    const std::span<const Value> args = record.args;
    if (record.construction == Construction::kCallOfFirst) {
      add(args.front(), false);
    } else {
      add_data(record.type, false);
    }
    switch (record.construction) {
      case Construction::kCallOfFirst:
        add_tuple(args.subspan(1), false);
        return out_.reduce();
      case Construction::kNew:
        add_tuple(args, false);
        return out_.new_object();
      case Construction::kNewWithKeywords:
        add_tuple(args.first(args.size() - 1), false);
        add(args.back(), false);
        return out_.new_object_with_keywords();
      case Construction::kCall:
      case Construction::kUnknown:  // there is none: can_pickle()
        add_tuple(args, false);
        return out_.reduce();
    }
  }

  void add_tuple(std::span<const Value> items, bool hashed) {
    if (items.empty()) return out_.empty_tuple();
    out_.mark();
    for (const Value& item : items) add(item, hashed);
    out_.tuple_from_mark();
  }

  /// In protocol 2 the module has the name that it had in Python 2. Other names are as they were read: Python
  /// knows the old ones, such as __builtin__.long, by that module alone.
  void add_global(std::string_view module, std::string_view name) {
    out_.global(module == "builtins" ? "__builtin__" : module, name);
  }

  /// To the list, or the object, on top.
  void append(std::span<const Value> items, bool hashed = false) {
    if (items.empty()) return;
    out_.mark();
    for (const Value& item : items) add(item, hashed);
    out_.append_from_mark();
  }

  void set_entries(const Entries& entries) {
    if (entries.empty()) return;
    out_.mark();
    for (const auto& [key, value] : entries) {
      add(key, true);
      add(value, false);
    }
    out_.set_from_mark();
  }

  pickle::Writer out_;
};

}  // namespace

bool can_pickle(const Value& value) { return Check().is_fine(value, false); }

std::string write_value_archive(const Value& value) {
  return write_torch_archive(ValuePickleWriter().write(value));
}

Value read_value_archive(std::vector<std::byte> archive, std::string where) {
  const int64_t length = std::ssize(archive);
  const auto bytes = bytes_in_memory(std::move(archive), std::move(where));
  TorchArchive opened(*bytes, length);
  TensorPickle pickle(opened);
  return pickle.value(pickle.root());
}

}  // namespace spolia
