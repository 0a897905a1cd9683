#include "spolia/device/buffer.h"

#include <algorithm>
#include <utility>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(Buffer, IsAlignedAndWritableAtEverySize) {
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4095}, int64_t{4096}, int64_t{4097}, kMiB,
                       2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB + 4097}) {
    Buffer buffer(size);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % (size >= 4096 ? 4096 : 64), 0u) << size;
    std::ranges::fill(buffer.bytes(), std::byte{0x5A});
    EXPECT_EQ(std::ranges::count(std::as_const(buffer).bytes(), std::byte{0x5A}), size);
  }
}

TEST(Buffer, PrefaultKeepsTheContents) {
  for (int64_t size : {int64_t{0}, int64_t{10}, int64_t{10000}, 3 * kMiB + 5}) {
    Buffer buffer(size);
    std::ranges::fill(buffer.bytes(), std::byte{0x5A});
    buffer.prefault();
    EXPECT_EQ(std::ranges::count(buffer.bytes(), std::byte{0x5A}), size);
  }
}

TEST(Buffer, Moves) {
  Buffer a(100);
  std::byte* memory = a.data();
  Buffer b(std::move(a));
  EXPECT_EQ(b.data(), memory);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: the state after a move is part of the contract
  EXPECT_EQ(a.size(), 0);
  Buffer c(3 * kMiB);
  c = std::move(b);
  EXPECT_EQ(c.data(), memory);
  EXPECT_EQ(c.size(), 100);
}

TEST(Buffer, OneMadeByDefaultIsEmpty) {
  Buffer buffer;
  EXPECT_EQ(buffer.bytes().size(), 0u);
  buffer.prefault();
}

TEST(Buffer, RefusesWhatCannotBe) {
  EXPECT_THROW(Buffer(-1), InvalidArgumentError);
  EXPECT_THROW(Buffer(16, Device{DeviceKind::kCuda, 4711}), UnsupportedError);
  EXPECT_THROW(Buffer(int64_t{1} << 60), IoError);
  EXPECT_THROW(Buffer(INT64_MAX), Error);
}

}  // namespace
}  // namespace spolia
