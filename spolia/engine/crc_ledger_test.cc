#include "spolia/engine/crc_ledger.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/threads.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

Catalog one_tensor() {
  Catalog catalog;
  catalog.files = {"file"};
  TensorEntry tensor;
  tensor.name = "w";
  tensor.shape = {1};
  tensor.boxes = BoxList(1);
  tensor.boxes.add(Box{{0}, {1}});
  catalog.tensors = {tensor};
  return catalog;
}

Payload payload_with_crc(std::span<const std::byte> bytes) {
  Payload payload;
  payload.stored = {0, 100, 1000};
  payload.length = std::ssize(bytes);
  payload.crc32 = crc32(0, bytes);
  return payload;
}

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((seed = seed * 6364136223846793005u + 1) >> 56);
  return bytes;
}

RC_GTEST_PROP(CrcLedger, PiecesInAnyOrderWithOverlapsGiveTheWholeCrc, (uint64_t seed)) {
  const auto bytes = random_bytes(static_cast<size_t>(pick(1, 300)), seed);
  const Payload payload = payload_with_crc(bytes);
  const Catalog catalog = one_tensor();
  CrcLedger ledger;
  const size_t reads = static_cast<size_t>(pick(0, 20));
  std::vector<bool> seen(bytes.size());
  for (size_t i = 0; i < reads; ++i) {
    const size_t begin = static_cast<size_t>(pick(0, std::ssize(bytes)));
    const size_t length = static_cast<size_t>(pick(0, std::ssize(bytes) - static_cast<int64_t>(begin) + 1));
    ledger.add(catalog, 0, 0, payload, static_cast<int64_t>(begin), std::span(bytes).subspan(begin, length));
    std::fill_n(seen.begin() + static_cast<ptrdiff_t>(begin), length, true);
  }
  // The gaps are exactly what was not seen; a ledger that saw nothing has no payload to ask for.
  std::vector<bool> covered = seen;
  for (const CrcLedger::Gap& gap : ledger.gaps()) {
    for (int64_t i = gap.offset; i < gap.offset + gap.length; ++i) {
      RC_ASSERT(!covered[static_cast<size_t>(i)]);
      covered[static_cast<size_t>(i)] = true;
    }
    ledger.add(catalog, 0, 0, payload, gap.offset,
               std::span(bytes).subspan(static_cast<size_t>(gap.offset), static_cast<size_t>(gap.length)));
  }
  const bool touched = std::ranges::find(seen, true) != seen.end();
  if (touched) RC_ASSERT(std::ranges::find(covered, false) == covered.end());
  RC_ASSERT(ledger.checked() == (touched ? 1 : 0));
  RC_ASSERT(ledger.gaps().empty());
}

/// CRC-32s of blocks, and a payload that has them.
struct BlockedPayload {
  BlockedPayload(std::span<const std::byte> bytes, int64_t block_bytes) {
    const auto step = static_cast<size_t>(block_bytes);
    for (size_t begin = 0; begin < bytes.size(); begin += step) {
      crcs.push_back(crc32(0, bytes.subspan(begin, std::min(step, bytes.size() - begin))));
    }
    payload.stored = {0, 100, std::ssize(bytes)};
    payload.length = std::ssize(bytes);
    payload.block_bytes = block_bytes;
    payload.blocks = crcs;
  }
  std::vector<uint32_t> crcs;
  Payload payload;
};

