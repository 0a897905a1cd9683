// Reads the small texts of this room, placements, meshes and rules, from left to right.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace spolia {

/// Stands between two tokens of a text; blanks between them are skipped. What is not there as expected is an
/// InvalidArgumentError that quotes the text, tells where, and says what to write.
class TextReader {
 public:
  /// `expected`, for messages: "a placement; write replicate or shard(d)". Both must outlive the reader.
  TextReader(std::string_view text, std::string_view expected);

  /// Whether `token` comes next; if so it is passed over.
  bool accept(std::string_view token);
  void expect(std::string_view token);
  bool at_end() const { return rest_.empty(); }
  void expect_end() const;

  /// Letters a to z and _.
  std::string_view word();
  /// Letters, digits, _, - and .; or, in double quotes, which are taken off, anything but those.
  std::string_view name();
  /// Anything but blanks, colons and double quotes; or, in double quotes, anything but those.
  std::string_view pattern();
  int64_t integer();
  /// One integer, or several in square or round brackets.
  std::vector<int64_t> integers();

  [[noreturn]] void fail() const;

 private:
  std::string_view take(size_t count);
  std::string_view leading(bool (*is_letter)(char));
  std::string_view quoted_or_leading(bool (*is_letter)(char));

  std::string_view text_, rest_, expected_;
};

/// Whether TextReader::word() reads all of `text`, unless that is empty.
bool is_word(std::string_view text);

/// `name` as TextReader::name() reads it: in quotes where it needs them. For names without quotes,
/// backslashes and control characters.
std::string name_text(std::string_view name);

}  // namespace spolia
