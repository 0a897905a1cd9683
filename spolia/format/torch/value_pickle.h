// The other direction of pickle_value.h: a value as the torch.save archive of an object.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "spolia/state/value.h"

namespace spolia {

/// Whether Python would make the value again from what write_value_archive() writes: whether all of its
/// records can be made, its keys and members of sets be hashed, its texts and names be spelled, and whether
/// it is nested no deeper than values are read.
bool can_pickle(const Value& value);

/// The bytes of the archive that torch.save would write of the value, and that reads back as an equal one.
/// Precondition: can_pickle().
std::string write_value_archive(const Value& value);

/// The value of such an archive, compressed or not, whoever wrote it. `where` names it in messages.
/// CorruptError or UnsupportedError where it is none.
Value read_value_archive(std::vector<std::byte> archive, std::string where);

}  // namespace spolia
