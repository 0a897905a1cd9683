// The other direction of dcp_metadata.h: the `.metadata` file for a catalog.
#pragma once

#include <string>

#include "spolia/format/torch/pickle_writer.h"
#include "spolia/state/catalog.h"

namespace spolia {

/// The bytes of a `.metadata` file (a pickle of PyTorch's Metadata) that describes the catalog's tensors and
/// those of its values that lie in a file. Entries whose path is empty get their name as their path. The same
/// catalog gives the same bytes.
std::string write_dcp_metadata(const Catalog& catalog,
                               pickle::Writer::Protocol protocol = pickle::Writer::Protocol::k2);

}  // namespace spolia
