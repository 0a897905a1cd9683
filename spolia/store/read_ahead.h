// A hint for reading a file in short runs.
#pragma once

#include <cstdint>

#include "spolia/store/store.h"

namespace spolia {

/// Hints that this part of the file will be read soon, in pieces that the system does not see to follow each
/// other: it starts to read it into its cache, without waiting. Up to 128 KiB are sure to be taken at a time.
/// Nothing happens where the file is none of this machine's.
void read_ahead(const InputFile& file, int64_t offset, int64_t length);

}  // namespace spolia
