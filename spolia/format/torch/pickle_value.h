// From the pickle machine's values to a tree of Values.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string_view>

#include "spolia/format/torch/pickle.h"
#include "spolia/state/value.h"

namespace spolia::pickle {

/// What a tree may grow to. A pickle may refer to one thing from many places; in the tree each place gets its
/// own copy.
struct TreeLimits {
  size_t depth = 200;
  size_t nodes = size_t{1} << 20;
  size_t bytes = size_t{1} << 26;  // of texts

  /// What a pickle of that many bytes justifies: well more than it can spell out without sharing.
  static TreeLimits for_pickle(size_t bytes);
};

/// What a hook's handle stands for; nothing: a record named "handle".
using HandleToValue = std::function<std::optional<Value>(const Ref& handle)>;

/// The tree of `root`. An object becomes a record of the global that would be called, with the arguments
/// (keyword arguments as a dict after them), state, items and entries. A persistent id becomes a record named
/// "persistent_id"; a call of something that is no global one named "call", whose first argument that is.
///
/// CorruptError, naming `where`, for a dict that has the same text or integer as a key twice, and for a tree
/// beyond the limits, such as one that holds itself.
Value to_value(const Ref& root, std::string_view where, const TreeLimits& limits = {},
               const HandleToValue& handle_to_value = nullptr);

}  // namespace spolia::pickle
