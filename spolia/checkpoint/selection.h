// Which tensors of a checkpoint take part, and what they are called afterwards.
#pragma once

#include <cstddef>
#include <optional>
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

struct SelectedTensor {
  size_t tensor = 0;  // an index into the catalog's tensors
  std::string name;   // its new name
};

/// What the tensor or value `name` is called below the key `root`, or nothing where it does not lie there. A
/// key may have dots of its own, so the recorded path decides where there is one.
std::optional<std::string> name_below(const std::string& root, const std::string& name, const KeyPath& path);

/// The selected tensors, in the catalog's order. InvalidArgumentError where a root, pattern or prefix matches
/// nothing (it is probably mistyped), where two tensors would have one name, or where nothing is left.
std::vector<SelectedTensor> select_tensors(const Catalog& catalog, const Selection& selection);

}  // namespace spolia
