// The tests of every backend, on ranks that are threads and whose devices and NCCL are fakes.
#include <gtest/gtest.h>

#include "spolia/comm/nccl/nccl_world.h"
#include "spolia/comm/nccl/testing_nccl.h"
#include "spolia/comm/testing_conformance.h"
#include "spolia/comm/testing_failures.h"
#include "spolia/comm/testing_programs.h"

namespace spolia {
namespace {

void launch_nccl(int ranks, const std::function<void(World&)>& body, Decorator decorate = nullptr,
                 bool any_order = false) {
  launch(ranks, [&](World& host) {
    NcclWorld world(
        host, {DeviceKind::kCuda, static_cast<int>(host.rank())},
        {.library = &FakeNccl::instance().library(), .reduce_in_any_order = any_order, .decorate = decorate});
    body(world);
  });
}

/// Nothing undefined was done, and nothing is left.
void expect_clean() {
  EXPECT_EQ(FakeCuda::instance().take_faults(), std::vector<std::string>());
  EXPECT_EQ(FakeNccl::instance().communicators(), 0);
}

class NcclConformance : public testing::TestWithParam<std::tuple<ConformanceCase, int>> {};

TEST_P(NcclConformance, Holds) {
  use_fake_cuda();
  const int aborted = FakeNccl::instance().aborted();
  const auto& [conformance_case, ranks] = GetParam();
  launch_nccl(ranks, conformance_case.run);
  expect_clean();
  EXPECT_EQ(FakeNccl::instance().aborted(), aborted);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclConformance,
                         testing::Combine(testing::ValuesIn(conformance_cases()),
                                          testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class NcclFailure : public testing::TestWithParam<std::tuple<FailureCase, int>> {};

TEST_P(NcclFailure, IsToldToAll) {
  use_fake_cuda();
  const auto& [failure, ranks] = GetParam();
  try {
    launch_nccl(ranks, failure.run, failure.decorate);
    EXPECT_FALSE(failure.thrown) << failure.thrown->second;
  } catch (const Error& error) {
    ASSERT_TRUE(failure.thrown) << error.what();
    EXPECT_EQ(error.kind(), failure.thrown->first) << error.what();
    EXPECT_NE(std::string(error.what()).find(failure.thrown->second), std::string::npos) << error.what();
  }
  expect_clean();
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclFailure,
                         testing::Combine(testing::ValuesIn(failure_cases()), testing::Values(2, 3, 8)),
                         [](const auto& test) {
                           return fmt::format("{}On{}", std::get<0>(test.param).name,
                                              std::get<1>(test.param));
                         });

class NcclPrograms : public testing::TestWithParam<int> {};

void run_programs(int ranks, uint32_t begin, uint32_t end) {
  use_fake_cuda();
  for (uint32_t seed = begin; seed < end; ++seed) {
    const RandomProgram program(ranks, seed);
    launch_nccl(ranks, [&](World& world) { program.run(world); });
  }
  expect_clean();
}

TEST_P(NcclPrograms, DoWhatTheModelDoes) { run_programs(GetParam(), 1, 15); }
TEST_P(NcclPrograms, SlowDoWhatTheModelDoes) { run_programs(GetParam(), 1000, 1200); }

INSTANTIATE_TEST_SUITE_P(Ranks, NcclPrograms, testing::Values(1, 2, 3, 4, 7));

}  // namespace
}  // namespace spolia
