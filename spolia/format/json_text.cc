#include "spolia/format/json_text.h"

#include <nlohmann/json.hpp>

namespace spolia {

std::string json_string(std::string_view text) { return nlohmann::json(text).dump(); }

}  // namespace spolia
