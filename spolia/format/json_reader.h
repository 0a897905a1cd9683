// Reading JSON from strangers: piece by piece, without a tree, refusing all that is not asked for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace spolia {

/// Receives the pieces of one JSON object in the order of the text. A reader overrides the pieces it has a
/// use for; the others are refused with a CorruptError. Repeated keys arrive twice: the reader refuses them.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("true or false"); }
  bool number_integer(int64_t) override { refuse("a negative number"); }
  bool number_unsigned(uint64_t) override { refuse("a number"); }
  bool number_float(double, const std::string&) override {
    refuse("a number with a fraction, an exponent or more than 64 bits");
  }
  bool string(std::string&) override { refuse("a string"); }
  bool start_object(size_t) override { refuse("an object"); }
  bool key(std::string&) override { refuse("a key"); }
  bool end_object() override { refuse("the end of an object"); }
  bool start_array(size_t) override { refuse("an array"); }
  bool end_array() override { refuse("the end of an array"); }
  bool binary(nlohmann::json::binary_t&) final { refuse("binary data"); }  // not in JSON's text form
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) final;

  /// CorruptError: the text is not UTF-8 JSON at this byte.
  [[noreturn]] void refuse_text(size_t position) const;

 protected:
  /// What is being read and how far the reader has come, for messages: `FILE: the header's tensor "x"`.
  virtual std::string where() const = 0;

  /// CorruptError: such a piece has no place here.
  [[noreturn]] void refuse(std::string_view met) const;
};

/// Feeds `text`, which must be one JSON object in UTF-8 that starts with its first byte, to the reader.
/// CorruptError naming the position where it is not so. Nothing recurses, however deep the text nests.
void read_json(std::string_view text, JsonReader& reader);

}  // namespace spolia
