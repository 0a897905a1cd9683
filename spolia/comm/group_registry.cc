#include "spolia/comm/group_registry.h"

#include <algorithm>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/tensor/shape.h"

namespace spolia {

/// What one rank has of a needed group.
struct GroupRegistry::Report {
  int64_t unknown = 0;           // groups without a number
  std::vector<int64_t> numbers;  // of the others, those to be preferred first
};

namespace {

bool contains(std::span<const int64_t> ranks, int64_t rank) {
  return std::ranges::binary_search(ranks, rank);
}

void check_ranks(std::span<const int64_t> ranks, int64_t world_size) {
  const bool rising = std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (rising && !ranks.empty() && ranks.front() >= 0 && ranks.back() < world_size) return;
  throw InvalidArgumentError("a group of the ranks {} is needed; they have to rise, below {}",
                             list_text(ranks), world_size);
}

/// Reads a list that another rank has put together.
class ListReader {
 public:
  explicit ListReader(std::span<const int64_t> numbers) : rest_(numbers) {}
  bool at_end() const { return rest_.empty(); }
  int64_t next() { return take(1)[0]; }
  std::span<const int64_t> take(int64_t count) {
    if (count < 0 || count > std::ssize(rest_))
      throw MismatchError("a rank reports its groups in another form");
    const auto taken = rest_.first(static_cast<size_t>(count));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

 private:
  std::span<const int64_t> rest_;
};

void append_list(std::vector<int64_t>& to, std::span<const int64_t> numbers) {
  to.push_back(std::ssize(numbers));
  to.insert(to.end(), numbers.begin(), numbers.end());
}

/// The number that all ranks of a group report; of several the one that the lowest rank prefers.
template <class Report>
std::optional<int64_t> common_number(std::span<const Report> reports) {
  for (int64_t number : reports[0].numbers) {
    const auto has_it = [&](const Report& report) { return std::ranges::count(report.numbers, number) > 0; };
    if (std::ranges::all_of(reports, has_it)) return number;
  }
  return std::nullopt;
}

/// Whether all ranks have the same number of groups that might be the same, and nothing better.
template <class Report>
bool may_be_the_same(std::span<const Report> reports) {
  const auto as_many = [&](const Report& report) { return report.unknown == reports[0].unknown; };
  return reports[0].unknown > 0 && std::ranges::all_of(reports, as_many) && !common_number(reports);
}

template <class Report>
std::string why_made(std::span<const int64_t> ranks, std::span<const Report> reports) {
  for (size_t p = 0; p < reports.size(); ++p) {
    if (reports[p].unknown == 0 && reports[p].numbers.empty())
      return fmt::format("rank {} has none", ranks[p]);
  }
  return "its ranks have different ones";
}

/// Waits until all ranks are done with the groups, where none says that one is broken.
std::vector<std::string> drain(Group& world, std::span<const ResolvedGroup> groups) {
  std::vector<int64_t> broken;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].group && !groups[g].group->backend().broken().empty())
      broken.push_back(static_cast<int64_t>(g));
  }
  std::map<int64_t, int64_t> broken_on;  // a group -> the lowest rank that says so
  const std::vector<std::vector<int64_t>> reports = all_gather_lists(world, broken);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    for (int64_t g : reports[rank]) broken_on.try_emplace(g, static_cast<int64_t>(rank));
  }

  std::vector<std::string> warnings;
  std::vector<std::pair<Pending, const ResolvedGroup*>> barriers;
  const auto told = [&](const ResolvedGroup& resolved, auto step) {
    try {
      step();
    } catch (const Error& error) {
      warnings.push_back(
          fmt::format("the group {} did not end together: {}", list_text(resolved.ranks), error.what()));
    }
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    const ResolvedGroup& resolved = groups[g];
    if (const auto at = broken_on.find(static_cast<int64_t>(g)); at != broken_on.end()) {
      warnings.push_back(fmt::format("the group {} is broken, as rank {} says, and was left behind",
                                     list_text(resolved.ranks), at->second));
    } else if (resolved.group) {
      told(resolved, [&] { barriers.emplace_back(resolved.group->barrier(), &resolved); });
    }
  }
  for (auto& [pending, resolved] : barriers) told(*resolved, [&] { pending.wait(); });
  return warnings;
}

}  // namespace

