// Distribution: which writer writes which part of each tensor. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spolia/layout/layout_rules.h"
#include "spolia/state/catalog.h"

namespace spolia {

/// Gives every tensor of the catalog the layout that the rules say, and as chunks the boxes of all its ranks:
/// each shard once, whole or in parts written by some of the ranks that hold it, as assign_owners() balances
/// them. A chunk's rank is its extent's `file` (offset 0, length the box's bytes). Chunks are in the order of
/// their ranks, then of the rank's local buffer. Returns the number of writers, rules.ranks(); some may have
/// nothing to write.
///
/// `replica` is set where it says which ranks write: where they have whole shards and one number. The same
/// catalog and rules give the same answer.
///
/// A tensor without elements has one empty chunk. InvalidArgumentError where a rule's pattern matches no
/// tensor or its placements do not suit one; UnsupportedError where a rule cuts a tensor of a dtype finer
/// than a byte, or a rank's shard into more than Layout::kMaxBoxes boxes.
size_t distribute(Catalog& catalog, const LayoutRules& rules);

/// Gives every tensor one chunk, the whole, and no layout, and packs them, in `order`, into the files of
/// writers: each takes as many consecutive tensors as have at most `max_bytes` (> 0); a larger tensor is
/// alone. Returns the number of writers; none is without tensors.
size_t pack(Catalog& catalog, std::span<const size_t> order, int64_t max_bytes);

}  // namespace spolia
