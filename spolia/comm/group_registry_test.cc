#include "spolia/comm/group_registry.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/test_random.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

using Groups = std::vector<std::shared_ptr<Group>>;

/// "[0, 1] made: rank 0 has none", a line each.
std::vector<std::string> lines_of(const ResolvedGroups& groups) {
  std::vector<std::string> lines;
  for (const ResolvedGroup& g : groups.all()) {
    lines.push_back(fmt::format("{} {}: {}", list_text(g.ranks), g.made ? "made" : "reused", g.why));
  }
  return lines;
}

/// That the ranks of each group have the same one.
void expect_connected(World& world, const ResolvedGroups& groups) {
  int64_t number = 1000;
  for (const ResolvedGroup& resolved : groups.all()) {
    ++number;
    EXPECT_EQ(resolved.group != nullptr, std::ranges::count(resolved.ranks, world.rank()) > 0);
    if (!resolved.group) continue;
    EXPECT_TRUE(std::ranges::equal(resolved.group->ranks(), resolved.ranks));
    for (int64_t told : all_gather_number(*resolved.group, number)) EXPECT_EQ(told, number);
  }
}

using Lines = std::vector<std::string>;

TEST(GroupRegistry, MakesWhatAnyRankNeedsInOneOrder) {
  OperationLog log;
  launch(5,
         [](World& world) {
           GroupRegistry registry(world);
           std::vector<Ranks> needed;
           if (world.rank() == 1) needed = {{1, 3}, {0, 1}};
           if (world.rank() == 3) needed = {{2, 4}, {1, 3}, {2, 4}};  // also for others
           ResolvedGroups groups = registry.resolve(needed);
           EXPECT_EQ(lines_of(groups), (Lines{"[0, 1] made: rank 0 has none", "[1, 3] made: rank 1 has none",
                                              "[2, 4] made: rank 2 has none"}));
           expect_connected(world, groups);
           if (world.rank() == 1) {
             EXPECT_EQ(groups.at(Ranks{1, 3}).size(), 2);
           }
           EXPECT_THROW(groups.at(Ranks{0, 2}), InvalidArgumentError);
           if (world.rank() == 0) {
             EXPECT_THROW(groups.at(Ranks{1, 3}), InvalidArgumentError);
           }
           EXPECT_EQ(groups.release(), Lines());
           EXPECT_TRUE(groups.all().empty());
         },
         {.decorate = where([](const GroupBackend& b) { return b.ranks().size() == 5; }, logging(log))});
  for (int64_t rank = 1; rank < 5; ++rank) EXPECT_EQ(log.lines(rank), log.lines(0));
}

TEST(GroupRegistry, NothingIsNeeded) {
  for (int ranks : {1, 3}) {
    launch(ranks, [](World& world) {
      GroupRegistry registry(world);
      ResolvedGroups groups = registry.resolve({});
      EXPECT_TRUE(groups.all().empty());
      EXPECT_EQ(groups.release(), Lines());
    });
  }
}

TEST(GroupRegistry, TheWorldIsThereAlready) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    ResolvedGroups groups = registry.resolve(std::vector<Ranks>{{0, 1, 2}});
    EXPECT_EQ(lines_of(groups), Lines{"[0, 1, 2] reused: all of its ranks have it"});
    EXPECT_EQ(&groups.at(Ranks{0, 1, 2}), world.all().get());
    EXPECT_EQ(groups.release(), Lines());
    world.all()->barrier().wait();
  });
}

TEST(GroupRegistry, WhatIsKeptIsFoundAgain) {
  launch(4, [](World& world) {
    GroupRegistry registry(world);
    const std::vector<Ranks> needed = {{0, 2}, {1, 3}};
    ResolvedGroups first = registry.resolve(needed);
    Group* const made = first.all()[world.rank() % 2].group.get();
    first.keep();
    EXPECT_EQ(first.release(), Lines());
    ResolvedGroups second = registry.resolve(needed);
    EXPECT_EQ(second.all()[world.rank() % 2].group.get(), made);
    EXPECT_FALSE(second.all()[0].made || second.all()[1].made);
    expect_connected(world, second);
    EXPECT_EQ(second.release(), Lines());
    expect_connected(world, registry.resolve(needed));  // kept ones are not destroyed
  });
}

