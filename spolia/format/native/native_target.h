// Writing Spolia's own folder. docs/formats/spolia.md specifies it.
#pragma once

#include <memory>

#include "spolia/format/target.h"

namespace spolia {

/// Lays out the folder. A writer's chunks lie in data-{writer}.safetensors, wider elements first, otherwise
/// in the order given; writers without chunks have no files. Equal contents, equal bytes.
///
/// Holds every dtype and name. A tensor with a replica number must have the boxes that TensorEntry::replica
/// promises, written by those ranks; its parts then spell out no box. Values are tagged JSON in the manifest
/// or, where they hold objects, torch.save archives beside it.
///
/// InvalidArgumentError where a chunk is not such a box or its writer none of the `writers`; UnsupportedError
/// for a Partial layout (reduce first), and where a header would be larger than safetensors allows (use more
/// files).
std::unique_ptr<Target> make_spolia_target(TargetContents contents);

}  // namespace spolia
