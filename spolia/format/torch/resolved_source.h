// A source whose payloads and values are all known when it is opened.
#pragma once

#include <memory>
#include <vector>

#include "spolia/format/open_files.h"
#include "spolia/format/source.h"

namespace spolia {

struct ResolvedTensor {
  TensorEntry entry;              // `extents` are filled from the payloads
  std::vector<Payload> payloads;  // of each of the entry's boxes
};

/// The source of `tensors`. `catalog` has everything but them; `files` are the catalog's. CorruptError where
/// a name occurs twice.
std::unique_ptr<Source> make_resolved_source(Catalog catalog, std::vector<ResolvedTensor> tensors,
                                             std::unique_ptr<OpenFiles> files);

}  // namespace spolia
