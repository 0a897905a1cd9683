// The order in which tensors are best read.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

/// The places in `sources`, which lists tensors of the catalog, in the order in which its files hold those
/// tensors' first chunks: files are read front to back.
std::vector<size_t> order_of_reading(std::span<const size_t> sources, const Catalog& source);

}  // namespace spolia