TEST(GroupRegistry, WhatOnlySomeHaveKeptIsMadeAnew) {
  launch(4, [](World& world) {
    GroupRegistry registry(world);
    const std::vector<Ranks> needed = {{0, 1, 3}};
    ResolvedGroups first = registry.resolve(needed);
    if (world.rank() != 1) first.keep();
    ResolvedGroups second = registry.resolve(needed);
    EXPECT_EQ(lines_of(second), Lines{"[0, 1, 3] made: rank 1 has none"});
    expect_connected(world, second);
    EXPECT_EQ(second.release(), Lines());
  });
}

TEST(GroupRegistry, GroupsOfTheCallerAreTakenAndLeftAlone) {
  launch(4, [](World& world) {
    GroupRegistry registry(world);
    const Groups mesh = {world.create(Ranks{0, 1}), world.create(Ranks{2, 3}), world.create(Ranks{1, 2})};
    for (int round = 0; round < 2; ++round) {
      const std::vector<Ranks> needed = {{0, 1}, {2, 3}, {0, 3}};
      ResolvedGroups groups = registry.resolve(needed, mesh);
      EXPECT_EQ(lines_of(groups),
                (Lines{"[0, 1] reused: all of its ranks have it", "[0, 3] made: rank 0 has none",
                       "[2, 3] reused: all of its ranks have it"}));
      expect_connected(world, groups);
      EXPECT_EQ(groups.release(), Lines());
      for (const auto& group : mesh) {
        if (group) group->barrier().wait();
      }
    }
  });
}

TEST(GroupRegistry, AGroupHandedInOnSomeRanksOnlyIsNotTaken) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    const Groups mesh = {world.create(Ranks{0, 1, 2})};
    const Groups pair = {world.create(Ranks{1, 2})};
    const std::vector<Ranks> needed = {{1, 2}};
    ResolvedGroups groups = registry.resolve(needed, world.rank() == 1 ? pair : Groups());
    EXPECT_EQ(lines_of(groups), Lines{"[1, 2] made: rank 2 has none"});
    expect_connected(world, groups);
    EXPECT_EQ(groups.release(), Lines());
    // Of the world's ranks, but not the world.
    ResolvedGroups all = registry.resolve(std::vector<Ranks>{{0, 1, 2}}, world.rank() == 2 ? Groups() : mesh);
    EXPECT_FALSE(all.all()[0].made);
    EXPECT_EQ(all.all()[0].group, world.all());
  });
}

TEST(GroupRegistry, TellsGroupsOfTheSameRanksApart) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    const auto a = world.create(Ranks{0, 2}), b = world.create(Ranks{0, 2});
    const std::vector<Ranks> needed = {{0, 2}};
    const Groups both = world.rank() == 0 ? Groups{a, b, a} : Groups{b, a};
    ResolvedGroups first = registry.resolve(needed, both);
    EXPECT_EQ(first.all()[0].group, a);  // what rank 0 prefers
    expect_connected(world, first);

    // Each rank has one, known by now to be another.
    ResolvedGroups second = registry.resolve(needed, world.rank() == 0 ? Groups{a} : Groups{b});
    EXPECT_EQ(lines_of(second), Lines{"[0, 2] made: its ranks have different ones"});
    expect_connected(world, second);
    second.keep();

    // The caller's before the registry's, as far as they are the same.
    EXPECT_EQ(registry.resolve(needed, Groups{b}).all()[0].group, b);
    const std::shared_ptr<Group> kept = second.all()[0].group;
    EXPECT_EQ(registry.resolve(needed, world.rank() == 0 ? Groups{a} : Groups{b}).all()[0].group, kept);
  });
}

