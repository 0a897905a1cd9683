// The small parsers of text. Zero bytes separate the texts of one input.
#include <vector>

#include "fuzz/fuzzing.h"
#include "spolia/layout/layout_text.h"

namespace spolia::fuzzing {
namespace {

/// glob_match() by its definition.
bool matches(std::string_view pattern, std::string_view text) {
  std::vector<bool> reached(text.size() + 1);  // prefixes of `text` that match the pattern so far
  reached[0] = true;
  for (char c : pattern) {
    std::vector<bool> next(text.size() + 1);
    for (size_t i = 0; i <= text.size(); ++i) {
      if (c == '*') {
        next[i] = reached[i] || (i > 0 && next[i - 1]);
      } else if (i > 0) {
        next[i] = reached[i - 1] && (c == '?' || c == text[i - 1]);
      }
    }
    reached = std::move(next);
  }
  return reached[text.size()];
}

void check_placement(std::string_view text) {
  accepts([&] {
    Placement placement = parse_placement(text);
    require(parse_placement(placement_text(placement)) == placement);
    for (size_t ndim : {0, 1, 3}) {
      accepts([&] {
        Placement counted = normalized(placement, ndim);
        require(normalized(counted, ndim) == counted);
      });
    }
  });
}

void check_layout(std::string_view text) {
  accepts([&] {
    Layout layout = parse_layout(text);
    require(parse_layout(layout.text()) == layout);
  });
}

void check_quote(std::string_view text) {
  std::string quoted = quote(text);
  require(quoted.size() >= 2 && quoted.size() < 1000 && is_utf8(quoted));
  require(std::ranges::none_of(quoted, [](unsigned char c) { return c < 0x20 || c == 0x7f; }));
}

}  // namespace

void run(Bytes bytes) {
  std::string_view first = text_of(bytes);
  std::string_view second;
  if (size_t zero = first.find('\0'); zero != std::string_view::npos) {
    second = first.substr(zero + 1);
    first = first.substr(0, zero);
  }
  check_placement(first);
  check_layout(first);
  check_quote(first);
  accepts([&] { require(!human_bytes(parse_bytes(first)).empty()); });
  if (first.size() * second.size() < 100'000) {
    require(glob_match(first, second) == matches(first, second));
  }
}

}  // namespace spolia::fuzzing
