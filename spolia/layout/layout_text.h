// Device meshes and layouts from their texts: the inverses of DeviceMesh::text() and Layout::text().
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spolia/layout/device_mesh.h"
#include "spolia/layout/layout.h"
#include "spolia/layout/text_reader.h"

namespace spolia {

/// The mesh of a text like "2x2 (dp, tp) on [0, 1, 6, 7]"; names and ranks may be left out, blanks are free.
/// InvalidArgumentError, quoting the text, where it is none, and where DeviceMesh refuses what it says.
DeviceMesh parse_mesh(std::string_view text);

/// The layout of a text like "[strided(0, 2), shard(0)] over 2x2 (dp, tp)". InvalidArgumentError likewise.
Layout parse_layout(std::string_view text);

// The same as parts of a longer text, from where the reader stands.

DeviceMesh read_mesh(TextReader& reader);
/// What follows the bracket of "(dp, tp)": at least one name.
std::vector<std::string> read_dim_names(TextReader& reader);
/// "[shard(0), replicate]", "[]".
std::vector<Placement> read_placements(TextReader& reader);

}  // namespace spolia