TEST(GroupRegistry, ARegistryThatIsNewOnOneRankKnowsNothingWrong) {
  launch(2, [](World& world) {
    auto registry = std::make_unique<GroupRegistry>(world);
    const std::vector<Ranks> needed = {{0}, {1}};
    const auto a = world.create(Ranks{0, 1}), b = world.create(Ranks{0, 1});
    const std::vector<Ranks> pair = {{0, 1}};
    const auto kept = registry->resolve(needed, Groups{a, b});
    if (world.rank() == 1) registry = std::make_unique<GroupRegistry>(world);
    ResolvedGroups groups = registry->resolve(needed, Groups{a, b});
    expect_connected(world, groups);
    groups.keep();
    if (world.rank() == 0) registry = std::make_unique<GroupRegistry>(world);
    EXPECT_EQ(registry->resolve(pair, Groups{b}).all()[0].group, world.all());
    expect_connected(world, registry->resolve(needed));
  });
}

TEST(GroupRegistry, BrokenGroupsAreNotTaken) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    const std::vector<Ranks> needed = {{0, 1}, {1, 2}};
    const Groups mesh = {world.create(Ranks{0, 1})};
    registry.resolve(needed, mesh).keep();
    if (world.rank() == 0) mesh[0]->backend().break_group("for the test");
    world.all()->barrier().wait();
    ResolvedGroups groups = registry.resolve(needed, mesh);
    EXPECT_EQ(lines_of(groups),
              (Lines{"[0, 1] made: rank 0 has none", "[1, 2] reused: all of its ranks have it"}));
    expect_connected(world, groups);
  });
}

TEST(GroupRegistry, WhatOneRankAsksForWronglyIsAnErrorOnAll) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    for (const Ranks& wrong : {Ranks{}, Ranks{1, 0}, Ranks{1, 1}, Ranks{1, 3}, Ranks{-1, 0}}) {
      const std::vector<Ranks> needed = {world.rank() == 2 ? wrong : Ranks{0, 1}};
      EXPECT_THROW(registry.resolve(needed), InvalidArgumentError);
    }
    expect_connected(world, registry.resolve(std::vector<Ranks>{{0, 1}}));
  });
}

TEST(GroupRegistry, DifferentGroupsThatCannotBeToldApartAreATimeout) {
  launch(2, [](World& world) {
    GroupRegistry registry(world);
    const auto a = world.create(Ranks{0, 1}), b = world.create(Ranks{0, 1});
    a->set_timeout(milliseconds(200));
    b->set_timeout(milliseconds(200));
    // Of the ranks of the world: the world would do, were it not for another of these ranks.
    EXPECT_EQ(registry.resolve(std::vector<Ranks>{{0, 1}}, Groups{world.rank() == 0 ? a : b}).all()[0].group,
              world.all());
  });
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    const auto a = world.create(Ranks{0, 1}), b = world.create(Ranks{0, 1});
    const auto own = world.rank() == 0 ? a : b;
    if (own) own->set_timeout(milliseconds(200));
    EXPECT_THROW(registry.resolve(std::vector<Ranks>{{0, 1}}, Groups{own}), TimeoutError);
    EXPECT_TRUE(
        registry.resolve(std::vector<Ranks>{{0, 1}}, Groups{own}).all()[0].made);  // they are broken now
  });
}

TEST(GroupRegistry, WhatIsMadeIsDestroyedAlsoWhereTheOperationFailed) {
  launch(4, [](World& world) {
    GroupRegistry registry(world);
    const std::vector<Ranks> needed = {{0, 1}, {1, 2, 3}};
    std::vector<std::weak_ptr<Group>> made;
    const auto body = [&](const ResolvedGroups& groups) {
      for (const ResolvedGroup& resolved : groups.all()) made.push_back(resolved.group);
      expect_connected(world, groups);
      if (world.rank() == 2) throw CorruptError("odd");
    };
    try {
      registry.with_groups("loading", needed, {}, body);
      ADD_FAILURE();
    } catch (const CorruptError& error) {
      EXPECT_STREQ(error.what(), "loading: rank 2: odd");
    }
    EXPECT_EQ(made.size(), 2u);
    for (const auto& group : made) EXPECT_TRUE(group.expired());
    EXPECT_EQ(registry.with_groups("loading", needed, {},
                                   [&](const ResolvedGroups& g) { expect_connected(world, g); }),
              Lines());
  });
}

