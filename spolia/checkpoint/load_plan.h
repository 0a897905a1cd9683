// What a rank does in a load, as a value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spolia/checkpoint/description.h"
#include "spolia/checkpoint/load.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

/// What of a checkpoint the ranks of a job want, checked.
struct Matched {
  std::vector<std::optional<size_t>>
      tensors;                                // of each of the job's: the source's; nothing: it keeps its own
  std::vector<std::optional<size_t>> values;  // likewise
  std::vector<std::string> missing;           // keys that keep their own, and that nobody said may be missing
  std::vector<std::string> unexpected;        // keys of the checkpoint that nobody wants
};

/// Pure, and the same on every rank. NotFoundError listing keys that are missing; MismatchError for a shape,
/// a dtype, a tensor that is a value or a value that is a tensor.
Matched match(const JobState& job, const Catalog& source, const LoadOptions& options);

struct LoadPlan {
  /// A box of one of the job's tensors that this rank reads into its memory.
  struct Read {
    size_t tensor = 0;
    Box box;
  };
  /// A box that goes from the rank that reads it to all that hold it, this one among them.
  struct Send {
    size_t tensor = 0;
    Box box;
    int64_t root = 0;
    std::vector<int64_t> ranks;  // rising
    size_t read = 0;             // on the root: which of the reads it is
  };
  std::vector<Read> reads;  // those that are sent first, in the order in which they are
  std::vector<Send> sends;  // in one order on all ranks
  Catalog targets;          // the reads, as tensors
  TransferPlan transfer;    // from the source to the targets

  int64_t bytes() const { return transfer.cost.bytes_written; }
};

/// Pure: the same arguments give the same plan, and the plans of all ranks fit together. `mode`: not
/// kCheapest. CorruptError where the source's chunks do not fill a tensor.
LoadPlan plan_load(const JobState& job, const Matched& matched, const Catalog& source, int64_t rank,
                   int64_t ranks, ReadMode mode, const PlanOptions& options);

}  // namespace spolia
