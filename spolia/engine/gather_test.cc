#include "spolia/engine/gather.h"

#include <cstring>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/layout/test_random.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

/// All index tuples of a shape, in row-major order.
std::vector<Dims> indices_of(const Dims& sizes) {
  std::vector<Dims> all = {{}};
  for (int64_t size : sizes) {
    std::vector<Dims> longer;
    for (const Dims& prefix : all) {
      for (int64_t i = 0; i < size; ++i) {
        longer.push_back(prefix);
        longer.back().push_back(i);
      }
    }
    all = std::move(longer);
  }
  return all;
}

int64_t dot(const Dims& a, const Dims& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), int64_t{0});
}

/// Does what the plan says, with numbers of 16 bits as the payload's bytes.
void run(const ReadPlan& plan, const std::vector<uint16_t>& stored, int64_t scratch) {
  for (const ReadOp& op : plan.ops) {
    RC_ASSERT(op.payload == 3u);
    RC_ASSERT(op.runs >= 1);
    RC_ASSERT(op.runs == 1 || op.distance > op.length);
    RC_ASSERT(op.in_place || op.runs * op.length <= scratch);
    RC_ASSERT(op.offset >= 0);
    RC_ASSERT(op.offset + (op.runs - 1) * op.distance + op.length <= std::ssize(stored) * 2);
    std::vector<std::byte> bytes(static_cast<size_t>(op.runs * op.length));
    for (int64_t r = 0; r < op.runs; ++r) {
      std::memcpy(bytes.data() + r * op.length,
                  reinterpret_cast<const std::byte*>(stored.data()) + op.offset + r * op.distance,
                  static_cast<size_t>(op.length));
    }
    if (op.in_place) {
      RC_ASSERT(plan.pieces_of(op).size() == 1u);
      std::memcpy(plan.pieces_of(op)[0].target.data, bytes.data(), bytes.size());
      continue;
    }
    for (const ReadPiece& piece : plan.pieces_of(op)) {
      copy_strided(piece.sizes, 2, piece.target.data, piece.target.strides, bytes.data() + piece.offset,
                   piece.strides);
    }
  }
}

RC_GTEST_PROP(Gather, FetchesEveryElementWithinScratch, ()) {
  // A payload of 16-bit numbers that count up, seen through random strides.
  const size_t ndim = static_cast<size_t>(pick(0, 4));
  Payload payload;
  payload.first = pick(0, 10);
  Box chunk, part;
  int64_t reach = payload.first + 1;
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t size = pick(1, 7);
    chunk.offsets.push_back(pick(0, 5));
    chunk.sizes.push_back(size);
    payload.strides.push_back(pick(0, 40));
    reach += (size - 1) * payload.strides[d];
    const int64_t begin = pick(0, size);
    part.offsets.push_back(chunk.offsets[d] + begin);
    part.sizes.push_back(pick(1, size - begin + 1));
  }
  std::vector<uint16_t> stored(static_cast<size_t>(reach));
  std::iota(stored.begin(), stored.end(), uint16_t{0});

  std::vector<uint16_t> out(static_cast<size_t>(part.numel()), 0xFFFF);
  const Dims out_strides = row_major_strides(part.sizes);
  Block block{reinterpret_cast<std::byte*>(out.data()), out_strides, DType::kInt16};
  for (int64_t& stride : block.strides) stride *= 2;
  const int64_t scratch = *rc::gen::element<int64_t>(2, 6, 16, 100, 1 << 20);

  // The box as it is, or in two: together they are what is wanted.
  std::vector<WantedBox> wanted = {{part, block}};
  const size_t dim = ndim == 0 ? 0 : static_cast<size_t>(pick(0, static_cast<int64_t>(ndim)));
  if (ndim > 0 && part.sizes[dim] > 1) {
    const int64_t low = pick(1, part.sizes[dim]);
    wanted.push_back(wanted.front());
    wanted[0].box.sizes[dim] = low;
    wanted[1].box.offsets[dim] += low;
    wanted[1].box.sizes[dim] -= low;
    wanted[1].target.data += low * block.strides[dim];
  }
  ReadPlan plan;
  plan_reads(payload, 3, DType::kInt16, chunk, wanted, scratch, plan);
  run(plan, stored, scratch);
  for (const Dims& index : indices_of(part.sizes)) {
    int64_t at = payload.first;
    for (size_t d = 0; d < ndim; ++d)
      at += (part.offsets[d] + index[d] - chunk.offsets[d]) * payload.strides[d];
    RC_ASSERT(out[static_cast<size_t>(dot(index, out_strides))] == stored[static_cast<size_t>(at)]);
  }
}

std::vector<ReadOp> reads(const Payload& payload, const Box& chunk, const Box& part, int64_t scratch) {
  static std::byte target;  // never written: the reads are only planned
  Block block{&target, row_major_strides(part.sizes), DType::kInt8};
  ReadPlan plan;
  plan_reads(payload, 0, DType::kInt8, chunk, std::vector<WantedBox>{{part, block}}, scratch, plan);
  return plan.ops;
}