RC_GTEST_PROP(CrcLedger, EachTouchedBlockIsCheckedAndNoOther, (uint64_t seed)) {
  const auto bytes = random_bytes(static_cast<size_t>(pick(1, 300)), seed);
  const int64_t block_bytes = pick(1, 60);
  const BlockedPayload blocked(bytes, block_bytes);
  const Catalog catalog = one_tensor();
  CrcLedger ledger;
  std::vector<bool> touched(blocked.crcs.size());
  std::vector<bool> seen(bytes.size());
  for (int64_t i = pick(0, 10); i > 0; --i) {
    const size_t begin = static_cast<size_t>(pick(0, std::ssize(bytes)));
    const size_t length = static_cast<size_t>(pick(0, std::ssize(bytes) - static_cast<int64_t>(begin) + 1));
    ledger.add(catalog, 0, 0, blocked.payload, static_cast<int64_t>(begin),
               std::span(bytes).subspan(begin, length));
    for (size_t b = begin; b < begin + length; ++b) {
      seen[b] = true;
      touched[b / static_cast<size_t>(block_bytes)] = true;
    }
  }
  for (const CrcLedger::Gap& gap : ledger.gaps()) {
    RC_ASSERT(gap.length > 0);
    RC_ASSERT(gap.offset / block_bytes == (gap.offset + gap.length - 1) / block_bytes);
    for (int64_t i = gap.offset; i < gap.offset + gap.length; ++i) {
      RC_ASSERT(!seen[static_cast<size_t>(i)]);
      seen[static_cast<size_t>(i)] = true;
    }
    ledger.add(catalog, 0, 0, blocked.payload, gap.offset,
               std::span(bytes).subspan(static_cast<size_t>(gap.offset), static_cast<size_t>(gap.length)));
  }
  for (size_t b = 0; b < bytes.size(); ++b) {
    RC_ASSERT(seen[b] == touched[b / static_cast<size_t>(block_bytes)]);
  }
  RC_ASSERT(ledger.checked() == std::ranges::count(touched, true));
  RC_ASSERT(ledger.gaps().empty());
}

TEST(CrcLedger, NamesTheDamagedBlock) {
  auto bytes = random_bytes(100, 3);
  const BlockedPayload blocked(bytes, 30);
  bytes[65] ^= std::byte{1};
  const Catalog catalog = one_tensor();
  CrcLedger ledger;
  ledger.add(catalog, 0, 0, blocked.payload, 0, std::span(bytes).first(60));
  ledger.add(catalog, 0, 0, blocked.payload, 90, std::span(bytes).subspan(90));
  EXPECT_EQ(ledger.checked(), 3);
  try {
    ledger.add(catalog, 0, 0, blocked.payload, 0, bytes);
    FAIL() << "the damage was not seen";
  } catch (const CorruptError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("\"w\" at offset 160 (30 bytes"), std::string::npos) << message;
  }
}

TEST(CrcLedger, ManyThreadsReadTheBlocksOfOnePayload) {
  const auto bytes = random_bytes(1 << 16, 9);
  const BlockedPayload blocked(bytes, 1000);
  const Catalog catalog = one_tensor();
  CrcLedger ledger;
  parallel_for(8, 1 << 10, [&](size_t, size_t i) {
    const size_t begin = i * 797 % (1 << 10) * 64;
    ledger.add(catalog, 0, 0, blocked.payload, static_cast<int64_t>(begin),
               std::span(bytes).subspan(begin, 64));
  });
  EXPECT_EQ(ledger.checked(), std::ssize(blocked.crcs));
  EXPECT_TRUE(ledger.gaps().empty());
}

TEST(CrcLedger, NamesADamagedPayload) {
  auto bytes = random_bytes(64, 1);
  const Payload payload = payload_with_crc(bytes);
  bytes[40] ^= std::byte{4};
  CrcLedger ledger;
  const Catalog catalog = one_tensor();
  ledger.add(catalog, 0, 0, payload, 32, std::span(bytes).subspan(32));
  try {
    ledger.add(catalog, 0, 0, payload, 0, std::span(bytes).first(32));
    FAIL() << "the damage was not seen";
  } catch (const CorruptError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("\"w\""), std::string::npos) << message;
    EXPECT_NE(message.find("file"), std::string::npos) << message;
  }
}

TEST(CrcLedger, IgnoresPayloadsWithoutCrc) {
  const auto bytes = random_bytes(64, 1);
  Payload payload = payload_with_crc(bytes);
  payload.crc32.reset();
  CrcLedger ledger;
  ledger.add(one_tensor(), 0, 0, payload, 0, std::span(bytes).first(10));
  EXPECT_TRUE(ledger.gaps().empty());
  EXPECT_EQ(ledger.checked(), 0);
}

TEST(CrcLedger, ManyThreadsReadOnePayload) {
  const auto bytes = random_bytes(1 << 16, 7);
  const Payload payload = payload_with_crc(bytes);
  const Catalog catalog = one_tensor();
  CrcLedger ledger;
  parallel_for(8, 1 << 10, [&](size_t, size_t i) {
    const size_t begin = i * 797 % (1 << 10) * 64;  // every block, in a scattered order
    ledger.add(catalog, 0, 0, payload, static_cast<int64_t>(begin), std::span(bytes).subspan(begin, 64));
  });
  EXPECT_EQ(ledger.checked(), 1);
}

}  // namespace
}  // namespace spolia
