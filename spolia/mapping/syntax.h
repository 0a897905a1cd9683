// The text of a mapping: its statements as they stand, with the place of every word. docs/mapping.md has the
// grammar.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/error.h"

namespace spolia {

/// A place in the text, both from 1. Of a configuration in JSON, the line is the number of the statement.
struct Position {
  int32_t line = 0;
  int32_t column = 0;
  friend bool operator==(const Position&, const Position&) = default;
};

/// Throws InvalidArgumentError "line 3, column 7: MESSAGE".
[[noreturn]] void fail_at(Position at, std::string_view message);

template <class... Args>
[[noreturn]] void fail_at(Position at, fmt::format_string<Args...> format, Args&&... args) {
  fail_at(at, std::string_view(fmt::format(format, std::forward<Args>(args)...)));
}

/// "[2:5]" in a name, and what follows it.
struct NameRange {
  int64_t begin = 0, end = 0;
  std::string suffix;
  friend bool operator==(const NameRange&, const NameRange&) = default;
};

struct Operand {
  std::string name;         // "_": nothing. Before the range, where there is one
  bool literal = false;     // stood in quotes: $, * and _ are themselves
  bool transposed = false;  // ^T
  std::optional<NameRange> range;
  Position at;

  bool is_nothing() const { return !literal && name == "_"; }
};

struct Attribute {
  std::string key;
  /// Nothing for a flag (fused_qkv).
  std::variant<std::monostate, int64_t, std::string> value;
  Position at;
};

struct Statement {
  std::vector<Operand> left, right;  // neither is empty
  std::vector<Attribute> attributes;
  Position at;
};

// What a mapping may expand to; a stranger's few words should not cost more.
inline constexpr int64_t kMostNames = int64_t{1} << 16;       // numbers in a range, heads, ranks
inline constexpr int64_t kMostStatements = int64_t{1} << 20;  // of all its statements

struct Mapping {
  std::vector<Statement> statements;
  bool reverse = false;  // the configuration asks to be run backwards
};

/// Reads a mapping: statements, one a line, or a PaddlePaddle configuration in JSON ({"aoa_statements":
/// [...], "aoa_config_reverse": ...}). InvalidArgumentError that names line, column, what is wrong and what
/// to write. What the names mean is not looked at. Pure.
Mapping parse_mapping(std::string_view text);

/// The flags a statement may have: fused_qkv, fused_qkv_old, fused_ffn.
bool is_flag(std::string_view word);

}  // namespace spolia
