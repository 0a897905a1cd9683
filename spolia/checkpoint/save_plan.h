// What a rank does in a save, as a value.
#pragma once

#include <memory>
#include <vector>

#include "spolia/checkpoint/description.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/checkpoint/save.h"
#include "spolia/format/target.h"
#include "spolia/plan/ownership.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

struct SavePlan {
  JobState job;
  std::vector<OwnedPart> parts;          // that this rank writes; the pieces are these
  std::unique_ptr<const Target> target;  // as far as this rank has to know it
  std::unique_ptr<const PieceTarget> pieces;
  TransferPlan transfer;        // from piece to piece
  std::vector<uint32_t> files;  // of the target, that this rank writes
};

/// Pure: the same arguments give the same plan, and the plans of all ranks fit together.
SavePlan plan_save(JobState job, int64_t rank, int64_t ranks, const SaveOptions& options);

}  // namespace spolia
