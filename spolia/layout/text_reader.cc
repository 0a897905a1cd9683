#include "spolia/layout/text_reader.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

bool is_word_letter(char c) { return (c >= 'a' && c <= 'z') || c == '_'; }

bool is_name_letter(char c) {
  return is_word_letter(c) || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '.';
}

bool is_pattern_letter(char c) { return std::string_view(" \t:\"").find(c) == std::string_view::npos; }

std::string_view without_leading_blanks(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t"), text.size()));
}

}  // namespace

TextReader::TextReader(std::string_view text, std::string_view expected)
    : text_(text), rest_(without_leading_blanks(text)), expected_(expected) {}

bool TextReader::accept(std::string_view token) {
  if (!rest_.starts_with(token)) return false;
  take(token.size());
  return true;
}

void TextReader::expect(std::string_view token) {
  if (!accept(token)) fail();
}

void TextReader::expect_end() const {
  if (!at_end()) fail();
}

std::string_view TextReader::word() { return leading(is_word_letter); }
std::string_view TextReader::name() { return quoted_or_leading(is_name_letter); }
std::string_view TextReader::pattern() { return quoted_or_leading(is_pattern_letter); }

std::string_view TextReader::leading(bool (*is_letter)(char)) {
  const auto end = std::ranges::find_if_not(rest_, is_letter);
  if (end == rest_.begin()) fail();
  return take(static_cast<size_t>(end - rest_.begin()));
}

std::string_view TextReader::quoted_or_leading(bool (*is_letter)(char)) {
  if (!rest_.starts_with('"')) return leading(is_letter);
  const size_t end = rest_.find('"', 1);
  if (end == std::string_view::npos) fail();
  return take(end + 1).substr(1, end - 1);
}

int64_t TextReader::integer() {
  int64_t value = 0;
  auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
  if (error != std::errc()) fail();
  take(static_cast<size_t>(end - rest_.data()));
  return value;
}

std::vector<int64_t> TextReader::integers() {
  const std::string_view close = accept("[") ? "]" : accept("(") ? ")" : "";
  std::vector<int64_t> values = {integer()};
  if (close.empty()) return values;
  while (accept(",")) values.push_back(integer());
  expect(close);
  return values;
}

void TextReader::fail() const {
  const std::string place = at_end() ? "at its end" : fmt::format("from {} on", quote(rest_.substr(0, 20)));
  throw InvalidArgumentError("{} is, {}, not {}", quote(text_), place, expected_);
}

/// Passes over `count` bytes, which are returned, and the blanks behind them.
std::string_view TextReader::take(size_t count) {
  const std::string_view taken = rest_.substr(0, count);
  rest_ = without_leading_blanks(rest_.substr(count));
  return taken;
}

bool is_word(std::string_view text) { return std::ranges::all_of(text, is_word_letter); }

std::string name_text(std::string_view name) {
  return std::ranges::all_of(name, is_name_letter) ? std::string(name) : quote(name);
}

}  // namespace spolia
