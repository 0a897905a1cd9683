// Writes checkpoints of torch.distributed.checkpoint (DCP), as dcp_source.h reads them: `.metadata`, and
// `__{writer}_0.distcp` for each writer that has something.
#pragma once

#include <memory>

#include "spolia/format/target.h"

namespace spolia {

/// A chunk becomes an item of its own, a torch.save archive of one row-major tensor; the items of a file lie
/// back to back, tensors in `contents.order`, chunks in the catalog's. Values are items at the end of writer
/// 0's file: those that the source has as archives are copied, the others pickled anew. Left out are values
/// whose objects cannot be made again, such as those that hold tensors. The checksums are the CRC-32s of the
/// chunks; without them the archives say that there are none.
///
/// UnsupportedError, naming the tensor, for a dtype that torch.save cannot hold; InvalidArgumentError where a
/// chunk's writer is none of `contents.writers`. Keeps nothing for a chunk but the catalog.
std::unique_ptr<Target> make_dcp_target(TargetContents contents);

}  // namespace spolia
