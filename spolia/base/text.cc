#include "spolia/base/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

/// The length of the valid UTF-8 sequence at the front of `text`, or 0.
size_t utf8_sequence(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC2 ? 2 : 0;
  if (length == 0 || lead > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if (lead == 0xE0 && byte(1) < 0xA0) return 0;  // overlong
  if (lead == 0xED && byte(1) > 0x9F) return 0;  // a surrogate
  if (lead == 0xF0 && byte(1) < 0x90) return 0;  // overlong
  if (lead == 0xF4 && byte(1) > 0x8F) return 0;  // beyond U+10FFFF
  return length;
}

/// The length of the character at the front of `text`, or 0 where it would not show as itself: a byte that is
/// not UTF-8, a control character (C0, DEL, C1), or one that breaks or reorders a line (U+2028 to U+202E,
/// U+2066 to U+2069).
size_t shown_character(std::string_view text) {
  const size_t length = utf8_sequence(text);
  const std::string_view character = text.substr(0, length);
  auto lies_between = [&](std::string_view first, std::string_view last) {
    return length == first.size() && first <= character && character <= last;
  };
  const bool harmful = lies_between({"\0", 1}, "\x1f") || character == "\x7f" ||
                       lies_between("\xc2\x80", "\xc2\x9f") || lies_between("\xe2\x80\xa8", "\xe2\x80\xae") ||
                       lies_between("\xe2\x81\xa6", "\xe2\x81\xa9");
  return harmful ? 0 : length;
}

/// "" and "B" are 1, "k" and "KiB" 1024, "KB" 1000, and so on; nothing for other text.
std::optional<int64_t> bytes_of_unit(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  constexpr std::string_view kPrefixes = "KMGT", kLower = "kmgt";
  size_t power = std::min(kPrefixes.find(unit[0]), kLower.find(unit[0]));
  std::string_view rest = unit.substr(1);
  if (power == std::string_view::npos || !(rest.empty() || rest == "iB" || rest == "B")) return std::nullopt;
  int64_t scale = 1;
  for (size_t i = 0; i <= power; ++i) scale *= rest == "B" ? 1000 : 1024;
  return scale;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    size_t length = utf8_sequence(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string quote(std::string_view name) {
  constexpr size_t kShown = 200;
  std::string out = "\"";
  size_t total = name.size();
  while (!name.empty() && total - name.size() < kShown) {
    size_t length = shown_character(name);
    char c = name[0];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (length == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += name.substr(0, length);
    }
    name.remove_prefix(std::max<size_t>(length, 1));
  }
  out += '"';
  if (!name.empty()) out += fmt::format(" ({} bytes long)", total);
  return out;
}

std::string printable(std::string_view name) {
  for (std::string_view rest = name; !rest.empty();) {
    const size_t length = shown_character(rest);
    if (length == 0) return quote(name);
    rest.remove_prefix(length);
  }
  return std::string(name);
}

std::string human_bytes(int64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (value /= 1024; value >= 1023.95 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

int64_t parse_bytes(std::string_view text) {
  const char* last = text.data() + text.size();
  int64_t whole = 0;
  auto [end, error] = std::from_chars(text.data(), last, whole);
  bool has_fraction = error == std::errc() && end != last && *end == '.';
  double value = 0;
  if (has_fraction) {
    auto parsed = std::from_chars(text.data(), last, value, std::chars_format::fixed);
    end = parsed.ptr;
    error = parsed.ec;
  }
  std::string_view unit(end, last);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);

  std::optional<int64_t> scale = bytes_of_unit(unit), bytes;
  if (error == std::errc() && whole >= 0 && text[0] != '-' && scale) {
    double product = value * static_cast<double>(*scale);
    if (!has_fraction)
      bytes = try_mul(whole, *scale);  // exact
    else if (product < 9.2e18)
      bytes = static_cast<int64_t>(product);
  }
  if (!bytes) {
    throw InvalidArgumentError("{} is not a byte count; write one like 1048576, 64MiB or 5GB", quote(text));
  }
  return *bytes;
}

bool glob_match(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, retry = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {  // before the literal test: a '*' in the text is no star
      star = p++;
      retry = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++retry;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace spolia
