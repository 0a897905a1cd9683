// Running a mapping backwards.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/mapping/program.h"
#include "spolia/mapping/tensor_list.h"

namespace spolia {

/// What is known of a program's tensors when it ran forwards; nothing where the tensors it starts from are
/// not known.
struct ForwardFacts {
  std::vector<Dims> part_sizes;     // Runner::part_sizes()
  std::vector<DType> moved_dtypes;  // Runner::moved_dtypes()
};

/// The program that makes of a program's results what it started from. `there`: the names of the tensors that
/// the result starts from.
///
/// Every tensor that the program read is made again from one thing that was made of it, the first that will
/// do; other copies of it are dropped, which notes tell. InvalidArgumentError with line and column where
/// nothing will do: a part of it was dropped, sizes or a dtype are not known. What the program made new is
/// dropped; what it dropped is not made.
Program reversed_program(const Program& program, const NameList& there,
                         const std::optional<ForwardFacts>& facts);

}  // namespace spolia
