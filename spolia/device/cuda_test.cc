// CUDA devices, by a driver that is a fake.
#include "spolia/device/cuda.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/device/buffer.h"
#include "spolia/device/strided_copy.h"
#include "spolia/device/testing_cuda.h"

namespace spolia {
namespace {

constexpr Device kDevice{DeviceKind::kCuda, 3};

class Cuda : public testing::Test {
 protected:
  void SetUp() override { use_fake_cuda(); }
  void TearDown() override {
    EXPECT_EQ(FakeCuda::instance().take_faults(), std::vector<std::string>());
    EXPECT_LT(FakeCuda::current_device(), 0) << "a context was left behind";
  }
};

std::vector<std::byte> some_bytes(size_t count, uint32_t seed = 1) {
  std::minstd_rand random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
  return bytes;
}

Buffer on_device(const std::vector<std::byte>& bytes) {
  Buffer buffer(std::ssize(bytes), kDevice);
  backend_of(kDevice).copy_from_host(buffer.data(), bytes.data(), buffer.size());
  return buffer;
}

std::vector<std::byte> on_host(const Buffer& buffer) {
  std::vector<std::byte> bytes(static_cast<size_t>(buffer.size()));
  backend_of(kDevice).copy_to_host(bytes.data(), buffer.data(), buffer.size());
  return bytes;
}

TEST_F(Cuda, GivesMemoryThatTheHostCannotReach) {
  EXPECT_FALSE(backend_of(kDevice).host_accessible());
  Buffer buffer(1000, kDevice);
  EXPECT_THROW(buffer.bytes(), InvalidArgumentError);
  buffer.prefault();
  EXPECT_THROW(Buffer(int64_t{1} << 40, kDevice), IoError);
  EXPECT_EQ(&backend_of(kDevice), &backend_of(kDevice));
  Buffer(0, kDevice);
}

TEST_F(Cuda, NamesADeviceThatIsNotThere) {
  try {
    backend_of({DeviceKind::kCuda, 99});
    FAIL();
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:99"), std::string::npos) << error.what();
  }
}

TEST_F(Cuda, CopiesBetweenHostAndDevice) {
  for (size_t size : {size_t{0}, size_t{1}, size_t{5000}}) {
    const auto bytes = some_bytes(size);
    EXPECT_EQ(on_host(on_device(bytes)), bytes);
  }
}

TEST_F(Cuda, CopiesRows) {
  const auto bytes = some_bytes(1000);
  for (const int64_t row : {0, 1, 7, 10}) {
    for (const int64_t pitch : {0, 10, 20}) {  // a pitch of 0 reads one row many times
      const Buffer source = on_device(bytes);
      Buffer target = on_device(std::vector<std::byte>(1000, std::byte{0xEE}));
      backend_of(kDevice).copy_rows(target.data(), 13, source.data(), pitch, row, 9);
      std::vector<std::byte> expected(1000, std::byte{0xEE});
      for (int64_t r = 0; r < 9; ++r) {
        for (int64_t i = 0; i < row; ++i) expected[r * 13 + i] = bytes[r * pitch + i];
      }
      EXPECT_EQ(on_host(target), expected) << row << " " << pitch;
    }
  }
}

/// Every element by itself: any strides, forwards or backwards, on the host and on a device.
TEST_F(Cuda, CopiesAtAnyStrides) {
  std::minstd_rand random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t dims = random() % 5;
    const int64_t element = 1 + static_cast<int64_t>(random() % 4);
    std::vector<int64_t> sizes(dims), strides[2] = {std::vector<int64_t>(dims), std::vector<int64_t>(dims)};
    for (int64_t& size : sizes)
      size = static_cast<int64_t>(random() % 8 == 0 ? random() % 2 : 1 + random() % 5);
    int64_t spans[2], firsts[2];
    for (int side = 0; side < 2; ++side) {
      std::vector<size_t> order(dims);
      for (size_t d = 0; d < dims; ++d) order[d] = d;
      std::shuffle(order.begin(), order.end(), random);
      int64_t span = element;
      firsts[side] = 0;
      for (size_t d : order) {
        if (random() % 3 == 0) span += static_cast<int64_t>(random() % 5);
        strides[side][d] = span;
        if (side == 1 && random() % 8 == 0) strides[side][d] = 0;
        span *= std::max<int64_t>(sizes[d], 1);
        if (random() % 4 == 0) {
          firsts[side] += strides[side][d] * std::max<int64_t>(sizes[d] - 1, 0);
          strides[side][d] = -strides[side][d];
        }
      }
      spans[side] = span;
    }
    const auto source = some_bytes(static_cast<size_t>(spans[1]), static_cast<uint32_t>(round));
    std::vector<std::byte> expected(static_cast<size_t>(spans[0]), std::byte{0xEE}), host = expected;
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    for (int64_t i = 0; i < count; ++i) {
      int64_t to = firsts[0], from = firsts[1], rest = i;
      for (size_t d = dims; d-- > 0; rest /= sizes[d]) {
        to += rest % sizes[d] * strides[0][d];
        from += rest % sizes[d] * strides[1][d];
      }
      for (int64_t b = 0; b < element; ++b) expected[to + b] = source[from + b];
    }
    Buffer target = on_device(host);
    const Buffer given = on_device(source);
    copy_strided_on(backend_of(kDevice), sizes, element, target.data() + firsts[0], strides[0],
                    given.data() + firsts[1], strides[1]);
    EXPECT_EQ(on_host(target), expected) << round;
    copy_strided_on(backend_of(Device{}), sizes, element, host.data() + firsts[0], strides[0],
                    source.data() + firsts[1], strides[1]);
    EXPECT_EQ(host, expected) << round;
  }
}

TEST_F(Cuda, AnEventHappensAfterWhatWasQueuedBefore) {
  const CudaBackend& backend = cuda_backend(3);
  const auto bytes = some_bytes(3000);
  PinnedBuffer pinned(backend, 3000);
  std::copy(bytes.begin(), bytes.end(), pinned.data());
  for (int round = 0; round < 200; ++round) {
    Buffer buffer(3000, kDevice);
    CudaStream first(backend), second(backend);
    CudaEvent event(backend), end(backend);
    EXPECT_TRUE(event.has_happened());
    first.copy(buffer.data(), pinned.data(), 3000);
    event.record(first);
    second.wait_for(event.get());
    PinnedBuffer back(backend, 3000);
    second.copy(back.data(), buffer.data(), 3000);
    bool ran = false;
    second.run_on_host([](void* flag) { *static_cast<bool*>(flag) = true; }, &ran);
    end.record(second);
    backend.wait_for(end.get());
    EXPECT_TRUE(end.has_happened() && event.has_happened() && ran);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), back.data())) << round;
  }
  backend.wait_for({});
}

TEST(DeviceEvent, IsIgnoredOnTheHost) {
  int nothing = 0;
  backend_of(Device{}).wait_for({&nothing});
}

}  // namespace
}  // namespace spolia
