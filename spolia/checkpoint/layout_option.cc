#include "spolia/checkpoint/layout_option.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

using nlohmann::json;

/// The value at a key that must be there.
const json& at(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw InvalidArgumentError("there is no {}", quote(key));
  return *found;
}

void check_object(const json& value, std::string_view what, std::initializer_list<std::string_view> keys) {
  if (!value.is_object()) throw InvalidArgumentError("{} is an object, not {}", what, value.type_name());
  for (const auto& [key, member] : value.items()) {
    if (std::ranges::find(keys, key) == keys.end()) {
      throw InvalidArgumentError("{} has no {}; it has {}", what, quote(key), fmt::join(keys, ", "));
    }
  }
}

std::string string_of(const json& value) {
  if (!value.is_string()) throw InvalidArgumentError("a string is expected, not {}", value.type_name());
  return value.get<std::string>();
}

int64_t integer_of(const json& value) {
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && !std::in_range<int64_t>(value.get<uint64_t>()))) {
    throw InvalidArgumentError("an integer of 64 bits is expected, not {}", value.type_name());
  }
  return value.get<int64_t>();
}

template <class Read>
auto list_of(const json& value, Read read) {
  if (!value.is_array()) throw InvalidArgumentError("a list is expected, not {}", value.type_name());
  std::vector<decltype(read(value))> items;
  for (const json& item : value) items.push_back(read(item));
  return items;
}

DeviceMesh mesh_of(const json& value) {
  if (value.is_string()) return parse_mesh(value.get<std::string>());
  check_object(value, "a mesh", {"shape", "dims", "ranks"});
  Dims shape{std::span<const int64_t>(list_of(at(value, "shape"), integer_of))};
  std::vector<std::string> dims;
  if (value.contains("dims")) dims = list_of(value["dims"], string_of);
  if (!value.contains("ranks")) return DeviceMesh(std::move(shape), std::move(dims));
  return DeviceMesh(std::move(shape), std::move(dims), list_of(value["ranks"], integer_of));
}

LayoutRule rule_of(const json& value) {
  check_object(value, "a rule", {"match", "placements", "over", "mesh"});
  LayoutRule rule;
  rule.pattern = string_of(at(value, "match"));
  rule.placements =
      list_of(at(value, "placements"), [](const json& item) { return parse_placement(string_of(item)); });
  if (value.contains("over")) rule.over = list_of(value["over"], string_of);
  if (value.contains("mesh")) rule.mesh = mesh_of(value["mesh"]);
  if (value.contains("over") && (rule.mesh || rule.over.empty())) {
    throw InvalidArgumentError("\"over\" names dims of the common mesh, at least one, and excludes \"mesh\"");
  }
  return rule;
}

LayoutRules rules_of(const json& value) {
  check_object(value, "a set of layout rules", {"mesh", "rules"});
  DeviceMesh mesh = mesh_of(at(value, "mesh"));
  std::vector<LayoutRule> rules;
  if (!value.contains("rules")) return LayoutRules(std::move(mesh), {});
  const json& list = value["rules"];
  if (!list.is_array()) throw InvalidArgumentError("\"rules\" is a list of objects");
  for (const json& item : list) {
    const std::string place = fmt::format("rule {}", rules.size() + 1);
    try {
      rules.push_back(rule_of(item));
      rules.back().origin = fmt::format("{}, {}", place, quote(rules.back().pattern));
    } catch (const Error& error) {
      rethrow_with_context(error, place);
    }
  }
  return LayoutRules(std::move(mesh), std::move(rules));
}

}  // namespace

LayoutRules read_layout_rules(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || text[first] != '{') return parse_layout_rules(text);
  json value;
  try {
    value = json::parse(text);
  } catch (const json::parse_error& error) {
    throw InvalidArgumentError("these layout rules are no JSON: byte {} has no place there", error.byte);
  }
  return rules_of(value);
}

}  // namespace spolia
