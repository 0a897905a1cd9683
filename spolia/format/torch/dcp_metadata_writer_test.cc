#include "spolia/format/torch/dcp_metadata_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "spolia/base/hash.h"
#include "spolia/format/torch/dcp_metadata.h"

namespace spolia {
namespace {

/// Tensors of `chunks` rows each.
Catalog catalog_of(int64_t tensors, int64_t chunks) {
  Catalog catalog;
  catalog.files = {"__0_0.distcp", "__1_0.distcp"};
  for (int64_t t = 0; t < tensors; ++t) {
    TensorEntry tensor;
    tensor.name = fmt::format("layers.{}.weight", t);
    tensor.path = {"layers", t, "weight"};
    tensor.shape = {chunks, 5};
    tensor.boxes = BoxList(2);
    for (int64_t c = 0; c < chunks; ++c) {
      tensor.boxes.add({{c, 0}, {1, 5}});
      tensor.extents.push_back({static_cast<uint32_t>(c % 2), (t * chunks + c) * 1000, 20});
    }
    catalog.tensors.push_back(std::move(tensor));
  }
  sort_entries(catalog);
  return catalog;
}

TEST(DcpMetadataWriter, ComesInPieces) {
  const Catalog catalog = catalog_of(3000, 10);
  const KeyPath path{"step"};
  const DcpValueItem value{"step", &path, {1, 77, 7}};
  DcpMetadataOptions options;
  options.item_of = [&](size_t t, size_t c) {
    Extent item = catalog.tensors[t].extents[c];
    item.length += 900;
    return item;
  };
  std::string bytes;
  size_t pieces = 0;
  write_dcp_metadata(catalog, {&value, 1}, options, [&](std::string_view piece) {
    EXPECT_LT(piece.size(), (size_t{1} << 20) + 1000);
    bytes += piece;
    ++pieces;
  });
  EXPECT_GT(pieces, 2U);
  const Catalog again = read_dcp_metadata(bytes_of(bytes), "/c/.metadata");
  ASSERT_EQ(again.tensors.size(), catalog.tensors.size());
  for (size_t t = 0; t < again.tensors.size(); ++t) {
    EXPECT_EQ(again.tensors[t].name, catalog.tensors[t].name);
    EXPECT_EQ(again.tensors[t].path, catalog.tensors[t].path);
    EXPECT_EQ(again.tensors[t].boxes, catalog.tensors[t].boxes);
    for (size_t c = 0; c < 10; ++c) EXPECT_EQ(again.tensors[t].extents[c], options.item_of(t, c));
  }
  ASSERT_EQ(again.values.size(), 1U);
  EXPECT_EQ(again.values[0].path, path);
  EXPECT_EQ(again.values[0].extent, (Extent{1, 77, 7}));
}

TEST(DcpMetadataWriter, NothingAtAll) {
  const Catalog again = read_dcp_metadata(bytes_of(write_dcp_metadata(Catalog())), "/c/.metadata");
  EXPECT_TRUE(again.tensors.empty());
  EXPECT_TRUE(again.values.empty());
}

}  // namespace
}  // namespace spolia
