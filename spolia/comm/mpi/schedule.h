// The steps in which an operation's bytes travel between processes, once all ranks have arrived and agree.
//
// docs/comm.md has the table: steps and bytes of each operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "spolia/comm/collective.h"

namespace spolia {

/// Bytes that go to another rank, or come from it.
struct Transfer {
  int peer = 0;  // a place in the group
  bool sends = false;
  std::byte* data = nullptr;  // only read where it sends
  int64_t bytes = 0;          // > 0
};

/// Transfers that are under way together. Those between the same two ranks are in the same order on both.
struct Step {
  std::vector<Transfer> transfers;
  std::function<void()> then;  // once they are done; may be empty
};

/// Gives the steps of one operation, one after the other, then nothing; owns the memory between them, which
/// goes with it.
using Schedule = std::function<std::optional<Step>()>;

/// The steps of the rank at `place` of `ranks`. Reductions are computed in the order of the ranks (reduce.h).
Schedule schedule(const Collective& collective, int place, int ranks);

}  // namespace spolia
