#include "spolia/format/torch/pickle_text.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/text.h"

namespace spolia::pickle {
namespace {

template <class Number>
std::optional<Number> parse_whole(std::string_view text) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  Number value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_negative(std::string_view bytes) { return !bytes.empty() && (bytes.back() & 0x80) != 0; }

/// Negates a two's complement integer of 32-bit limbs, least first.
void negate(std::vector<uint32_t>& limbs) {  // ~x + 1
  uint64_t carry = 1;
  for (uint32_t& limb : limbs) {
    carry += static_cast<uint32_t>(~limb);
    limb = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
}

/// The magnitude of a two's complement integer as 32-bit limbs, least first.
std::vector<uint32_t> magnitude(std::string_view bytes) {
  bool negative = is_negative(bytes);
  std::vector<uint32_t> limbs(bytes.size() / 4 + 1, negative ? ~uint32_t{0} : 0);
  std::memcpy(limbs.data(), bytes.data(), bytes.size());
  if (negative) negate(limbs);
  return limbs;
}

/// limbs * 10 + digit, in place.
void append_digit(std::vector<uint32_t>& limbs, uint32_t digit) {
  uint64_t carry = digit;
  for (uint32_t& limb : limbs) {
    carry += uint64_t{limb} * 10;
    limb = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  if (carry != 0) limbs.push_back(static_cast<uint32_t>(carry));
}

/// Divides `limbs` in place; gives the remainder.
uint32_t divide(std::vector<uint32_t>& limbs, uint32_t divisor) {
  uint64_t rest = 0;
  for (size_t i = limbs.size(); i-- > 0;) {
    uint64_t part = rest << 32 | limbs[i];
    limbs[i] = static_cast<uint32_t>(part / divisor);
    rest = part % divisor;
  }
  while (!limbs.empty() && limbs.back() == 0) limbs.pop_back();
  return static_cast<uint32_t>(rest);
}

void append_utf8(std::string& out, uint32_t c) {
  auto byte = [&](uint32_t b) { out += static_cast<char>(b); };
  if (c < 0x80) {
    byte(c);
  } else if (c < 0x800) {
    byte(0xC0 | c >> 6);
    byte(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    byte(0xE0 | c >> 12);
    byte(0x80 | (c >> 6 & 0x3F));
    byte(0x80 | (c & 0x3F));
  } else {
    byte(0xF0 | c >> 18);
    byte(0x80 | (c >> 12 & 0x3F));
    byte(0x80 | (c >> 6 & 0x3F));
    byte(0x80 | (c & 0x3F));
  }
}

/// The number that exactly `count` digits at the front of `text` spell in `base`.
std::optional<uint32_t> parse_digits(std::string_view text, size_t count, int base) {
  if (text.size() < count) return std::nullopt;
  uint32_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + count, value, base);
  if (error != std::errc() || end != text.data() + count) return std::nullopt;
  return value;
}

/// Appends what the escape at the front of `text` (which starts with a backslash) means; gives its length.
size_t append_escape(std::string& out, std::string_view text) {
  constexpr std::string_view kLetters = "\\'\"abfnrtv";
  constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
  char c = text.size() > 1 ? text[1] : '\0';
  if (size_t i = kLetters.find(c); i != std::string_view::npos) {
    out += kMeanings[i];
    return 2;
  }
  if (c == 'x') {
    if (auto value = parse_digits(text.substr(2), 2, 16)) {
      out += static_cast<char>(*value);
      return 4;
    }
  }
  auto is_octal = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '7'; };
  size_t digits = !is_octal(1) ? 0 : !is_octal(2) ? 1 : !is_octal(3) ? 2 : 3;
  if (digits > 0) {
    out += static_cast<char>(*parse_digits(text.substr(1), digits, 8));
    return 1 + digits;
  }
  out += '\\';
  return 1;
}

}  // namespace

int64_t small_integer(std::string_view bytes) {
  int64_t value = is_negative(bytes) ? -1 : 0;
  std::memcpy(&value, bytes.data(), std::min<size_t>(bytes.size(), 8));
  return value;
}

std::string_view without_sign_extension(std::string_view bytes) {
  char sign = is_negative(bytes) ? '\xff' : '\0';
  while (bytes.size() > 1 && bytes.back() == sign && ((bytes[bytes.size() - 2] ^ sign) & 0x80) == 0) {
    bytes.remove_suffix(1);
  }
  return bytes;
}

std::string decimal_text(std::string_view bytes) {
  constexpr uint32_t kBillion = 1'000'000'000;
  std::vector<uint32_t> limbs = magnitude(bytes);
  std::vector<uint32_t> groups;  // nine digits each, least first
  do {
    groups.push_back(divide(limbs, kBillion));
  } while (!limbs.empty());
  std::string out = is_negative(bytes) ? "-" : "";
  out += std::to_string(groups.back());
  for (size_t i = groups.size() - 1; i-- > 0;) out += fmt::format("{:09}", groups[i]);
  return out;
}

std::string binary_integer(std::string_view decimal) {
  bool negative = decimal.starts_with('-');
  if (negative) decimal.remove_prefix(1);
  std::vector<uint32_t> limbs;
  for (char c : decimal) append_digit(limbs, static_cast<uint32_t>(c - '0'));
  limbs.push_back(0);  // room for the sign
  if (negative) negate(limbs);
  std::string bytes(limbs.size() * sizeof(uint32_t), '\0');
  std::memcpy(bytes.data(), limbs.data(), bytes.size());
  bytes.resize(without_sign_extension(bytes).size());
  return bytes;
}

bool is_decimal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

std::string plain_decimal(std::string_view text) {
  bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  text.remove_prefix(std::min(text.find_first_not_of('0'), text.size() - 1));
  std::string out = negative && text != "0" ? "-" : "";
  return out.append(text);
}

std::optional<int64_t> parse_integer(std::string_view text) { return parse_whole<int64_t>(text); }
std::optional<double> parse_float(std::string_view text) { return parse_whole<double>(text); }

std::optional<std::string> string_literal(std::string_view text) {
  if (text.size() < 2 || text.front() != text.back() || (text.front() != '\'' && text.front() != '"')) {
    return std::nullopt;
  }
  text = text.substr(1, text.size() - 2);
  std::string out;
  while (!text.empty()) {
    size_t used = 1;
    if (text[0] == '\\') {
      used = append_escape(out, text);
    } else {
      out += text[0];
    }
    text.remove_prefix(used);
  }
  return out;
}

std::optional<std::string> raw_unicode(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    size_t digits = text.starts_with("\\u") ? 4 : text.starts_with("\\U") ? 8 : 0;
    auto code = digits > 0 ? parse_digits(text.substr(2), digits, 16) : std::nullopt;
    if (code && *code > 0x10FFFF) return std::nullopt;
    append_utf8(out, code ? *code : static_cast<unsigned char>(text[0]));
    text.remove_prefix(code ? 2 + digits : 1);
  }
  return out;
}

std::optional<std::string> latin1(std::string_view utf8) {
  std::string out;
  for (size_t i = 0; i < utf8.size(); ++i) {
    unsigned char c = static_cast<unsigned char>(utf8[i]);
    if (c >= 0x80) {  // only U+0080 to U+00FF, two bytes that start with C2 or C3
      if ((c != 0xC2 && c != 0xC3) || i + 1 == utf8.size() || (utf8[i + 1] & 0xC0) != 0x80)
        return std::nullopt;
      c = static_cast<unsigned char>(c << 6 | (utf8[++i] & 0x3F));
    }
    out += static_cast<char>(c);
  }
  return out;
}

std::string utf8_of_latin1(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (char c : bytes) append_utf8(out, static_cast<unsigned char>(c));
  return out;
}

bool is_python_text(std::string_view text) {
  if (is_utf8(text)) return true;
  // U+D800 to U+DFFF are ED A0 80 to ED BF BF; U+D000 to U+D7FF, which are no surrogates, the same with a
  // lower second byte.
  std::string without_surrogates(text);
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] == '\xED' && (text[i + 1] & 0xE0) == 0xA0) without_surrogates[i + 1] = '\x80';
  }
  return is_utf8(without_surrogates);
}

}  // namespace spolia::pickle
