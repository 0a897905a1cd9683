// Tokens of a mapping's text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/mapping/syntax.h"

namespace spolia {

enum class TokenKind : uint8_t {
  kName,       // letters, digits and _ . $ * - /; `text` is the name
  kQuoted,     // in single or double quotes, which are taken off
  kRange,      // [a:b] right behind a name; `text` is "a:b"
  kTranspose,  // ^T right behind a name
  kArrow,
  kComma,
  kEqual,
  kEnd,  // of a statement: a line's end, ";", or the end of the text
};

struct Token {
  TokenKind kind;
  bool glued = false;     // stands right behind the token before it
  bool last_end = false;  // the kEnd that is the end of the text
  std::string_view text;  // borrowed from the mapping's text
  Position at;
};

/// Cuts a text into tokens; comments and blanks are dropped. The last token is kEnd. `first_line`: the number
/// of the text's first line.
std::vector<Token> tokenize(std::string_view text, int32_t first_line = 1);

}  // namespace spolia
