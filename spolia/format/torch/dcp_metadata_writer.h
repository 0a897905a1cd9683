// The other direction of dcp_metadata.h: the `.metadata` file for a catalog.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "spolia/format/torch/pickle_writer.h"
#include "spolia/state/catalog.h"

namespace spolia {

/// What the metadata says of a value; the texts live elsewhere.
struct DcpValueItem {
  std::string_view name;
  const KeyPath* path = nullptr;
  Extent item;
};

struct DcpMetadataOptions {
  /// Where the item of a chunk lies; nullptr: in the tensor's extent. Called once for each chunk, in the
  /// catalog's order.
  std::function<Extent(size_t tensor, size_t chunk)> item_of;
  pickle::Writer::Protocol protocol = pickle::Writer::Protocol::k4;
};

/// Hands the bytes of a `.metadata` file (a pickle of PyTorch's Metadata) to `write`, piece by piece from the
/// front, in pieces of about 1 MiB. It describes the catalog's tensors and `values`; of the catalog's own
/// values it says nothing. Entries whose path is empty get their name as their path. The same arguments give
/// the same bytes.
///
/// Takes, besides a piece, 4 bytes a tensor and about 70 for each distinct step of a path that is no
/// tensor's or value's whole name.
void write_dcp_metadata(const Catalog& catalog, std::span<const DcpValueItem> values,
                        const DcpMetadataOptions& options,
                        const std::function<void(std::string_view piece)>& write);

/// The whole file for the catalog's tensors, whose extents are the items, and those of its values that lie in
/// a file.
std::string write_dcp_metadata(const Catalog& catalog,
                               pickle::Writer::Protocol protocol = pickle::Writer::Protocol::k2);

}  // namespace spolia
