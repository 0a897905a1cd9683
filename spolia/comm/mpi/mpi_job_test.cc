// The tests of every backend on MPI's, with threads that play its processes: no MPI is needed, and sanitizers
// see everything. tests/mpi_conformance.cc does the same with real ones.
#include "spolia/comm/mpi/mpi_job.h"

#include <gtest/gtest.h>

#include "spolia/comm/mpi/testing_transport.h"
#include "spolia/comm/testing_conformance.h"
#include "spolia/comm/testing_failures.h"
#include "spolia/comm/testing_programs.h"

namespace spolia {
namespace {

/// One run on a network of its own. All ranks have to throw the same, which is thrown.
void run_on(int ranks, const std::function<void(World& world)>& body, const LaunchOptions& options = {}) {
  FakeNetwork network(ranks, static_cast<uint32_t>(ranks));
  const auto errors = run_jobs(network, ranks, [&](MpiJob& job) { job.run(body, options); });
  std::vector<std::string> messages;
  for (const std::exception_ptr& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      messages.emplace_back();
    } catch (const std::exception& thrown) {
      messages.emplace_back(thrown.what());
    }
  }
  for (const std::string& message : messages) ASSERT_EQ(message, messages[0]);
  EXPECT_EQ(network.closed_together(), ranks);
  if (errors[0]) std::rethrow_exception(errors[0]);
}

class MpiConformance : public testing::TestWithParam<std::tuple<ConformanceCase, int>> {};

TEST_P(MpiConformance, Holds) {
  const auto& [conformance_case, ranks] = GetParam();
  run_on(ranks, conformance_case.run);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiConformance,
                         testing::Combine(testing::ValuesIn(conformance_cases()), testing::Values(1, 2, 5)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class MpiFailure : public testing::TestWithParam<std::tuple<FailureCase, int>> {};

TEST_P(MpiFailure, IsToldToAll) {
  const auto& [failure, ranks] = GetParam();
  try {
    run_on(ranks, failure.run, {.decorate = failure.decorate});
    EXPECT_FALSE(failure.thrown) << failure.thrown->second;
  } catch (const Error& error) {
    ASSERT_TRUE(failure.thrown) << error.what();
    EXPECT_EQ(error.kind(), failure.thrown->first) << error.what();
    EXPECT_NE(std::string(error.what()).find(failure.thrown->second), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiFailure,
                         testing::Combine(testing::ValuesIn(failure_cases()), testing::Values(2, 3)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class MpiPrograms : public testing::TestWithParam<int> {};

void run_programs(int ranks, uint32_t begin, uint32_t end) {
  for (uint32_t seed = begin; seed < end; ++seed) {
    const RandomProgram program(ranks, seed);
    run_on(ranks, [&](World& world) { program.run(world); });
  }
}

TEST_P(MpiPrograms, DoWhatTheModelDoes) { run_programs(GetParam(), 1, 8); }
TEST_P(MpiPrograms, SlowDoWhatTheModelDoes) { run_programs(GetParam(), 1000, 1100); }

INSTANTIATE_TEST_SUITE_P(Ranks, MpiPrograms, testing::Values(1, 2, 3, 7));

TEST(MpiJob, KnowsWhichRanksShareAHost) {
  FakeNetwork network(5, 1, 2);
  const auto errors = run_jobs(network, 5, [](MpiJob& job) {
    job.run([](World& world) {
      require(std::ranges::equal(world.hosts(), std::vector<int64_t>{0, 0, 1, 1, 2}), "hosts()");
    });
  });
  for (const std::exception_ptr& error : errors) EXPECT_FALSE(error);
}

TEST(MpiJob, RunsAgainAfterAFailure) {
  FakeNetwork network(3, 1);
  const auto errors = run_jobs(network, 3, [](MpiJob& job) {
    for (int i = 0; i < 3; ++i) {
      bool thrown = false;
      try {
        job.run([](World& world) {
          const int64_t pair[] = {0, 1};
          const std::shared_ptr<Group> group = world.create(pair);
          if (world.rank() == 1) throw std::out_of_range("lost my way");
          world.create(pair);  // rank 1 makes fewer groups
        });
      } catch (const Error& error) {
        thrown = error.kind() == ErrorKind::kPeerFailed && std::string(error.what()) == "rank 1: lost my way";
      } catch (const std::out_of_range&) {
        thrown = job.rank() == 1;
      }
      require(thrown, "an exception that is no Error");
      job.run([](World& world) { failures::warm_up(*world.all()); });
    }
  });
  for (const std::exception_ptr& error : errors) EXPECT_FALSE(error);
}

/// A process that is gone in the middle of an operation, without a word: the others throw within the time-out
/// and a moment, and name it.
class MpiJobWithoutAProcess : public testing::TestWithParam<failures::Operation> {};

TEST_P(MpiJobWithoutAProcess, NamesIt) {
  const failures::Operation operation = GetParam();
  FakeNetwork network(3, 7);
  std::atomic<int> named{0};
  run_jobs(network, 3, [&](MpiJob& job) {
    job.set_patience(failures::kTimeout);
    job.run([&](World& world) {
      Group& group = *world.all();
      failures::warm_up(group);
      group.set_timeout(failures::kTimeout);
      if (world.rank() == 1) {
        network.kill(1);
        throw IoError("killed");
      }
      try {
        operation.run(group);
      } catch (const Error& error) {
        named += failures::says(error.what(), "rank 1 (which does not answer)");
        throw;
      }
    });
  });
  EXPECT_EQ(named, 2) << operation.name;
  EXPECT_EQ(network.closed_together(), 0);
}

INSTANTIATE_TEST_SUITE_P(Operations, MpiJobWithoutAProcess, testing::ValuesIn(failures::operations()),
                         [](const auto& test) { return test.param.name; });

TEST(MpiJob, IsOneRankWithoutMpirun) {
  if (is_under_mpi()) GTEST_SKIP() << "started by mpirun";
  int64_t size = 0;
  run_world([&](World& world) { size = world.size(); });
  EXPECT_EQ(size, 1);
}

}  // namespace
}  // namespace spolia
