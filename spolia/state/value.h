// Values: what a checkpoint holds besides tensors, as an inert tree.
//
// The tree mirrors Python's plain types. Objects of classes are kept as records (the class's name,
// constructor arguments, state) that can be shown and written back, never run. Values own all they hold;
// there are no cycles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace spolia {

class Value;

struct BigInt {  // an integer beyond 64 bits
  std::string decimal;
  friend bool operator==(const BigInt&, const BigInt&) = default;
};
struct Bytes {
  std::vector<std::byte> data;
  friend bool operator==(const Bytes&, const Bytes&) = default;
};
struct List {
  std::vector<Value> items;
};
struct Tuple {
  std::vector<Value> items;
};
struct Set {
  std::vector<Value> items;  // in the order the file had them
};
struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in insertion order
};

/// A named global that stands for itself: a class, a function, `torch.float32`.
struct Global {
  std::string module;
  std::string name;
  friend bool operator==(const Global&, const Global&) = default;
};

struct Record;

class Value {
 public:
  using Data = std::variant<std::monostate /* None */, bool, int64_t, BigInt, double, std::string, Bytes,
                            List, Tuple, Set, Dict, Global, std::unique_ptr<Record>>;
  Value();
  explicit Value(Data data);
  Value(Value&&) noexcept;
  Value& operator=(Value&&) noexcept;
  Value(const Value& other);  // copies deeply
  Value& operator=(const Value& other);
  ~Value();

  const Data& data() const { return data_; }
  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&data_);
  }
  const Record* record() const;  // or nullptr

  /// Python's type name: "int", "str", "tuple", "dtype" for torch.float32 and its like, "type" for any other
  /// global, or a record's class without its module.
  std::string python_type() const;

  /// Whether Python's json module would take the value: None, bool, int, float, str (if it is UTF-8), lists
  /// and tuples of such, and dicts with keys of those plain types.
  bool is_json() const;
  /// The JSON form (tuples as lists, keys as text). Precondition: is_json(). What JSON has no numbers for
  /// becomes a string: "NaN", "Infinity", "-Infinity", and integers that fit neither 64 signed nor 64
  /// unsigned bits, in decimal.
  nlohmann::ordered_json to_json() const;

  /// A short, one-line picture for people, at most about `limit` bytes: Namespace(lr=0.1, ...). Holds nothing
  /// that could harm a terminal.
  std::string text(size_t limit = 120) const;

  /// Equal types and contents, dicts and sets in the same order. A NaN equals a NaN.
  friend bool operator==(const Value& a, const Value& b);

 private:
  Data data_;
};

/// An object of a class Spolia does not know: kept, shown, never run.
struct Record {
  /// How Python makes the object of `type` and `args`.
  enum class Construction : uint8_t {
    kUnknown,          // it cannot be made again: a tensor, a persistent id
    kCall,             // type(*args)
    kCallOfFirst,      // args[0](*args[1:]): what is called is no global, but made itself
    kNew,              // type.__new__(type, *args)
    kNewWithKeywords,  // the same, where the last of `args` is a dict of keyword arguments
  };

  Global type;
  Construction construction = Construction::kUnknown;
  std::vector<Value> args;                       // what its constructor or reducer was given
  Value state;                                   // what BUILD set, or None
  std::vector<Value> items;                      // what APPENDS added
  std::vector<std::pair<Value, Value>> entries;  // what SETITEMS set
};

}  // namespace spolia
