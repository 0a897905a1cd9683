// What --layout takes: layout rules as text or as JSON.
#pragma once

#include <string_view>

#include "spolia/layout/layout_rules.h"

namespace spolia {

/// The rules of a text (layout_rules.h) or, where its first letter is a `{`, of a JSON object with the same
/// content:
///
///   {"mesh": MESH,
///    "rules": [{"match": "*.weight", "placements": ["shard(0)", "replicate"]},
///              {"match": "*.bias", "placements": ["shard(0)"], "over": ["tp"]},
///              {"match": "experts.*", "placements": ["shard(0)"], "mesh": MESH}]}
///
/// MESH: a text like "2x2 (dp, tp) on [0, 1, 6, 7]", or {"shape": [2, 2], "dims": ["dp", "tp"],
/// "ranks": [0, 1, 6, 7]}, of which dims and ranks may be left out. "rules" may be left out; other keys may
/// not be there. InvalidArgumentError naming line or rule.
LayoutRules read_layout_rules(std::string_view text);

}  // namespace spolia
