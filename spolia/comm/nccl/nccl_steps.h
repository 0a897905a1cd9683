// What an operation tells a communicator and a stream once all ranks have arrived and agree.
//
// docs/comm.md has the table: steps and bytes of each operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "spolia/comm/collective.h"
#include "spolia/comm/nccl/nccl_library.h"
#include "spolia/device/buffer.h"
#include "spolia/device/cuda.h"

namespace spolia {

/// One rank's end of a communicator, and the stream that its operations go through.
struct NcclEnd {
  const NcclLibrary* library = nullptr;
  NcclLibrary::Comm comm = nullptr;
  int rank = 0, ranks = 1;  // of the communicator
  CudaStream* stream = nullptr;
};

/// IoError that says what NCCL refused to do and why, unless `result` is success, or in progress.
void check_nccl(const NcclEnd& end, int result, std::string_view what);

/// Memory in which reductions are computed by the host: for each rank a slot on the device and one on the
/// host, and one on the host for the result.
struct NcclScratch {
  NcclScratch(const CudaBackend& backend, int ranks, int64_t slot_bytes);
  int64_t slot;  // bytes
  Buffer on_device;
  PinnedBuffer on_host;
};

/// Whether NCCL's own reduction gives the bits of the order of the ranks: sums, minima and maxima of
/// integers. `any_order`: also of the floats that NCCL knows, whose bits then depend on NCCL.
bool nccl_reduces(DType dtype, ReduceOp op, bool any_order);

/// Bytes of a slot that the operation needs among so many ranks; 0 where it needs no scratch.
int64_t scratch_slot(const Collective& collective, int ranks, bool any_order);

/// One after the other; each returns at once, and is called when the communicator is not in progress with the
/// one before. They keep the scratch alive; the collective's buffers and `end` live until the stream is done
/// with them.
using NcclSteps = std::vector<std::function<void()>>;

/// Of any operation but one between two. `scratch` has slots of scratch_slot(), where that is not 0.
NcclSteps nccl_steps(const Collective& collective, const NcclEnd& end, bool any_order,
                     std::shared_ptr<NcclScratch> scratch);
/// Of one between two, in a communicator of its own: the sender is its rank 0, the receiver its rank 1.
NcclSteps nccl_transfer_steps(const Collective& collective, const NcclEnd& end);

}  // namespace spolia