TEST(GroupRegistry, ABrokenGroupIsLeftBehindByAll) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    const std::vector<Ranks> needed = {{0, 1}, {1, 2}};
    const Lines warnings = registry.with_groups("loading", needed, {}, [&](const ResolvedGroups& groups) {
      if (world.rank() == 1) groups.at(Ranks{1, 2}).backend().break_group("for the test");
    });
    // Rank 0 hears of it too.
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_EQ(warnings[0], "the group [1, 2] is broken, as rank 1 says, and was left behind");
  });
}

TEST(GroupRegistry, OneThatRefusesToEndIsAWarning) {
  const auto is_pair = [](const GroupBackend& backend) { return backend.ranks().size() == 2; };
  launch(3,
         [](World& world) {
           GroupRegistry registry(world);
           const std::vector<Ranks> needed = {{0, 1}, {1, 2}};
           ResolvedGroups groups = registry.resolve(needed);
           const Lines warnings = groups.release();
           EXPECT_EQ(warnings.size(), world.rank() == 1 ? 2u : 1u);
           for (const std::string& warning : warnings) {
             EXPECT_NE(warning.find("did not end together"), std::string::npos) << warning;
           }
           world.all()->barrier().wait();
         },
         {.decorate = where(is_pair, on_rank(1, dying(0)))});
}

TEST(GroupRegistry, OneThatIsHeldElsewhereIsAWarning) {
  launch(2, [](World& world) {
    GroupRegistry registry(world);
    ResolvedGroups groups = registry.resolve(std::vector<Ranks>{{0}, {1}});
    const std::shared_ptr<Group> held = groups.all()[0].group;
    EXPECT_EQ(groups.release(),
              world.rank() == 0 ? Lines{"the group [0] lives on, as something still holds it"} : Lines());
  });
}

TEST(GroupRegistry, ABrokenWorldDropsGroupsWithoutWaiting) {
  launch(3, [](World& world) {
    GroupRegistry registry(world);
    ResolvedGroups groups = registry.resolve(std::vector<Ranks>{{0, 1}, {1, 2}});
    if (world.rank() == 2) world.all()->backend().break_group("rank 2 is gone");
    const Lines warnings = groups.release();
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find("rank 2 is gone"), std::string::npos) << warnings[0];
  });
}

/// A round of the property below, the same on every rank but for what each rank has.
struct Round {
  std::vector<std::set<size_t>> handed_in;  // by rank: of the pool
  std::vector<std::set<size_t>> needed;     // by rank: of the sets
  std::set<int64_t> keepers;  // ranks that keep what is made; where there are none, it is released
};

struct Program {
  int ranks = 1;
  std::vector<Ranks> sets;
  std::vector<size_t> pool;  // groups that are made before: of which set
  std::vector<Round> rounds;
};

std::set<size_t> random_subset(size_t count, int64_t one_in) {
  std::set<size_t> subset;
  for (size_t i = 0; i < count; ++i) {
    if (pick(0, one_in) > 0) subset.insert(i);
  }
  return subset;
}

Program random_program() {
  Program program = {.ranks = static_cast<int>(pick(1, 7)), .sets = {}, .pool = {}, .rounds = {}};
  const auto ranks = static_cast<size_t>(program.ranks);
  for (int64_t s = pick(1, 4); s > 0; --s) {
    Ranks set;
    for (size_t rank : random_subset(ranks, 3)) set.push_back(static_cast<int64_t>(rank));
    if (!set.empty() && set.size() < ranks && !std::ranges::count(program.sets, set))
      program.sets.push_back(set);
  }
  for (size_t s = 0; s < program.sets.size(); ++s) {
    for (int64_t copies = pick(0, 3); copies > 0; --copies) program.pool.push_back(s);
  }
  for (int64_t r = pick(1, 5); r > 0; --r) {
    Round& round = program.rounds.emplace_back();
    for (size_t rank = 0; rank < ranks; ++rank) {
      round.handed_in.push_back(random_subset(program.pool.size(), pick(2, 6)));
      round.needed.push_back(random_subset(program.sets.size(), 3));
    }
    if (pick(0, 2) == 0) {
      for (size_t rank : random_subset(ranks, 4)) round.keepers.insert(static_cast<int64_t>(rank));
    }
  }
  return program;
}

