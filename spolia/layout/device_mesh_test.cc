#include "spolia/layout/device_mesh.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

using Ranks = std::vector<int64_t>;
using Names = std::vector<std::string>;

Ranks ranks_of(const std::optional<DeviceMesh>& mesh) {
  return mesh ? Ranks(mesh->ranks().begin(), mesh->ranks().end()) : Ranks();
}

TEST(DeviceMesh, CoordinatesAreRowMajor) {
  DeviceMesh mesh({2, 3});
  EXPECT_EQ(ranks_of(mesh), (Ranks{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(mesh.coordinates_of(0), (Dims{0, 0}));
  EXPECT_EQ(mesh.coordinates_of(4), (Dims{1, 1}));
  EXPECT_FALSE(mesh.coordinates_of(6));
  EXPECT_FALSE(mesh.coordinates_of(-1));
  EXPECT_EQ(mesh.text(), "2x3");
}

TEST(DeviceMesh, AnyDistinctRanksWillDo) {
  DeviceMesh mesh({2, 2}, {"dp", "tp"}, {7, 0, 1, 6});
  EXPECT_EQ(mesh.coordinates_of(7), (Dims{0, 0}));
  EXPECT_EQ(mesh.coordinates_of(6), (Dims{1, 1}));
  EXPECT_FALSE(mesh.coordinates_of(2));
  EXPECT_EQ(mesh.ranks_along(0, 0), (Ranks{0, 6}));
  EXPECT_EQ(mesh.ranks_along(1, 0), (Ranks{7, 0}));
  EXPECT_EQ(mesh.ranks_along(1, 2), Ranks{});
  EXPECT_EQ(mesh.text(), "2x2 (dp, tp) on [7, 0, 1, 6]");
}

TEST(DeviceMesh, SubMeshes) {
  DeviceMesh mesh({2, 2, 3}, {"dp", "pp", "tp"});
  EXPECT_EQ(ranks_of(mesh.sub_mesh(Names{"tp"}, 4)), (Ranks{3, 4, 5}));
  EXPECT_EQ(ranks_of(mesh.sub_mesh(Names{"dp", "tp"}, 4)), (Ranks{3, 4, 5, 9, 10, 11}));
  EXPECT_EQ(ranks_of(mesh.sub_mesh(Names{"tp", "dp"}, 4)), (Ranks{3, 9, 4, 10, 5, 11}));
  EXPECT_EQ(mesh.sub_mesh(Names{"tp", "dp"}, 4)->text(), "3x2 (tp, dp) on [3, 9, 4, 10, 5, 11]");
  EXPECT_EQ(ranks_of(mesh.sub_mesh(Names{}, 4)), Ranks{4});
  EXPECT_EQ(*mesh.sub_mesh(Names{"dp", "pp", "tp"}, 4), mesh);
  EXPECT_FALSE(mesh.sub_mesh(Names{"tp"}, 12));
  EXPECT_THROW(mesh.sub_mesh(Names{"cp"}, 4), InvalidArgumentError);
  EXPECT_THROW(mesh.sub_mesh(Names{"tp", "tp"}, 4), InvalidArgumentError);
  EXPECT_THROW(mesh.sub_mesh(std::vector<size_t>{3}, 4), InvalidArgumentError);
}

TEST(DeviceMesh, RefusesNonsense) {
  EXPECT_THROW(DeviceMesh({2, 0}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({-2}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({int64_t{1} << 40, int64_t{1} << 40}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({int64_t{1} << 40}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {"dp", "tp"}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2, 1}, {"dp", "dp"}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {""}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {"\x1b[2J"}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {}, {0}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {}, {3, 3}), InvalidArgumentError);
  EXPECT_THROW(DeviceMesh({2}, {}, {0, -1}), InvalidArgumentError);
}

RC_GTEST_PROP(DeviceMesh, RanksAlongADimDifferInItAlone, ()) {
  Dims shape;
  for (int64_t d = pick(1, 4); d > 0; --d) shape.push_back(pick(1, 5));
  DeviceMesh mesh(shape);
  size_t dim = pick(0, shape.size());
  for (int64_t rank : mesh.ranks()) {
    Ranks line = mesh.ranks_along(dim, rank);
    RC_ASSERT(std::ssize(line) == shape[dim]);
    for (int64_t i = 0; i < shape[dim]; ++i) {
      Dims expected = *mesh.coordinates_of(rank);
      expected[dim] = i;
      RC_ASSERT(*mesh.coordinates_of(line[i]) == expected);
    }
  }
}

}  // namespace
}  // namespace spolia
