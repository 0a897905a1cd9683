// The groups that an operation needs: those that are there already, and new ones for the rest.
//
// Making a group is collective over the world, and what is there differs by rank: callers hand in groups
// where they have them, and some ranks have met others before. So the ranks tell each other what they have,
// and all come to the same answer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/comm/world.h"

namespace spolia {

/// Ranks of the world, rising.
using Ranks = std::vector<int64_t>;

struct ResolvedGroup {
  Ranks ranks;
  std::shared_ptr<Group> group;  // null where this rank is not one of them
  bool made = false;             // for this purpose; else it was there before
  std::string why;               // "rank 3 has none"; the same on every rank
};

class GroupRegistry;

/// What resolve() has found and made. Moves only. Used by its rank's thread; the registry outlives it.
///
/// Dropped without release() or keep(), the groups that were made go without a word to the other ranks. That
/// is right where these are gone, and else costs a backend the memory that it may only free together.
class ResolvedGroups {
 public:
  ResolvedGroups(ResolvedGroups&&) = default;
  ResolvedGroups& operator=(ResolvedGroups&&) = default;

  /// In the order of their ranks; the same on every rank, but for `group`.
  std::span<const ResolvedGroup> all() const { return groups_; }
  /// InvalidArgumentError where these ranks were not resolved, or this one is not among them.
  Group& at(std::span<const int64_t> ranks) const;

  /// Destroys what was made, once its work has drained; what was there before is let go of. Collective over
  /// the world, also after an operation that failed: a broken group, and every group of a broken world, is
  /// dropped by each rank alone. Throws nothing that comes from a group: what is not as it should be is told
  /// in the answer, a line each.
  std::vector<std::string> release();

  /// Leaves what was made to the registry, for later operations. Concerns this rank alone.
  void keep();

 private:
  friend class GroupRegistry;
  ResolvedGroups(GroupRegistry& registry, std::vector<ResolvedGroup> groups)
      : registry_(&registry), groups_(std::move(groups)) {}

  GroupRegistry* registry_;
  std::vector<ResolvedGroup> groups_;
};

/// One rank's groups, by their ranks. Every rank of the world has a registry; they need not hold the same.
/// Used by the rank's thread; the world outlives it.
class GroupRegistry {
 public:
  /// Holds the group of all ranks.
  explicit GroupRegistry(World& world);
  GroupRegistry(const GroupRegistry&) = delete;
  GroupRegistry& operator=(const GroupRegistry&) = delete;

  /// The groups that any rank needs. Collective over the world: a rank that needs nothing, or is in no group
  /// that others need, takes part. A group is taken from those handed in or kept where all its ranks have the
  /// very same one, not broken; else all make a new one.
  ///
  /// `handed_in`: groups that the caller has anyway, also others than needed, in any order, null where it is
  /// not in them. They stay the caller's: they are never destroyed here. One that the registry has not met
  /// before is proved to be the same on its ranks by a broadcast in it, where all its ranks hand one in. (If
  /// these are different ones then, of the same ranks, that broadcast fails with a TimeoutError and breaks
  /// them.) One that does not reach the host's memory is not taken.
  ///
  /// InvalidArgumentError on every rank where one needs a group of ranks that do not rise or are not there.
  ResolvedGroups resolve(std::span<const Ranks> needed,
                         std::span<const std::shared_ptr<Group>> handed_in = {});

  /// Resolves, runs `body` as a step of all ranks (agree.h), and releases, whether it threw or not. Hands the
  /// warnings of release() back.
  std::vector<std::string> with_groups(std::string_view step, std::span<const Ranks> needed,
                                       std::span<const std::shared_ptr<Group>> handed_in,
                                       const std::function<void(const ResolvedGroups& groups)>& body);

 private:
  friend class ResolvedGroups;
  /// A group that this rank has, and its number if it has one.
  struct Candidate {
    std::shared_ptr<Group> group;
    std::optional<int64_t> number;
  };
  using Candidates = std::vector<std::vector<Candidate>>;  // by needed group, those of the caller first
  struct Report;
  using Reports = std::vector<std::vector<Report>>;  // by needed group, of its ranks

  std::vector<Ranks> union_of(std::span<const Ranks> needed);
  Candidates candidates_for(std::span<const Ranks> sets,
                            std::span<const std::shared_ptr<Group>> handed_in) const;
  Reports exchange(std::span<const Ranks> sets, const Candidates& own);
  bool number_unknown(std::span<const Ranks> sets, const Reports& reports, Candidates& own);
  ResolvedGroup make(const Ranks& ranks, std::string why);
  std::optional<int64_t> number_of(const std::shared_ptr<Group>& group) const;
  void remember(const std::shared_ptr<Group>& group, int64_t number);

  /// A group's number is the same on all its ranks, and no other group's: it tells whether two ranks mean the
  /// same group.
  struct Numbered {
    std::weak_ptr<Group> group;
    int64_t number = 0;
  };

  World& world_;
  std::map<Ranks, std::shared_ptr<Group>> kept_;
  std::vector<Numbered> numbered_;
  int64_t next_number_ = 0;  // the same on every rank after each exchange
};

}  // namespace spolia
