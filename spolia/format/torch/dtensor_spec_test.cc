#include "spolia/format/torch/dtensor_spec.h"

#include <limits>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"

namespace spolia {
namespace {

using namespace testing;

const std::vector<int64_t> kRankMap{10, 11, 12, 13};  // where the pickle has the text "map"

/// The spec of a vector of 8 elements over the mesh that `fields` describe, with one placement.
DTensorSpec read_spec(const Pairs& fields) {
  const char* module = "torch.distributed.tensor._dtensor_spec";
  std::string meta =
      py_global(module, "TensorMeta") +
      py_tuple({py_ints(std::vector<int64_t>{8}), py_ints(std::vector<int64_t>{1}), py_none()}) + "\x81";
  std::string placement =
      py_object("torch.distributed.tensor.placement_types", "Shard", py_fields({{"dim", py_int(-1)}}));
  std::string mesh = py_object("torch.distributed.device_mesh", "DeviceMesh", py_fields(fields));
  std::string pickle = py_pickle(
      py_object(module, "DTensorSpec",
                py_fields({{"mesh", mesh}, {"placements", py_tuple({placement})}, {"tensor_meta", meta}})));
  pickle::Heap heap;
  std::vector<std::byte> bytes = to_bytes(pickle);
  pickle::Ref root = pickle::read(heap, bytes, "test").root;
  DTensorSpecReader reader([](const pickle::Ref& ref) -> std::optional<IntegerTensor> {
    if (!ref.is(pickle::Kind::kString)) return std::nullopt;
    return IntegerTensor{Dims{4}, kRankMap};
  });
  return reader.read(root);
}

std::string axis(const std::string& shape, const std::string& stride) {
  return py_object("torch.distributed._mesh_layout", "_FlatLayout",
                   py_fields({{"shape", shape}, {"stride", stride}}));
}

std::string layout(const std::vector<std::string>& axes) {
  return py_object("torch.distributed._mesh_layout", "_MeshLayout", py_fields({{"axes", py_tuple(axes)}}));
}

std::vector<int64_t> ranks_of(const std::string& layout_field, int64_t rank) {
  DTensorSpec spec =
      read_spec({{"_rank_map", py_text("map")}, {"_layout", layout_field}, {"_rank", py_int(rank)}});
  auto ranks = spec.layout.mesh().ranks();
  return {ranks.begin(), ranks.end()};
}

TEST(DTensorSpec, ASubMeshIsTheOneOfTheRank) {
  std::string inner = layout({axis(py_tuple({py_int(2)}), py_tuple({py_int(1)}))});
  EXPECT_EQ(ranks_of(inner, 10), (std::vector<int64_t>{10, 11}));
  EXPECT_EQ(ranks_of(inner, 13), (std::vector<int64_t>{12, 13}));
  std::string outer = layout({axis(py_tuple({py_int(2)}), py_tuple({py_int(2)}))});
  EXPECT_EQ(ranks_of(outer, 12), (std::vector<int64_t>{10, 12}));
  EXPECT_EQ(ranks_of(outer, 11), (std::vector<int64_t>{11, 13}));
}

TEST(DTensorSpec, AnAxisMayBeSeveralDims) {
  std::string both = py_tuple({py_int(2), py_int(2)});
  EXPECT_EQ(ranks_of(layout({axis(both, py_tuple({py_int(2), py_int(1)}))}), 13),
            (std::vector<int64_t>{10, 11, 12, 13}));
  EXPECT_EQ(ranks_of(layout({axis(both, py_tuple({py_int(1), py_int(2)}))}), 13),
            (std::vector<int64_t>{10, 12, 11, 13}));
}

TEST(DTensorSpec, LayoutsWithoutAxesAreRead) {
  std::string old =
      py_object("torch.distributed._mesh_layout", "_MeshLayout",
                py_fields({{"shape", py_tuple({py_int(4)})}, {"stride", py_tuple({py_int(1)})}}));
  EXPECT_EQ(ranks_of(old, 10), kRankMap);
}

TEST(DTensorSpec, NegativeDimsCountFromTheEnd) {
  DTensorSpec spec = read_spec({{"mesh", py_text("map")}, {"mesh_dim_names", py_tuple({py_text("dp")})}});
  EXPECT_EQ(spec.shape, Dims{8});
  EXPECT_EQ(spec.layout.text(), Layout(DeviceMesh({4}, {"dp"}, kRankMap), {Shard{0}}).text());
}

TEST(DTensorSpec, LayoutsThatLeaveTheMapAreCorrupt) {
  for (int64_t huge : {int64_t{5}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    std::string size = layout({axis(py_tuple({py_int(huge)}), py_tuple({py_int(1)}))});
    EXPECT_EQ(kind_thrown([&] { ranks_of(size, 10); }), ErrorKind::kCorrupt) << huge;
    std::string stride = layout({axis(py_tuple({py_int(2)}), py_tuple({py_int(huge)}))});
    EXPECT_EQ(kind_thrown([&] { ranks_of(stride, 10); }), ErrorKind::kCorrupt) << huge;
  }
  EXPECT_EQ(kind_thrown([&] { ranks_of(layout({axis(py_tuple({py_int(0)}), py_tuple({py_int(1)}))}), 10); }),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { ranks_of(layout({axis(py_tuple({py_int(2)}), py_tuple({}))}), 10); }),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { read_spec({{"_rank_map", py_text("map")}}); }), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { read_spec({}); }), ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace spolia
