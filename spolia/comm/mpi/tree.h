// The tree up which the ranks of a group agree, and down which they are told so: its root is place 0.
#pragma once

#include <algorithm>
#include <vector>

namespace spolia {

/// Of place 0 there is none.
inline int parent_of(int place) { return place & (place - 1); }

/// Rising; so are their subtrees, one after the other.
inline std::vector<int> children_of(int place, int ranks) {
  std::vector<int> children;
  for (int bit = 1; (place & bit) == 0 && place + bit < ranks; bit <<= 1) children.push_back(place + bit);
  return children;
}

/// A place and all below it are the places from it to before this one.
inline int end_of_subtree(int place, int ranks) {
  return place == 0 ? ranks : std::min(ranks, place + (place & -place));
}

}  // namespace spolia
