// What the NCCL backend does that others do not: events, streams, communicators that fail. Fakes throughout.
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "spolia/comm/nccl/nccl_steps.h"
#include "spolia/comm/nccl/nccl_world.h"
#include "spolia/comm/nccl/testing_nccl.h"
#include "spolia/comm/testing_tensors.h"

namespace spolia {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

class Nccl : public testing::Test {
 protected:
  void SetUp() override { use_fake_cuda(); }
  void TearDown() override {
    FakeNccl::instance().reset();
    EXPECT_EQ(FakeCuda::instance().take_faults(), std::vector<std::string>());
    EXPECT_EQ(FakeNccl::instance().communicators(), 0);
  }
};

Device device_of(World& host) { return {DeviceKind::kCuda, static_cast<int>(host.rank())}; }

NcclOptions fake_options() { return {.library = &FakeNccl::instance().library()}; }

std::string message_of(const std::function<void()>& body, ErrorKind kind) {
  try {
    body();
  } catch (const Error& error) {
    require(error.kind() == kind, "another kind: {}", error.what());
    return error.what();
  }
  require(false, "nothing was thrown");
  return {};
}

bool says(const std::string& message, std::string_view word) {
  return message.find(word) != std::string::npos;
}

TEST_F(Nccl, AnOperationStartsAfterItsEvent) {
  for (const Arrangement arrangement : {Arrangement::kDense, Arrangement::kGaps}) {
    launch(3, [&](World& host) {
      NcclWorld world(host, device_of(host), fake_options());
      const CudaBackend& device = cuda_backend(device_of(host).index);
      for (int round = 0; round < 20; ++round) {
        TestTensor tensor(DType::kUInt8, {5000}, arrangement, world.all()->device());
        TestTensor source(DType::kUInt8, {5000}, arrangement, world.all()->device());
        source.set_elements(noise(world.rank() + round, 5000));
        CudaStream stream(device);
        CudaEvent event(device);
        // What the event stands for is slow; so would be its reader, were it told the buffer alone.
        stream.run_on_host([](void*) { std::this_thread::sleep_for(milliseconds(2)); }, nullptr);
        stream.copy(tensor.view().data, source.view().data,
                    4999 * (arrangement == Arrangement::kDense ? 1 : 2) + 1);
        event.record(stream);
        world.all()->broadcast(tensor.view(), round % 3, event.get()).wait();
        tensor.require_elements(noise(round % 3 + round, 5000), "broadcast after an event");
        device.wait_for(event.get());
      }
    });
  }
}

TEST_F(Nccl, AnOperationGoesOnWhileItsRankComputes) {
  launch(2, [](World& host) {
    NcclWorld world(host, device_of(host), fake_options());
    Group& group = *world.all();
    TestTensor warm(DType::kUInt8, {8}, Arrangement::kDense, group.device());
    group.broadcast(warm.view(), 0).wait();
    TestTensor tensor(DType::kUInt8, {100000}, Arrangement::kDense, group.device());
    group.barrier().wait();
    const auto begin = steady_clock::now();
    Pending pending = group.broadcast(tensor.view(), 0);
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(1500));
    pending.wait();
    const auto taken = steady_clock::now() - begin;
    if (world.rank() == 0) require(taken < milliseconds(1000), "a rank waited for one that computes");
  });
}

/// A rank may be ahead, at what connects the group, of others that still wait for a barrier.
TEST_F(Nccl, ABarrierDoesNotWaitForAConnection) {
  launch(2, [](World& host) {
    NcclWorld world(host, device_of(host), fake_options());
    Group& group = *world.all();
    group.set_timeout(std::chrono::seconds(20));
    TestNumbers<int64_t> ones(group.device(), {1});
    const View view = ones.at(DType::kInt64, 0);
    Pending barrier = group.barrier(), sum;
    if (world.rank() == 0) sum = group.all_reduce(view, view);
    barrier.wait();
    host.all()->barrier().wait();
    if (world.rank() == 1) sum = group.all_reduce(view, view);
    sum.wait();
    require(ones.read()[0] == 2, "a sum: {}", ones.read()[0]);
  });
}

