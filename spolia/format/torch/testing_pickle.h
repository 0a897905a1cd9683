// Pickles and torch.save archives made by hand, for tests: each function gives the opcodes that leave one
// value on the stack.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/format/torch/testing.h"

namespace spolia::testing {

inline std::string py_text(std::string_view text) {
  return "X" + little(static_cast<uint32_t>(text.size())) + std::string(text);
}
inline std::string py_int(int64_t value) { return "\x8a\x08" + little(value); }
inline std::string py_bool(bool value) { return value ? "\x88" : "\x89"; }
inline std::string py_none() { return "N"; }
inline std::string py_global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string py_tuple(const std::vector<std::string>& items) {
  std::string out = "(";
  for (const std::string& item : items) out += item;
  return out + "t";
}
inline std::string py_list(const std::vector<std::string>& items) {
  std::string out = "](";
  for (const std::string& item : items) out += item;
  return out + "e";
}
inline std::string py_ints(std::span<const int64_t> values) {
  std::vector<std::string> items;
  for (int64_t value : values) items.push_back(py_int(value));
  return py_tuple(items);
}
using Pairs = std::vector<std::pair<std::string, std::string>>;
/// Keys are opcodes too.
inline std::string py_dict(const Pairs& items) {
  std::string out = "}(";
  for (const auto& [key, value] : items) out += key + value;
  return out + "u";
}
/// The same with keys that are texts.
inline std::string py_fields(const Pairs& items) {
  std::string out = "}(";
  for (const auto& [key, value] : items) out += py_text(key) + value;
  return out + "u";
}
inline std::string py_call(const std::string& callable, const std::vector<std::string>& args) {
  return callable + py_tuple(args) + "R";
}
/// An object of a class with that state, as copyreg's protocol 2 makes it.
inline std::string py_object(std::string_view module, std::string_view name, const std::string& state) {
  return py_global(module, name) + ")\x81" + state + "b";
}
inline std::string py_pickle(const std::string& value) { return "\x80\x02" + value + "."; }

/// A storage of `numel` elements by its class.
inline std::string py_storage(std::string_view type, std::string_view key, int64_t numel) {
  std::string_view module = type == "UntypedStorage" ? "torch.storage" : "torch";
  return py_tuple(
             {py_text("storage"), py_global(module, type), py_text(key), py_text("cpu"), py_int(numel)}) +
         "Q";
}

inline std::string py_tensor(const std::string& storage, int64_t first, std::vector<int64_t> shape,
                             std::vector<int64_t> strides, bool requires_grad = false) {
  return py_call(py_global("torch._utils", "_rebuild_tensor_v2"),
                 {storage, py_int(first), py_ints(shape), py_ints(strides), py_bool(requires_grad),
                  py_call(py_global("collections", "OrderedDict"), {})});
}

/// An archive as torch.save writes it.
inline std::string make_archive(const std::string& value,
                                const std::map<std::string, std::string>& storages) {
  std::vector<TestRecord> records{{.name = "archive/data.pkl", .data = py_pickle(value)},
                                  {.name = "archive/byteorder", .data = "little"}};
  for (const auto& [key, bytes] : storages) records.push_back({.name = "archive/data/" + key, .data = bytes});
  records.push_back({.name = "archive/version", .data = "3\n"});
  return make_zip(records);
}

template <class T>
std::string raw(const std::vector<T>& values) {
  std::string bytes;
  for (T value : values) bytes += little(value);
  return bytes;
}

}  // namespace spolia::testing
