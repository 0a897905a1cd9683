// The tests of every backend, on ranks that are threads.
#include <gtest/gtest.h>

#include "spolia/comm/testing_conformance.h"
#include "spolia/comm/testing_failures.h"
#include "spolia/comm/testing_programs.h"

namespace spolia {
namespace {

class ThreadsConformance : public testing::TestWithParam<std::tuple<ConformanceCase, int>> {};

TEST_P(ThreadsConformance, Holds) {
  const auto& [conformance_case, ranks] = GetParam();
  launch(ranks, conformance_case.run);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsConformance,
                         testing::Combine(testing::ValuesIn(conformance_cases()),
                                          testing::Values(1, 2, 3, 4, 8, 16)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class ThreadsFailure : public testing::TestWithParam<std::tuple<FailureCase, int>> {};

TEST_P(ThreadsFailure, IsToldToAll) {
  const auto& [failure, ranks] = GetParam();
  try {
    launch(ranks, failure.run, {.decorate = failure.decorate});
    EXPECT_FALSE(failure.thrown) << failure.thrown->second;
  } catch (const Error& error) {
    ASSERT_TRUE(failure.thrown) << error.what();
    EXPECT_EQ(error.kind(), failure.thrown->first) << error.what();
    EXPECT_NE(std::string(error.what()).find(failure.thrown->second), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsFailure,
                         testing::Combine(testing::ValuesIn(failure_cases()), testing::Values(2, 3, 8)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class ThreadsPrograms : public testing::TestWithParam<int> {};

void run_programs(int ranks, uint32_t begin, uint32_t end) {
  for (uint32_t seed = begin; seed < end; ++seed) {
    const RandomProgram program(ranks, seed);
    launch(ranks, [&](World& world) { program.run(world); });
  }
}

TEST_P(ThreadsPrograms, DoWhatTheModelDoes) { run_programs(GetParam(), 1, 25); }
TEST_P(ThreadsPrograms, SlowDoWhatTheModelDoes) { run_programs(GetParam(), 1000, 1400); }

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsPrograms, testing::Values(1, 2, 3, 4, 7, 16));

}  // namespace
}  // namespace spolia
