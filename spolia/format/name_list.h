// Names in messages.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/text.h"

namespace spolia {

/// `"a", "b", "c" and 7 more`: at most `shown` (> 0) of the names, quoted.
inline std::string name_list(const std::vector<std::string>& names, size_t shown = 8) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), shown); ++i) {
    out += (i == 0 ? "" : ", ") + quote(names[i]);
  }
  if (names.size() > shown) out += fmt::format(" and {} more", names.size() - shown);
  return out;
}

}  // namespace spolia
