// Saving a job's state from all of its ranks: each part is written once, by one rank that has it.
//
//   launch(4, [&](World& world) {
//     StateDict state;
//     state.add("weight", sharded_tensor(view, {4096, 4096}, layout));
//     state.add("step", Value(int64_t{100}));
//     save(*world.all(), state, *posix_store(), "step-100");
//   });
//
// docs/saving.md is the guide.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/staged_folder.h"
#include "spolia/comm/group.h"
#include "spolia/plan/ownership.h"
#include "spolia/state/state_dict.h"

namespace spolia {

/// What becomes of an entry when it is saved or loaded: itself, another in its place (a name, a view, a value
/// of its own), or nothing, to skip it. Every rank does alike with the entries that it shares with others.
using EntryHook = std::function<std::optional<StateDict::Entry>(const StateDict::Entry& entry)>;

/// How a rank saves what it has, worked out: kept between saves of the same state. See save_plan.h.
struct SavePlan;

/// The plans of the last saves, so that a later save of the same state need not plan. One for each rank, used
/// by one thread. Plans are found by a fingerprint of all names, shapes, dtypes, layouts and options of all
/// ranks.
class SavePlanCache {
 public:
  explicit SavePlanCache(size_t capacity = 2) : capacity_(capacity) {}

  std::shared_ptr<const SavePlan> find(const std::string& fingerprint);
  void put(std::string fingerprint, std::shared_ptr<const SavePlan> plan);

  int64_t hits() const { return hits_; }

 private:
  size_t capacity_;
  int64_t hits_ = 0;
  std::vector<std::pair<std::string, std::shared_ptr<const SavePlan>>> plans_;  // the last used at the back
};

struct SaveOptions {
  TargetFormat to = TargetFormat::kSpolia;  // or kDcp
  Replicas replicas = Replicas::kBalanced;  // those that keep copies: kSpolia only
  std::vector<int64_t> hosts;               // World::hosts(), for Replicas::kEachHost
  /// Entries whose names match (glob_match) are each rank's own: "rng" of rank 3 is saved as "rng.rank_3".
  std::vector<std::string> rank_keyed;
  /// Whether values, and small tensors that ranks hold whole, are compared between the ranks that have them.
  bool compare_contents = true;
  EntryHook hook;
  bool checksums = true;
  bool durable = true;
  Existing existing = Existing::kRefuse;
  PlanOptions plan = {.memory = int64_t{256} << 20};  // of this rank: buffers and threads
  SavePlanCache* cache = nullptr;                     // none: every save plans
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// Saves what all ranks of the group have into the folder `destination`, which appears when it is whole and
/// durable. Collective over the group; places are the ranks that layouts speak of. The memory is read until
/// this returns. The same states and options give the same bytes, with any number of threads.
///
/// Throws on all ranks what one throws, naming it: MismatchError where ranks disagree (description.h),
/// InvalidArgumentError where memory does not suit its layout, a name is double or the destination may not be
/// replaced. Nothing is published then.
Report save(Group& group, const StateDict& state, Store& store, const std::filesystem::path& destination,
            const SaveOptions& options = {});

/// Saves what one rank has, without the others: nothing is exchanged, compared, balanced or cached. Each rank
/// writes all that it holds, replicas too, and metadata of its own, `__3.metadata` or `spolia-00003.json`.
/// When all have, the folder reads as one checkpoint, of which each box counts once; nobody knows whether
/// they have, until the tensors are found to be whole. Makes the folder where it is not there; the rank's
/// metadata comes last and is durable. IoError where the rank has saved there already.
Report save_alone(int64_t rank, const StateDict& state, Store& store,
                  const std::filesystem::path& destination, const SaveOptions& options = {});

/// The entries as they are saved or loaded: the hook applied, and those of each rank's own renamed.
struct ChosenEntries {
  StateDict state;
  std::vector<std::string> originals;  // the name in the caller's state dict of each entry
};
ChosenEntries choose_entries(const StateDict& state, int64_t rank, std::span<const std::string> rank_keyed,
                             const EntryHook& hook);

}  // namespace spolia
