#include "spolia/mapping/syntax.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <span>

#include <nlohmann/json.hpp>

#include "spolia/base/text.h"
#include "spolia/mapping/lexer.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

constexpr std::array<std::string_view, 3> kFlags = {"fused_qkv", "fused_qkv_old", "fused_ffn"};
constexpr std::array<std::string_view, 13> kKeys = {"axis",
                                                    "permute",
                                                    "dtype",
                                                    "src_dtype",
                                                    "dst_dtype",
                                                    "reshape",
                                                    "sizes",
                                                    "shape",
                                                    "fill",
                                                    "num_heads",
                                                    "num_key_value_groups",
                                                    "src_tp",
                                                    "dst_tp"};

constexpr std::string_view kShape = "a statement is NAMES -> NAMES, ATTRIBUTE = VALUE, ...";

/// The integer that is all of `text`.
std::optional<int64_t> integer(std::string_view text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string_view without_blanks(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(" \t"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

class Parser {
 public:
  explicit Parser(std::span<const Token> tokens) : tokens_(tokens) {}

  std::vector<Statement> run() {
    std::vector<Statement> statements;
    while (true) {
      while (peek().kind == TokenKind::kEnd && !peek().last_end) ++place_;
      if (peek().kind == TokenKind::kEnd) return statements;
      statements.push_back(statement());
    }
  }

 private:
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(place_ + ahead, tokens_.size() - 1)]; }
  const Token& next() { return tokens_[std::min(place_++, tokens_.size() - 1)]; }

  /// A line may end behind a comma or an arrow; the statement goes on in the next one.
  void skip_line_ends() {
    while (peek().kind == TokenKind::kEnd && peek().text == "\n") ++place_;
  }

  Statement statement() {
    Statement statement;
    statement.at = peek().at;
    statement.left.push_back(operand());
    while (peek().kind == TokenKind::kComma) {
      ++place_;
      skip_line_ends();
      statement.left.push_back(operand());
    }
    if (peek().kind != TokenKind::kArrow) fail_at_arrow(statement);
    ++place_;
    skip_line_ends();
    do_right(statement);
    return statement;
  }

  void do_right(Statement& statement) {
    bool attributes = false;
    while (true) {
      if (is_attribute()) {
        if (statement.right.empty()) fail_at(peek().at, "a name is missing behind ->; {}", kShape);
        statement.attributes.push_back(attribute());
        attributes = true;
      } else if (attributes) {
        fail_in_attributes();
      } else {
        statement.right.push_back(operand());
      }
      if (peek().kind == TokenKind::kEnd) break;
      if (peek().kind != TokenKind::kComma) fail_at_comma();
      ++place_;
      skip_line_ends();
    }
    check_misspelt_flags(statement);
  }

  bool is_attribute() const {
    if (peek().kind != TokenKind::kName) return false;
    return peek(1).kind == TokenKind::kEqual || is_flag(peek().text);
  }

  Operand operand() {
    const Token& token = next();
    if (token.kind != TokenKind::kName && token.kind != TokenKind::kQuoted) {
      fail_at(token.at, "a name is missing; {}", kShape);
    }
    if (token.text.empty()) fail_at(token.at, "a name is empty; {}", kShape);
    if (!is_utf8(token.text) || std::ranges::any_of(token.text, [](unsigned char c) { return c < 0x20; })) {
      fail_at(token.at, "the name {} holds control characters or is no UTF-8", quote(token.text));
    }
    Operand operand;
    operand.name = token.text;
    operand.literal = token.kind == TokenKind::kQuoted;
    operand.at = token.at;
    if (peek().kind == TokenKind::kRange) operand.range = range();
    if (peek().kind == TokenKind::kTranspose) {
      operand.transposed = true;
      ++place_;
    }
    return operand;
  }

  NameRange range() {
    const Token& token = next();
    const size_t colon = token.text.find(':');
    NameRange range;
    const auto begin = integer(without_blanks(token.text.substr(0, colon)));
    const auto end = colon == std::string_view::npos ? std::nullopt
                                                     : integer(without_blanks(token.text.substr(colon + 1)));
    if (!begin || !end) fail_at(token.at, "[{}] is no range; write one like [0:8]", printable(token.text));
    if (*end <= *begin) fail_at(token.at, "the range [{}:{}] holds no number", *begin, *end);
    if (*end - *begin > kMostNames) {
      fail_at(token.at, "the range [{}:{}] holds too many numbers", *begin, *end);
    }
    range.begin = *begin;
    range.end = *end;
    if (peek().kind == TokenKind::kName && peek().glued) {
      if (peek().text.find('$') != std::string_view::npos) {
        fail_at(peek().at, "{} stands behind a range; ids stand before it", quote(peek().text));
      }
      range.suffix = next().text;
    }
    return range;
  }

  Attribute attribute() {
    const Token& key = next();
    Attribute attribute{std::string(key.text), {}, key.at};
    if (is_flag(key.text)) {
      if (peek().kind == TokenKind::kEqual) fail_at(peek().at, "{} is a flag and takes no value", key.text);
      return attribute;
    }
    if (std::ranges::find(kKeys, key.text) == kKeys.end()) {
      fail_at(key.at, "there is no attribute {}{}", quote(key.text), did_you_mean(key.text, kKeys));
    }
    ++place_;  // the =
    const Token& value = next();
    if (value.kind == TokenKind::kQuoted) {
      attribute.value = std::string(value.text);
    } else if (auto number = value.kind == TokenKind::kName ? integer(value.text) : std::nullopt) {
      attribute.value = *number;
    } else if (value.kind == TokenKind::kName) {
      fail_at(value.at, "the value of {} is an integer or stands in quotes: {}='{}'", key.text, key.text,
              value.text);
    } else {
      fail_at(value.at, "the value of {} is missing; write an integer, or text in quotes", key.text);
    }
    return attribute;
  }

  [[noreturn]] void fail_at_arrow(const Statement& statement) const {
    const Token& token = peek();
    if (token.kind == TokenKind::kEnd) {
      fail_at(token.at, "the statement that begins with {} has no ->; {}", quote(statement.left[0].name),
              kShape);
    }
    fail_at(token.at, "a comma or -> is missing before {}; {}", quote(token.text), kShape);
  }

  [[noreturn]] void fail_at_comma() const {
    const Token& token = peek();
    if (token.kind == TokenKind::kArrow) fail_at(token.at, "this -> is the statement's second; {}", kShape);
    fail_at(token.at, "a comma is missing before {}", quote(token.text));
  }

  [[noreturn]] void fail_in_attributes() const {
    const Token& token = peek();
    if (token.kind != TokenKind::kName) {
      fail_at(token.at, "an attribute is missing; attributes are written like axis=1");
    }
    fail_at(token.at, "{} stands among attributes and is none{}; names come before the first attribute",
            quote(token.text), did_you_mean(token.text, kFlags));
  }

  /// A flag with a typo would pass for the name of one more tensor.
  static void check_misspelt_flags(const Statement& statement) {
    for (size_t i = 1; i < statement.right.size(); ++i) {
      const Operand& operand = statement.right[i];
      if (operand.literal) continue;
      for (std::string_view flag : kFlags) {
        if (edit_distance(operand.name, flag, 1) <= 1) {
          fail_at(operand.at, "{} looks like the flag {}; quote it if it is the name of a tensor",
                  quote(operand.name), flag);
        }
      }
    }
  }

  std::span<const Token> tokens_;
  size_t place_ = 0;
};

std::vector<Statement> parse_statements(std::string_view text, int32_t first_line) {
  return Parser(tokenize(text, first_line)).run();
}

/// The strings of a list, the others being wrong.
Mapping parse_json(std::string_view text) {
  const nlohmann::json config = nlohmann::json::parse(text, nullptr, false, true);
  if (!config.is_object()) {
    fail_at({1, 1}, "a mapping that begins with {{ is a configuration in JSON, and this is not valid JSON");
  }
  Mapping mapping;
  for (const auto& [key, value] : config.items()) {
    if (key == "aoa_config_reverse") {
      if (!value.is_boolean()) fail_at({1, 1}, "\"aoa_config_reverse\" is neither true nor false");
      mapping.reverse = value.get<bool>();
    } else if (key != "aoa_statements") {
      fail_at({1, 1}, "a configuration has \"aoa_statements\" and \"aoa_config_reverse\", not {}",
              quote(key));
    }
  }
  const auto statements = config.find("aoa_statements");
  if (statements == config.end() || !statements->is_array()) {
    fail_at({1, 1}, "the configuration has no list \"aoa_statements\"");
  }
  int32_t line = 0;
  for (const nlohmann::json& statement : *statements) {
    ++line;
    if (!statement.is_string()) fail_at({line, 1}, "this item of \"aoa_statements\" is no string");
    const std::string& line_text = statement.get_ref<const std::string&>();
    for (Statement& one : parse_statements(line_text, line)) mapping.statements.push_back(std::move(one));
  }
  return mapping;
}

}  // namespace

void fail_at(Position at, std::string_view message) {
  if (at.line == 0) throw InvalidArgumentError("{}", message);
  throw InvalidArgumentError("line {}, column {}: {}", at.line, at.column, message);
}

bool is_flag(std::string_view word) { return std::ranges::find(kFlags, word) != kFlags.end(); }

Mapping parse_mapping(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && text[first] == '{') return parse_json(text);
  return {parse_statements(text, 1), false};
}

}  // namespace spolia