/// Ranks that all arrive, and a device that does not come to it.
TEST_F(Nccl, AStuckDeviceIsATimeOutAndAborted) {
  const int aborted = FakeNccl::instance().aborted();
  launch(3, [&](World& host) {
    NcclWorld world(host, device_of(host), fake_options());
    const std::vector<int64_t> all = {0, 1, 2};
    const std::shared_ptr<Group> group = world.create(all);
    TestNumbers<int64_t> numbers(group->device(), {1, 2, 3});
    const View view = numbers.view(DType::kInt64, 0, 3);
    group->all_reduce(view, view).wait();
    host.all()->barrier().wait();
    if (host.rank() == 0) FakeNccl::instance().stall(1);
    host.all()->barrier().wait();
    group->set_timeout(milliseconds(world.rank() == 2 ? 1200 : 60000));
    const auto begin = steady_clock::now();
    const std::string message = message_of([&] { group->all_reduce(view, view).wait(); },
                                           world.rank() == 2 ? ErrorKind::kTimeout : ErrorKind::kPeerFailed);
    require(
        says(message, "timed out; all ranks have arrived") && says(message, "all-reduce (sum) of 24 bytes"),
        "{}", message);
    require(steady_clock::now() - begin < std::chrono::seconds(6), "too late");
    require(says(group->backend().broken(), "timed out"), "broken: {}", group->backend().broken());
    message_of([&] { group->barrier().wait(); }, ErrorKind::kPeerFailed);
    // Others go on as soon as the device does.
    host.all()->barrier().wait();
    if (host.rank() == 0) FakeNccl::instance().reset();
    host.all()->barrier().wait();
    TestNumbers<int64_t> ones(group->device(), {1});
    world.all()->all_reduce(ones.at(DType::kInt64, 0), ones.at(DType::kInt64, 0)).wait();
    require(ones.read()[0] == 3, "after a failure: {}", ones.read()[0]);
  });
  EXPECT_EQ(FakeNccl::instance().aborted() - aborted, 3);
}

TEST_F(Nccl, AnErrorOfACommunicatorIsToldToAll) {
  launch(3, [](World& host) {
    NcclWorld world(host, device_of(host), fake_options());
    const std::vector<int64_t> all = {0, 1, 2};
    const std::shared_ptr<Group> group = world.create(all);
    TestNumbers<int64_t> numbers(group->device(), {1, 2, 3});
    const View view = numbers.view(DType::kInt64, 0, 3);
    group->all_reduce(view, view).wait();
    host.all()->barrier().wait();
    if (host.rank() == 0) {
      FakeNccl::instance().stall(0);  // so that the operation is under way
      FakeNccl::instance().fail(2);
    }
    host.all()->barrier().wait();
    try {
      group->all_reduce(view, view).wait();
      require(false, "it landed");
    } catch (const Error& error) {
      require(says(error.what(), "rank 2: NCCL cannot") || world.rank() == 2, "{}", error.what());
      require(says(error.what(), "remote process exited"), "{}", error.what());
    }
  });
}

TEST_F(Nccl, FloatsAreReducedInAnyOrderOnlyOnRequest) {
  const auto value = [](int rank) { return rank == 0 ? 1e8f : rank == 1 ? -1e8f : 1.0f; };
  for (const bool any_order : {false, true}) {
    launch(3, [&](World& host) {
      NcclOptions options = fake_options();
      options.reduce_in_any_order = any_order;
      NcclWorld world(host, device_of(host), options);
      TestNumbers<float> numbers(world.all()->device(),
                                 std::vector<float>(6, value(static_cast<int>(world.rank()))));
      const View view = numbers.view(DType::kFloat32, 0, 6);
      // The fake adds from the last rank on: 1 is lost.
      const float expected = any_order ? 0.0f : 1.0f;
      TestNumbers<float> part(world.all()->device(), std::vector<float>(2));
      world.all()
          ->reduce_scatter(view, std::vector<int64_t>{2, 2, 2}, part.view(DType::kFloat32, 0, 2))
          .wait();
      require(part.read()[1] == expected, "reduce-scatter: {}", part.read()[1]);
      world.all()->all_reduce(view, view).wait();
      require(numbers.read()[5] == expected, "all-reduce: {}", numbers.read()[5]);
    });
  }
}

