#include "spolia/format/torch/payload_table.h"

#include <gtest/gtest.h>

#include "spolia/base/threads.h"

namespace spolia {
namespace {

bool same(const Payload& a, const Payload& b) {
  return a.stored == b.stored && a.codec == b.codec && a.offset == b.offset && a.length == b.length &&
         a.first == b.first && a.strides == b.strides && a.crc32 == b.crc32;
}

Catalog three_tensors() {
  Catalog catalog;
  for (int64_t t = 0; t < 3; ++t) {
    TensorEntry entry;
    entry.shape = {6, 2};
    entry.boxes = BoxList(2);
    for (int64_t c = 0; c < 3; ++c) {
      entry.boxes.add(Dims{2 * c, 0}, Dims{2, 2});
      entry.extents.push_back({static_cast<uint32_t>(t), 100 * c, 50});
    }
    catalog.tensors.push_back(std::move(entry));
  }
  return catalog;
}

TEST(PayloadTable, GivesBackWhatWasSet) {
  Catalog catalog = three_tensors();
  PayloadTable table(catalog);
  std::vector<Payload> forms{
      {{1, 100, 50}, Codec::kNone, 10, 16, 0, {2, 1}, 77},            // as usual
      {{1, 100, 50}, Codec::kZstd, 10, 16, 0, {2, 1}, 0},             // a checksum of 0 is one
      {{1, 100, 50}, Codec::kNone, 10, 16, 0, {2, 1}, std::nullopt},  //
      {{1, 100, 50}, Codec::kNone, 10, 32, 3, {2, 1}, 77},            // not from the start
      {{1, 100, 50}, Codec::kNone, 10, 16, 0, {1, 2}, 77},            // transposed
      {{1, 120, 20}, Codec::kDeflate, 0, 16, 0, {2, 1}, 77},          // elsewhere
  };
  EXPECT_FALSE(table.find(1, 1).has_value());
  for (const Payload& payload : forms) {
    table.set(1, 1, payload);
    EXPECT_TRUE(same(table.find(1, 1).value(), payload));
  }
  for (auto [t, c] : std::vector<std::pair<size_t, size_t>>{{0, 0}, {1, 0}, {1, 2}, {2, 0}, {2, 2}}) {
    EXPECT_FALSE(table.find(t, c).has_value());
  }
}

TEST(PayloadTable, ManyThreadsMayUseIt) {
  Catalog catalog = three_tensors();
  PayloadTable table(catalog);
  parallel_for(4, 400, [&](size_t, size_t i) {
    size_t t = i % 3, c = i / 3 % 3;
    Payload payload{catalog.tensors[t].extents[c], Codec::kNone, 10, 16, i % 2 ? 1 : 0, {2, 1}, 77};
    table.set(t, c, payload);
    EXPECT_EQ(table.find(t, c).value().stored, catalog.tensors[t].extents[c]);
  });
}

}  // namespace
}  // namespace spolia
