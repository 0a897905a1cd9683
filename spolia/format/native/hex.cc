#include "spolia/format/native/hex.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

constexpr std::string_view kDigits = "0123456789abcdef";

bool is_hex(std::string_view text) { return text.find_first_not_of(kDigits) == std::string_view::npos; }

uint32_t digit(char c) { return static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10); }

void append_hex(std::string& out, uint32_t number, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += kDigits[number >> shift & 15];
}

/// The numbers of `digits` digits each.
template <class Number>
std::vector<Number> numbers_of_hex(std::string_view text, size_t digits) {
  if (!is_hex(text) || text.size() % digits != 0) {
    throw CorruptError("{} are not lower-case hex digits, {} a number", quote(text), digits);
  }
  std::vector<Number> numbers;
  numbers.reserve(text.size() / digits);
  for (size_t begin = 0; begin < text.size(); begin += digits) {
    uint32_t number = 0;
    for (char c : text.substr(begin, digits)) number = number << 4 | digit(c);
    numbers.push_back(static_cast<Number>(number));
  }
  return numbers;
}

}  // namespace

std::string hex_of_bytes(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (std::byte byte : bytes) append_hex(text, std::to_integer<uint32_t>(byte), 2);
  return text;
}

std::vector<std::byte> bytes_of_hex(std::string_view text) { return numbers_of_hex<std::byte>(text, 2); }

std::string hex_of_crcs(std::span<const uint32_t> crcs) {
  std::string text;
  text.reserve(8 * crcs.size());
  for (uint32_t crc : crcs) append_hex(text, crc, 8);
  return text;
}

std::vector<uint32_t> crcs_of_hex(std::string_view text) { return numbers_of_hex<uint32_t>(text, 8); }

bool is_sha256_hex(std::string_view text) { return text.size() == 64 && is_hex(text); }

}  // namespace spolia