/// What the ranks have of each set, by labels: groups of the pool have rising ones, those that are made have
/// those after them.
class Model {
 public:
  explicit Model(const Program& program)
      : program_(program),
        kept_(program.sets.size(), std::vector<int64_t>(program.ranks, -1)),
        next_(std::ssize(program.pool)) {}

  /// The lines of a round, and what is in the registries after it.
  Lines resolve(const Round& round) {
    std::set<Ranks> needed;
    for (const std::set<size_t>& of_rank : round.needed) {
      for (size_t s : of_rank) needed.insert(program_.sets[s]);
    }
    Lines lines;
    for (const Ranks& ranks : needed) {
      const auto s = static_cast<size_t>(std::ranges::find(program_.sets, ranks) - program_.sets.begin());
      lines.push_back(fmt::format("{} {}", list_text(ranks), outcome(s, round)));
    }
    return lines;
  }

 private:
  std::set<int64_t> held(size_t s, int64_t rank, const Round& round) const {
    std::set<int64_t> labels;
    for (size_t p : round.handed_in[static_cast<size_t>(rank)]) {
      if (program_.pool[p] == s) labels.insert(static_cast<int64_t>(p));
    }
    if (const int64_t label = kept_[s][static_cast<size_t>(rank)]; label >= 0) labels.insert(label);
    return labels;
  }

  std::string outcome(size_t s, const Round& round) {
    const Ranks& ranks = program_.sets[s];
    std::set<int64_t> common = held(s, ranks[0], round);
    std::string why = "its ranks have different ones";
    for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
      const std::set<int64_t> own = held(s, *rank, round);
      std::erase_if(common, [&](int64_t label) { return !own.contains(label); });
      if (own.empty()) why = fmt::format("rank {} has none", *rank);
    }
    if (!common.empty()) return "reused: all of its ranks have it";
    const int64_t label = next_++;
    for (int64_t rank : ranks) {
      if (round.keepers.contains(rank)) kept_[s][static_cast<size_t>(rank)] = label;
    }
    return "made: " + why;
  }

  const Program& program_;
  std::vector<std::vector<int64_t>> kept_;  // by set and rank
  int64_t next_;
};

void run(const Program& program, World& world) {
  const auto rank = static_cast<size_t>(world.rank());
  Groups pool;
  for (size_t s : program.pool) pool.push_back(world.create(program.sets[s]));
  GroupRegistry registry(world);
  // Each rank in an order of its own: told apart here, once for all.
  Groups turned = pool;
  std::ranges::rotate(turned, turned.begin() + world.rank() % (std::ssize(turned) + 1));
  registry.resolve(program.sets, turned).release();

  Model model(program);
  for (const Round& round : program.rounds) {
    Groups handed_in;
    for (size_t p : round.handed_in[rank]) handed_in.push_back(pool[p]);
    std::ranges::rotate(handed_in, handed_in.begin() + world.rank() % (std::ssize(handed_in) + 1));
    std::vector<Ranks> needed;
    for (size_t s : round.needed[rank]) needed.push_back(program.sets[s]);

    ResolvedGroups groups = registry.resolve(needed, handed_in);
    EXPECT_EQ(lines_of(groups), model.resolve(round));
    expect_connected(world, groups);
    if (round.keepers.empty()) {
      EXPECT_EQ(groups.release(), Lines());
    }
    if (round.keepers.contains(world.rank())) groups.keep();
  }
}

RC_GTEST_PROP(GroupRegistry, RanksWhoseGroupsDifferAgree, ()) {
  const Program program = random_program();
  OperationLog log;
  const auto is_world = [&](const GroupBackend& b) { return std::ssize(b.ranks()) == program.ranks; };
  launch(program.ranks, [&](World& world) { run(program, world); },
         {.decorate = where(is_world, logging(log))});
  for (int64_t rank = 1; rank < program.ranks; ++rank) RC_ASSERT(log.lines(rank) == log.lines(0));
  RC_ASSERT(!testing::Test::HasFailure());
}

}  // namespace
}  // namespace spolia