Group& ResolvedGroups::at(std::span<const int64_t> ranks) const {
  for (const ResolvedGroup& resolved : groups_) {
    if (resolved.group && std::ranges::equal(resolved.ranks, ranks)) return *resolved.group;
  }
  throw InvalidArgumentError("the group {} is not here: it was not asked for, or this rank is not in it",
                             list_text(ranks));
}

std::vector<std::string> ResolvedGroups::release() {
  std::vector<ResolvedGroup> groups = std::exchange(groups_, {});
  std::erase_if(groups, [](const ResolvedGroup& resolved) { return !resolved.made; });
  if (groups.empty()) return {};

  std::vector<std::string> warnings;
  try {
    warnings = drain(*registry_->world_.all(), groups);
  } catch (const Error& error) {
    warnings.push_back(fmt::format("groups that were made are dropped by each rank alone: {}", error.what()));
  }
  for (ResolvedGroup& resolved : groups) {
    if (resolved.group.use_count() > 1) {
      warnings.push_back(
          fmt::format("the group {} lives on, as something still holds it", list_text(resolved.ranks)));
    }
    resolved.group.reset();
  }
  return warnings;
}

void ResolvedGroups::keep() {
  for (ResolvedGroup& resolved : groups_) {
    if (resolved.made && resolved.group) registry_->kept_[resolved.ranks] = resolved.group;
    resolved.made = false;
  }
}

GroupRegistry::GroupRegistry(World& world) : world_(world) {
  const std::span<const int64_t> ranks = world.all()->ranks();
  kept_.emplace(Ranks(ranks.begin(), ranks.end()), world.all());
  remember(world.all(), next_number_++);
}

ResolvedGroups GroupRegistry::resolve(std::span<const Ranks> needed,
                                      std::span<const std::shared_ptr<Group>> handed_in) {
  const std::vector<Ranks> sets = union_of(needed);
  Candidates own = candidates_for(sets, handed_in);
  Reports reports = exchange(sets, own);
  if (number_unknown(sets, reports, own)) reports = exchange(sets, own);

  std::vector<ResolvedGroup> groups;
  for (size_t s = 0; s < sets.size(); ++s) {
    const std::span<const Report> said = reports[s];
    const std::optional<int64_t> number = common_number(said);
    if (!number) {
      groups.push_back(make(sets[s], why_made(sets[s], said)));
      continue;
    }
    const auto at = std::ranges::find(own[s], number, &Candidate::number);
    groups.push_back({sets[s], at == own[s].end() ? nullptr : at->group, false, "all of its ranks have it"});
  }
  return {*this, std::move(groups)};
}

std::vector<std::string> GroupRegistry::with_groups(
    std::string_view step, std::span<const Ranks> needed, std::span<const std::shared_ptr<Group>> handed_in,
    const std::function<void(const ResolvedGroups& groups)>& body) {
  ResolvedGroups groups = resolve(needed, handed_in);
  try {
    agree(*world_.all(), step, [&] { body(groups); });
  } catch (...) {
    groups.release();
    throw;
  }
  return groups.release();
}

/// What any rank needs, in order. Brings the numbers of the ranks' registries into step.
std::vector<Ranks> GroupRegistry::union_of(std::span<const Ranks> needed) {
  std::vector<int64_t> own = {next_number_};
  agree(*world_.all(), "looking for groups", [&] {
    for (const Ranks& ranks : needed) {
      check_ranks(ranks, world_.size());
      append_list(own, ranks);
    }
  });
  std::vector<Ranks> sets;
  for (const std::vector<int64_t>& list : all_gather_lists(*world_.all(), own)) {
    ListReader reader(list);
    next_number_ = std::max(next_number_, reader.next());
    while (!reader.at_end()) {
      const std::span<const int64_t> ranks = reader.take(reader.next());
      sets.emplace_back(ranks.begin(), ranks.end());
    }
  }
  std::ranges::sort(sets);
  sets.erase(std::ranges::unique(sets).begin(), sets.end());
  return sets;
}

