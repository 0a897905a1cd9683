// Opening a checkpoint on all ranks of a group, with its metadata read once.
#pragma once

#include <filesystem>
#include <memory>

#include "spolia/comm/group.h"
#include "spolia/format/source.h"

namespace spolia {

/// Place 0 opens it and decides what is there; the others are told, and read nothing until they read tensors.
/// Collective over the group; all give the same path. Throws on all ranks what open_source() throws.
///
/// Each rank has a catalog of its own. Ranks that are threads may share one source instead: it is immutable.
std::unique_ptr<Source> open_together(Group& group, std::shared_ptr<const Store> store,
                                      const std::filesystem::path& path);

}  // namespace spolia
