// How far apart two runs of elements are.
#pragma once

#include <cstdint>
#include <string>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// Two numbers are close where |a - b| <= absolute + relative * |b|, as numpy.isclose has it. A NaN is close
/// to a NaN, an infinity to itself alone. Both are finite and >= 0.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};

/// What compare_elements() finds. The distances are over all elements, also those that are close; those
/// with a NaN on one side count as differing, but have no distance. Of a complex number each part is compared
/// by itself, and the larger distance counts.
struct ElementDifferences {
  int64_t differing = 0;  // elements that are not close
  int64_t nan_on_one_side = 0;
  int64_t first = -1;       // the first of the differing ones; -1 where there is none
  double max_absolute = 0;  // |a - b|; infinite where just one is
  double sum_absolute = 0;
  double max_relative = 0;  // |a - b| / |b|, where b is not 0
};

/// Compares `count` contiguous elements. Integers are compared exactly, whatever their size; elements of a
/// dtype that is carried as bytes are close where their bytes are equal, and have no distance (of sub-byte
/// dtypes, an element is a byte). Pointers need no alignment.
ElementDifferences compare_elements(DType dtype, const void* a, const void* b, int64_t count,
                                    const Tolerance& tolerance);

/// One element for people: "0.1", "-3", "true", "1-2j", "nan"; of a dtype carried as bytes their hex digits,
/// the highest byte first: "0x3c".
std::string element_text(DType dtype, const void* element);

}  // namespace spolia
