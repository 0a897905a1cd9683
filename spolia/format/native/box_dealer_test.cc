#include "spolia/format/native/box_dealer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/native/random_layout.h"

namespace spolia {
namespace {

RC_GTEST_PROP(BoxesWritten, AreThoseOfTheReplicaThatIsNamed, ()) {
  const Dims shape = random_shape();
  const Layout layout = random_layout(shape);
  for (int64_t rank : layout.mesh().ranks()) {
    const std::vector<int64_t> replicas = layout.replicas(rank);
    for (uint32_t replica = 0; replica <= replicas.size(); ++replica) {
      const bool writes = replica < replicas.size() && replicas[replica] == rank;
      std::vector<Box> due;
      if (writes) {
        for (const LocalBox& box : layout.shard(shape, rank).boxes) due.push_back(box.global);
      }
      RC_ASSERT(boxes_written(layout, replica, shape, rank) == due);
    }
  }
  RC_ASSERT(boxes_written(layout, 0, shape, 1'000'000).empty());
}

TensorEntry tensor_of(std::string name, Dims shape, std::shared_ptr<const Layout> layout) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.layout = std::move(layout);
  if (tensor.layout != nullptr) tensor.replica = 0;
  return tensor;
}

TEST(BoxDealer, DealsEachTensorsBoxesInOrder) {
  auto strided = std::make_shared<const Layout>(DeviceMesh({2}), std::vector<Placement>{StridedShard{0, 2}});
  Catalog catalog;
  catalog.tensors = {tensor_of("a", {4}, strided), tensor_of("b", {4}, strided), tensor_of("c", {4}, nullptr),
                     tensor_of("d", {0}, strided), tensor_of("e", {4}, strided)};
  catalog.tensors[4].replica.reset();
  BoxDealer dealer(catalog);
  EXPECT_TRUE(dealer.deals(0));
  EXPECT_FALSE(dealer.deals(2));
  EXPECT_FALSE(dealer.deals(3));
  EXPECT_FALSE(dealer.deals(4));
  dealer.start(1, 4);
  EXPECT_EQ(*dealer.next(0), (Box{{1}, {1}}));
  EXPECT_EQ(dealer.unfinished(), 0u);
  EXPECT_EQ(*dealer.next(1), (Box{{1}, {1}}));
  EXPECT_EQ(*dealer.next(0), (Box{{3}, {1}}));
  EXPECT_EQ(dealer.unfinished(), 1u);
  EXPECT_EQ(*dealer.next(1), (Box{{3}, {1}}));
  EXPECT_EQ(dealer.next(1), nullptr);
  EXPECT_EQ(dealer.unfinished(), std::nullopt);
  dealer.start(0, 2);
  EXPECT_EQ(*dealer.next(1), (Box{{0}, {1}}));
  EXPECT_EQ(dealer.next(0), nullptr);  // the two chunks are the other tensor's
  dealer.start(2, 2);
  EXPECT_EQ(dealer.next(0), nullptr);  // outside the mesh
}

}  // namespace
}  // namespace spolia
