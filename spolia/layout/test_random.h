// Random numbers for this room's property tests.
#pragma once

#include <cstdint>

#include <rapidcheck.h>

namespace spolia {

/// A number in [begin, end), drawn evenly from the start: rapidcheck's own inRange() begins with the lowest
/// ones and takes many cases to reach the others. For use inside a property.
inline int64_t pick(int64_t begin, int64_t end) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(begin, end));
}

}  // namespace spolia