GroupRegistry::Candidates GroupRegistry::candidates_for(
    std::span<const Ranks> sets, std::span<const std::shared_ptr<Group>> handed_in) const {
  Candidates candidates;
  for (const Ranks& ranks : sets) {
    std::vector<Candidate>& found = candidates.emplace_back();
    const auto consider = [&](const std::shared_ptr<Group>& group) {
      const bool fits = group && std::ranges::equal(group->ranks(), ranks) &&
                        group->backend().reaches(Device{}) && group->backend().broken().empty();
      if (!fits || std::ranges::count(found, group, &Candidate::group) > 0) return;
      found.push_back({group, number_of(group)});
    };
    for (const std::shared_ptr<Group>& group : handed_in) consider(group);
    if (const auto kept = kept_.find(ranks); kept != kept_.end()) consider(kept->second);
  }
  return candidates;
}

/// Collective. What the ranks of each group have of it.
GroupRegistry::Reports GroupRegistry::exchange(std::span<const Ranks> sets, const Candidates& own) {
  std::vector<int64_t> list;
  for (size_t s = 0; s < sets.size(); ++s) {
    if (!contains(sets[s], world_.rank())) continue;
    std::vector<int64_t> numbers;
    for (const Candidate& candidate : own[s]) {
      if (candidate.number) numbers.push_back(*candidate.number);
    }
    list.push_back(std::ssize(own[s]) - std::ssize(numbers));
    append_list(list, numbers);
  }
  Reports reports(sets.size());
  const std::vector<std::vector<int64_t>> lists = all_gather_lists(*world_.all(), list);
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    ListReader reader(lists[rank]);
    for (size_t s = 0; s < sets.size(); ++s) {
      if (!contains(sets[s], static_cast<int64_t>(rank))) continue;
      Report& report = reports[s].emplace_back();
      report.unknown = reader.next();
      const std::span<const int64_t> numbers = reader.take(reader.next());
      report.numbers.assign(numbers.begin(), numbers.end());
    }
  }
  return reports;
}

/// Gives groups a number that may be the same on all their ranks: the lowest rank sends it in the group
/// itself, so that only those who mean the same group come to have it. Whether there were any. Collective.
bool GroupRegistry::number_unknown(std::span<const Ranks> sets, const Reports& reports, Candidates& own) {
  struct Proof {
    Candidate* candidate;
    int64_t number;
  };
  std::vector<Proof> proofs;
  const int64_t first = next_number_;
  for (size_t s = 0; s < sets.size(); ++s) {
    if (!may_be_the_same(std::span<const Report>(reports[s]))) continue;
    int64_t number = std::exchange(next_number_, next_number_ + reports[s][0].unknown);
    for (Candidate& candidate : own[s]) {
      if (!candidate.number) proofs.push_back({&candidate, number++});
    }
  }
  if (next_number_ == first) return false;

  agree(*world_.all(), "telling apart the groups handed in", [&] {
    std::vector<Pending> pending;
    for (Proof& proof : proofs) {
      const View view =
          dense_view(std::as_writable_bytes(std::span(&proof.number, 1)).data(), DType::kInt64, {});
      pending.push_back(proof.candidate->group->broadcast(view, 0));
    }
    for (Pending& operation : pending) operation.wait();
    for (const Proof& proof : proofs) {
      proof.candidate->number = proof.number;
      remember(proof.candidate->group, proof.number);
    }
  });
  return true;
}

/// Collective over the world.
ResolvedGroup GroupRegistry::make(const Ranks& ranks, std::string why) {
  std::shared_ptr<Group> group = world_.create(ranks);
  const int64_t number = next_number_++;
  if (group) remember(group, number);
  return {ranks, std::move(group), true, std::move(why)};
}

std::optional<int64_t> GroupRegistry::number_of(const std::shared_ptr<Group>& group) const {
  for (const Numbered& numbered : numbered_) {
    if (numbered.group.lock() == group) return numbered.number;
  }
  return std::nullopt;
}

void GroupRegistry::remember(const std::shared_ptr<Group>& group, int64_t number) {
  std::erase_if(numbered_, [](const Numbered& numbered) { return numbered.group.expired(); });
  numbered_.push_back({group, number});
}

}  // namespace spolia
