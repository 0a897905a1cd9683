// Digests: the SHA-256 of each tensor's whole, row-major, little-endian bytes, however it is sharded and
// stored.
#pragma once

#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

struct DigestOptions {
  PlanOptions plan;
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// One digest, 64 hex digits, for each tensor of the source's catalog, in its order. Stored checksums are
/// checked on the way. Throws where a tensor is not tiled exactly by its chunks, or its bytes cannot be read.
std::vector<std::string> digest_tensors(const Source& source, const DigestOptions& options);

/// The same for what copies make of the source. `target`: their target tensors, whole (whole_tensors()).
std::vector<std::string> digest_copies(const Source& source, std::vector<RegionCopy> copies,
                                       const Catalog& target, const DigestOptions& options);

}  // namespace spolia