TEST(Gather, RowsAreOneReadInPlaceWhateverTheScratch) {
  Payload payload;
  payload.strides = {1 << 20, 1};
  const auto ops = reads(payload, whole(Dims{64, 1 << 20}), Box{{8, 0}, {32, 1 << 20}}, 1024);
  ASSERT_EQ(ops.size(), 1u);
  EXPECT_TRUE(ops[0].in_place);
  EXPECT_EQ(ops[0].offset, 8 << 20);
  EXPECT_EQ(ops[0].length, 32 << 20);
}

TEST(Gather, NarrowColumnsAreReadRunByRunNotAsTheWholeSpan) {
  Payload payload;
  payload.strides = {1 << 20, 1};
  const auto ops = reads(payload, whole(Dims{64, 1 << 20}), Box{{0, 0}, {64, 4096}}, 1 << 22);
  ASSERT_EQ(ops.size(), 1u);
  EXPECT_EQ(ops[0].runs, 64);
  EXPECT_EQ(ops[0].length, 4096);
  EXPECT_EQ(ops[0].distance, 1 << 20);
  // As many runs as the scratch holds, and short ones not one by one.
  EXPECT_EQ(reads(payload, whole(Dims{64, 1 << 20}), Box{{0, 0}, {64, 4096}}, 1 << 15).size(), 8u);
  payload.strides = {4096, 1};
  for (const ReadOp& op : reads(payload, whole(Dims{64, 4096}), Box{{0, 0}, {64, 1000}}, 1 << 22)) {
    EXPECT_EQ(op.runs, 1);
    EXPECT_GT(op.length, 4096);
  }
}

RC_GTEST_PROP(Gather, FetchesRunsFarApart, ()) {
  // Four dims in any order of their strides, two of them dense: each run is 1 KiB or more, or a bit less.
  std::vector<size_t> order = {0, 1, 2, 3};
  for (size_t i = 4; i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(pick(0, static_cast<int64_t>(i)))]);
  Dims strides(4), sizes(4);
  const Dims lengths = {pick(1, 40), pick(8, 40), pick(1, 9), pick(1, 5)};
  const Dims gaps = {0, 0, pick(0, 3000), pick(0, 5000)};
  int64_t next = 1;
  for (size_t i = 0; i < 4; ++i) {
    sizes[order[i]] = lengths[i];
    strides[order[i]] = next;
    next = next * lengths[i] + gaps[std::min<size_t>(i + 1, 3)];
  }
  Payload payload;
  payload.strides = strides;
  payload.first = pick(0, 10);
  const Box chunk = whole(sizes);
  Box part = chunk;
  for (size_t i = 2; i < 4; ++i) {  // of the outer two some
    part.offsets[order[i]] = pick(0, lengths[i]);
    part.sizes[order[i]] = pick(1, lengths[i] - part.offsets[order[i]] + 1);
  }
  int64_t reach = payload.first + 1;
  for (size_t d = 0; d < 4; ++d) reach += (sizes[d] - 1) * strides[d];
  std::vector<uint16_t> stored(static_cast<size_t>(reach));
  std::iota(stored.begin(), stored.end(), uint16_t{0});
  std::vector<uint16_t> out(static_cast<size_t>(part.numel()), 0xFFFF);
  const Dims out_strides = row_major_strides(part.sizes);
  Block block{reinterpret_cast<std::byte*>(out.data()), out_strides, DType::kInt16};
  for (int64_t& stride : block.strides) stride *= 2;
  const int64_t scratch = *rc::gen::element<int64_t>(2048, 5000, 1 << 20);
  ReadPlan plan;
  plan_reads(payload, 3, DType::kInt16, chunk, std::vector<WantedBox>{{part, block}}, scratch, plan);
  run(plan, stored, scratch);
  for (const Dims& index : indices_of(part.sizes)) {
    int64_t at = payload.first;
    for (size_t d = 0; d < 4; ++d) at += (part.offsets[d] + index[d]) * strides[d];
    RC_ASSERT(out[static_cast<size_t>(dot(index, out_strides))] == stored[static_cast<size_t>(at)]);
  }
}

TEST(Gather, ColumnsThatFillTheirRowsTogetherAreOneRead) {
  static std::byte target;
  Payload payload;
  payload.strides = {4096, 1};
  std::vector<WantedBox> wanted;
  for (int64_t shard = 0; shard < 16; ++shard) {
    wanted.push_back({Box{{8, shard * 256}, {32, 256}}, {&target, {256, 1}, DType::kInt8}});
  }
  ReadPlan plan;
  plan_reads(payload, 0, DType::kInt8, whole(Dims{64, 4096}), wanted, 1 << 20, plan);
  ASSERT_EQ(plan.ops.size(), 1u);
  EXPECT_EQ(plan.ops[0].offset, 8 * 4096);
  EXPECT_EQ(plan.ops[0].length, 32 * 4096);
  EXPECT_EQ(plan.pieces.size(), 16u);

  plan.clear();
  plan_reads(payload, 0, DType::kInt8, whole(Dims{64, 4096}), wanted, 32 * 1024, plan);
  EXPECT_EQ(plan.ops.size(), 4u) << "cut where the scratch is full, still without reading a byte twice";
}

TEST(Gather, WideColumnsAreReadTogether) {
  Payload payload;
  payload.strides = {4096, 1};
  const auto ops = reads(payload, whole(Dims{64, 4096}), Box{{0, 0}, {64, 3000}}, 1 << 22);
  EXPECT_EQ(ops.size(), 1u);
}

}  // namespace
}  // namespace spolia
