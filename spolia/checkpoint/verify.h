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
  std::vector<std::string> faults;  // all that is wrong, one sentence each: tensors by name, files, values,
                                    // files that belong to nothing
  Report report;
};

/// Looks at everything: each tensor tiled exactly once, each chunk readable to its last byte, each stored
/// checksum right, each file as its own tables say, each value readable, no file
/// of the checkpoint's kind that belongs to nothing. Faults are collected, not thrown;
/// only a cancellation is.
Verdict verify(const Source& source, const VerifyOptions& options);

}  // namespace spolia