/// More than a slot of each rank's share.
TEST_F(Nccl, LargeReductionsTakeSeveralRounds) {
  launch(3, [](World& host) {
    NcclWorld world(host, device_of(host), fake_options());
    Group& group = *world.all();
    std::vector<double> given(600001);
    for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<double>(i) * (group.place() + 1);
    TestNumbers<double> numbers(group.device(), given);
    const View view = numbers.view(DType::kFloat64, 0, given.size());
    const std::vector<int64_t> counts = {500000, 1, 100000};
    const auto own = static_cast<size_t>(counts[static_cast<size_t>(group.place())]);
    TestNumbers<double> part(group.device(), std::vector<double>(own));
    group.reduce_scatter(view, counts, part.view(DType::kFloat64, 0, own)).wait();
    group.all_reduce(view, view).wait();
    const auto sums = numbers.read(), mine = part.read();
    for (size_t i = 0; i < sums.size(); ++i)
      require(sums[i] == static_cast<double>(i) * 6, "element {}: {}", i, sums[i]);
    const size_t begin = group.place() == 0 ? 0 : group.place() == 1 ? 500000 : 500001;
    require(std::equal(mine.begin(), mine.end(), sums.begin() + static_cast<int64_t>(begin)),
            "reduce-scatter");
  });
}

TEST_F(Nccl, WhatIsNotThereIsNamedOnAllRanks) {
  launch(3, [](World& host) {
    const bool odd = host.rank() == 1;
    std::string message = message_of(
        [&] {
          NcclWorld(host, odd ? Device{DeviceKind::kCuda, 99} : device_of(host), fake_options());
        },
        ErrorKind::kUnsupported);
    require(says(message, "rank 1: there is no device cuda:99"), "{}", message);
    message = message_of([&] { NcclWorld(host, odd ? Device{} : device_of(host), fake_options()); },
                         ErrorKind::kInvalidArgument);
    require(says(message, "rank 1"), "{}", message);
    NcclWorld world(host, device_of(host), fake_options());
    std::vector<std::byte> bytes(4);
    message =
        message_of([&] { world.all()->broadcast(byte_view(std::span(bytes)), 0); }, ErrorKind::kUnsupported);
    require(says(message, "the nccl backend does not reach memory on cpu"), "{}", message);
  });
}

/// Where NCCL is installed, the functions are all there.
TEST(NcclLibrary, IsLoadedOrSaidToBeMissing) {
  try {
    int version = 0;
    EXPECT_EQ(nccl_library().get_version(&version), kNcclSuccess);
    EXPECT_GE(version, 21700);
    EXPECT_NE(nccl_library().receive, nullptr);
  } catch (const UnsupportedError& error) {
    EXPECT_TRUE(says(error.what(), "NCCL")) << error.what();
  }
}

TEST(NcclSteps, ReducesByNcclWhereTheBitsAreTheSame) {
  for (size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool is_integer = dtype == DType::kInt8 || dtype == DType::kUInt8 || dtype == DType::kInt32 ||
                            dtype == DType::kUInt32 || dtype == DType::kInt64 || dtype == DType::kUInt64;
    EXPECT_EQ(nccl_reduces(dtype, ReduceOp::kSum, false), is_integer) << name_of(dtype);
  }
  EXPECT_TRUE(nccl_reduces(DType::kBFloat16, ReduceOp::kMin, true));
  EXPECT_FALSE(nccl_reduces(DType::kComplex64, ReduceOp::kSum, true));
}

}  // namespace
}  // namespace spolia
