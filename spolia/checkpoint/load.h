// Loading a checkpoint into the memory of all ranks of a job, whatever ranks and layouts saved it.
//
//   launch(3, [&](World& world) {
//     StateDict state;
//     state.add("weight", sharded_tensor(view, {4096, 4096}, layout));
//     state.add("step", Value());
//     load(world, *open_together(*world.all(), posix_store(), "step-100"), state);
//   });
//
// docs/saving.md is the guide.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/read_mode.h"
#include "spolia/checkpoint/save.h"
#include "spolia/comm/broadcast_batches.h"
#include "spolia/comm/group_registry.h"
#include "spolia/device/buffer.h"
#include "spolia/format/source.h"
#include "spolia/layout/layout_rules.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/state/state_dict.h"

namespace spolia {

struct LoadOptions {
  /// Whether keys that the checkpoint lacks keep what they have. Otherwise it is an error, but for those that
  /// match one of `may_be_missing` (glob_match), say "*step".
  bool partial = false;
  std::vector<std::string> may_be_missing;
  bool cast = false;  // floating-point tensors of other dtypes are cast; otherwise a difference is an error
  std::vector<std::string> rank_keyed;  // as they were saved
  EntryHook hook;
  ReadMode mode = ReadMode::kCheapest;
  std::optional<Speeds> speeds;  // for kCheapest; else measured. The same on all ranks
  BatchOptions batches;
  /// Groups of ranks that the caller has anyway (group_registry.h).
  std::vector<std::shared_ptr<Group>> groups;
  GroupRegistry* registry = nullptr;  // keeps the groups that are made, for later loads; else they go
  bool check_source = true;           // compare checksums while reading
  /// Of this rank: buffers and threads. Smaller tiles than files are written in: what is read straight into
  /// its place should still be in the cache when it is hashed.
  PlanOptions plan = {.memory = int64_t{256} << 20, .largest_tile = int64_t{1} << 20};
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// Fills the tensors of `state`, where they are, and its values. Collective over the world, whose ranks
/// layouts speak of; `source` is the same checkpoint on all ranks. Each rank gives what it wants: other ranks
/// may want other keys. What a checkpoint has that nobody wants is not read.
///
/// All is checked on all ranks before the first element is written: missing keys, shapes, dtypes, whether
/// chunks fill the tensors, whether memory suits layouts. Throws on all ranks what one throws. After a
/// failure while tensors are read, their contents are unspecified, and the message says so.
Report load(World& world, const Source& source, StateDict& state, const LoadOptions& options = {});

/// A state dict with the memory of its tensors.
struct OwnedState {
  StateDict state;
  std::vector<Buffer> memory;
};

/// A state dict of all that is in the catalog, for loading a checkpoint without knowing it: of each tensor
/// what `rank` holds by the rules, or, without rules, all of it. Nothing is filled.
OwnedState state_for(const Catalog& catalog, int64_t rank = 0, const LayoutRules* rules = nullptr);

}  // namespace spolia
