#include "spolia/format/json_reader.h"

#include "spolia/base/error.h"

namespace spolia {

void JsonReader::refuse(std::string_view met) const {
  throw CorruptError("{}: {} is not expected here", where(), met);
}

void JsonReader::refuse_text(size_t position) const {
  throw CorruptError("{}: byte {} of the JSON text breaks the rules of UTF-8 or JSON", where(), position);
}

bool JsonReader::parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) {
  refuse_text(position);
}

void read_json(std::string_view text, JsonReader& reader) {
  // The parser would skip a byte order mark and take a NUL byte for the end of the text.
  if (!text.starts_with('{')) reader.refuse_text(0);
  if (size_t nul = text.find('\0'); nul != std::string_view::npos) reader.refuse_text(nul);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
}

}  // namespace spolia
