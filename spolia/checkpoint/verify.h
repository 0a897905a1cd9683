// Verify: is every byte that a checkpoint promises there, and as it was written?
#pragma once

#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/format/source.h"

namespace spolia {

struct VerifyOptions {
  size_t threads = 1;
  const CancelToken* cancel = nullptr;
  ProgressSink progress;  // in bytes of stored items
};

struct Verdict {
  std::vector<std::string> faults;  // all that is wrong, one sentence each: tensors by name, then values
  Report report;
};

/// Looks at everything: each tensor tiled exactly once, each chunk readable to its last byte, each stored
/// checksum right, each value readable. Faults are collected, not thrown; only a cancellation is.
Verdict verify(const Source& source, const VerifyOptions& options);

}  // namespace spolia
