#include "spolia/base/hash.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace spolia {
namespace {

std::string sha256(std::string_view text) {
  Sha256 hash;
  hash.update(bytes_of(text));
  return hash.finish_hex();
}

// The examples of FIPS 180-4.
TEST(Sha256, KnowsThePublishedDigests) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, StreamsStartsAfreshAndMoves) {
  Sha256 hash;
  for (const char* piece : {"a", "", "bc"}) hash.update(bytes_of(piece));
  Sha256 moved = std::move(hash);
  EXPECT_EQ(moved.finish_hex(), sha256("abc"));
  EXPECT_EQ(moved.finish_hex(), sha256(""));
}

/// One bit at a time: the definition.
uint32_t crc32_by_definition(std::span<const std::byte> bytes) {
  uint32_t crc = ~0u;
  for (std::byte b : bytes) {
    crc ^= static_cast<uint32_t>(b);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

TEST(Crc32, KnowsThePublishedCheckValue) {
  EXPECT_EQ(crc32(0, bytes_of("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32(0, {}), 0u);
}

RC_GTEST_PROP(Crc32, ContinuesAndCombines, (const std::string& a, const std::string& b)) {
  uint32_t crc_a = crc32(0, bytes_of(a)), crc_b = crc32(0, bytes_of(b));
  uint32_t whole = crc32_by_definition(bytes_of(a + b));
  RC_ASSERT(crc32(crc_a, bytes_of(b)) == whole);
  RC_ASSERT(crc32_combine(crc_a, crc_b, static_cast<int64_t>(b.size())) == whole);
}

TEST(Crc32, IsRightAtEveryLengthAroundTheVectorLoops) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(5000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (size_t length = 0; length < bytes.size(); length += length < 600 ? 1 : 211) {
    std::span<const std::byte> part = std::span(bytes).last(length);
    ASSERT_EQ(crc32(0, part), crc32_by_definition(part)) << length;
  }
}

TEST(Crc32, CombinesPastFourGigabytes) {
  // Zeros have no end: doubling a run of them 33 times is 8 GiB.
  std::byte zero{};
  uint32_t crc = crc32(0, {&zero, 1});
  int64_t length = 1;
  for (; length < int64_t{1} << 33; length *= 2) crc = crc32_combine(crc, crc, length);
  // The same length cut elsewhere.
  uint32_t shorter = crc32(0, {&zero, 1}), total = shorter;
  for (int64_t n = 1; n < length; n *= 2) {
    total = crc32_combine(total, shorter, n);
    shorter = crc32_combine(shorter, shorter, n);
  }
  EXPECT_EQ(total, crc);
}

// The values of the algorithm's specification at seed 0.
TEST(Xxh3, IsTheStandardOne) {
  EXPECT_EQ(xxh3_64({}), 0x2D06800538D394C2u);
  EXPECT_NE(xxh3_64(bytes_of("a")), xxh3_64(bytes_of("b")));
}

}  // namespace
}  // namespace spolia
