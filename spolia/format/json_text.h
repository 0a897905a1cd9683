// Pieces of JSON as text, for writers that put a file together line by line.
#pragma once

#include <string>
#include <string_view>

namespace spolia {

/// `text` as a JSON string, in its quotes. Precondition: it is UTF-8.
std::string json_string(std::string_view text);

}  // namespace spolia
