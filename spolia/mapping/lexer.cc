#include "spolia/mapping/lexer.h"

#include <algorithm>

#include "spolia/base/text.h"

namespace spolia {
namespace {

bool is_name_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_.$*-/").find(c) != std::string_view::npos;
}

class Lexer {
 public:
  Lexer(std::string_view text, int32_t line) : text_(text), line_(line) {}

  std::vector<Token> run() {
    while (place_ < text_.size()) step();
    add(TokenKind::kEnd, 0);
    tokens_.back().last_end = true;
    return std::move(tokens_);
  }

 private:
  Position here() const { return {line_, static_cast<int32_t>(place_ - line_begin_) + 1}; }
  char at(size_t i) const { return i < text_.size() ? text_[i] : '\0'; }
  bool is_arrow(size_t i) const { return at(i) == '-' && at(i + 1) == '>'; }

  /// A token of the next `length` bytes, which are passed over; `text` is what of them it is about.
  void add(TokenKind kind, size_t length, std::string_view text) {
    tokens_.push_back({kind, place_ == glue_ && place_ > 0, false, text, here()});
    place_ += length;
    glue_ = place_;
  }
  void add(TokenKind kind, size_t length) { add(kind, length, text_.substr(place_, length)); }

  void step() {
    const char c = text_[place_];
    if (c == ' ' || c == '\t' || c == '\r') {
      ++place_;
    } else if (c == '#') {
      place_ = std::min(text_.find('\n', place_), text_.size());
    } else if (c == '\n') {
      add(TokenKind::kEnd, 1);
      ++line_;
      line_begin_ = place_;
    } else if (c == ';') {
      add(TokenKind::kEnd, 1);
    } else if (c == ',') {
      add(TokenKind::kComma, 1);
    } else if (c == '=') {
      add(TokenKind::kEqual, 1);
    } else if (is_arrow(place_)) {
      add(TokenKind::kArrow, 2);
    } else if (c == '"' || c == '\'') {
      quoted(c);
    } else if (c == '[') {
      range();
    } else if (c == '^') {
      transpose();
    } else if (is_name_letter(c)) {
      size_t end = place_;
      while (end < text_.size() && is_name_letter(text_[end]) && !is_arrow(end)) ++end;
      add(TokenKind::kName, end - place_);
    } else {
      fail_at(here(), "{} cannot stand here; put names that hold such characters in quotes",
              quote(text_.substr(place_, 1)));
    }
  }

  void quoted(char mark) {
    const size_t end = text_.find_first_of(mark == '"' ? "\"\n" : "'\n", place_ + 1);
    if (at(end) != mark) fail_at(here(), "this quote is not closed before the end of the line");
    add(TokenKind::kQuoted, end + 1 - place_, text_.substr(place_ + 1, end - place_ - 1));
  }

  void range() {
    const size_t end = text_.find_first_not_of("0123456789: \t", place_ + 1);
    if (at(end) != ']' || tokens_.empty() || place_ != glue_) {
      fail_at(here(),
              "a range is written right behind a name, like experts[0:8]; values that are lists stand "
              "in quotes, like permute='[1, 0]'");
    }
    add(TokenKind::kRange, end + 1 - place_, text_.substr(place_ + 1, end - place_ - 1));
  }

  void transpose() {
    const bool goes_on = is_name_letter(at(place_ + 2)) && !is_arrow(place_ + 2);
    if (at(place_ + 1) != 'T' || goes_on || tokens_.empty() || place_ != glue_) {
      fail_at(here(), "^ is only written as ^T, at the end of a name: weight^T");
    }
    add(TokenKind::kTranspose, 2);
  }

  std::string_view text_;
  size_t place_ = 0;
  size_t glue_ = 0;  // where the last token ended
  size_t line_begin_ = 0;
  int32_t line_;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view text, int32_t first_line) {
  return Lexer(text, first_line).run();
}

}  // namespace spolia
