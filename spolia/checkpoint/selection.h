// Which tensors and values of a checkpoint take part, and what they are called afterwards.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

struct Selection {
  std::string root;                 // only what lies below this key, without it: "model"
  std::vector<std::string> select;  // patterns (glob_match) over the source's full names; none: everything
  std::vector<std::string> drop;    // patterns likewise, taken out afterwards
  std::string strip_prefix;         // taken off the front of the names that have it
  std::string add_prefix;           // put before every name, last
};

/// A tensor or value that takes part.
struct SelectedEntry {
  size_t index = 0;  // in the catalog's tensors or values
  std::string name;  // its new name
  KeyPath path;      // where in a nested state dict it belongs now; empty where it has a new name
};

struct SelectedEntries {
  std::vector<SelectedEntry> tensors;  // in the catalog's order
  std::vector<SelectedEntry> values;   // likewise
};

/// The selected tensors and values. A key may have dots of its own, so what lies below the root is decided by
/// recorded paths where there are any. InvalidArgumentError where a root, pattern or prefix matches nothing
/// (it is probably mistyped), where two entries would have one name, or where no tensor is left.
SelectedEntries select_entries(const Catalog& catalog, const Selection& selection);

}  // namespace spolia
