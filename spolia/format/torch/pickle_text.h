// The texts inside pickles: numbers in decimal, Python's string escapes, encodings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spolia::pickle {

/// The two's complement little-endian integer that `bytes` (at most 8) hold; 0 for none.
int64_t small_integer(std::string_view bytes);

/// `bytes` without the sign bytes that say nothing: what is left is at most 8 long where the value fits 64
/// bits.
std::string_view without_sign_extension(std::string_view bytes);

/// A two's complement little-endian integer of any length, in decimal. Quadratic in the length.
std::string decimal_text(std::string_view bytes);

/// The other way round: the shortest such form of a decimal integer (is_decimal()). Quadratic too.
std::string binary_integer(std::string_view decimal);

/// Whether `text` is an optional '-' and decimal digits.
bool is_decimal(std::string_view text);

/// A decimal integer (is_decimal()) without needless zeros.
std::string plain_decimal(std::string_view text);

/// The whole of `text` as an int64 or a double (inf and nan included); nothing where it is no such thing.
std::optional<int64_t> parse_integer(std::string_view text);
std::optional<double> parse_float(std::string_view text);

/// What a quoted Python literal ('it\'s') means; nothing where the quotes are missing. Unknown escapes stay
/// as they are.
std::optional<std::string> string_literal(std::string_view text);

/// Python's raw-unicode-escape: Latin-1 with \uXXXX and \UXXXXXXXX, as UTF-8. Nothing for a code point beyond
/// Unicode.
std::optional<std::string> raw_unicode(std::string_view text);

/// UTF-8 as Latin-1; nothing where a character is not in it.
std::optional<std::string> latin1(std::string_view utf8);
/// The other way round.
std::string utf8_of_latin1(std::string_view bytes);

/// Whether Python can hold `text`, as pickles spell it: UTF-8, where surrogates may stand alone.
bool is_python_text(std::string_view text);

}  // namespace spolia::pickle
