// What the ranks of an operation did, compared.
#pragma once

#include <cstdint>

#include "spolia/base/report.h"
#include "spolia/comm/group.h"

namespace spolia {

/// Notes what the busiest of the ranks moved, and all on average, from what each moved. Collective over the
/// group.
void note_loads(Group& group, int64_t bytes, Report& report);

}  // namespace spolia
