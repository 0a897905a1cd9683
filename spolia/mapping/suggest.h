// "did you mean": names near a wrong one.
#pragma once

#include <cstdint>
#include <ranges>
#include <string>
#include <string_view>

#include "spolia/base/text.h"

namespace spolia {

/// The number of insertions, deletions, substitutions and swaps of neighbours between two texts; `limit` + 1
/// where it is more than `limit`.
size_t edit_distance(std::string_view a, std::string_view b, size_t limit);

/// How far off a name may be and still be suggested.
inline size_t suggestion_limit(std::string_view name) { return name.size() < 4 ? 1 : 2 + name.size() / 12; }

/// "; did you mean "axis"?", or nothing where no candidate is near. The first of the nearest is suggested.
template <std::ranges::input_range Candidates>
std::string did_you_mean(std::string_view name, const Candidates& candidates) {
  size_t limit = suggestion_limit(name);
  std::string best;
  for (const auto& candidate : candidates) {
    const std::string_view text = candidate;
    if (const size_t distance = edit_distance(name, text, limit); distance <= limit && distance > 0) {
      best = text;
      limit = distance - 1;
      if (limit == 0) break;
    }
  }
  return best.empty() ? "" : "; did you mean " + quote(best) + "?";
}

}  // namespace spolia
