#include "spolia/plan/transfer_plan.h"

#include <numeric>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

TensorEntry tensor_of(const std::string& name, DType dtype, const Dims& shape) {
  return whole_tensor(name, dtype, shape, {0, 0, byte_size(dtype, shape)});
}

Catalog catalog_of(std::vector<TensorEntry> tensors) {
  Catalog catalog;
  catalog.files = {"f"};
  catalog.tensors = std::move(tensors);
  sort_entries(catalog);
  return catalog;
}

TransferPlan plan_all(const Catalog& source, const Catalog& target, PlanOptions options = {}) {
  std::vector<RegionCopy> copies;
  for (size_t t = 0; t < source.tensors.size(); ++t) copies.push_back(copy_whole(t, t));
  std::vector<size_t> order(target.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  return plan_transfer(source, target, copies, order, options);
}

RC_GTEST_PROP(TransferPlan, TilesHoldEveryElementOnceInOrderWithinTheirSize, ()) {
  const auto shapes = *rc::gen::container<std::vector<std::vector<int64_t>>>(rc::gen::resize(
      4, rc::gen::container<std::vector<int64_t>>(rc::gen::element<int64_t>(0, 1, 3, 17, 129, 1000))));
  std::vector<TensorEntry> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Dims shape(std::span<const int64_t>{shapes[i]});
    RC_PRE(numel(shape) < 20'000'000);
    tensors.push_back(
        tensor_of(fmt::format("t{:03}", i), i % 2 == 0 ? DType::kFloat32 : DType::kInt8, shape));
  }
  const Catalog catalog = catalog_of(tensors);
  const size_t threads = static_cast<size_t>(pick(1, 9));
  const TransferPlan plan = plan_all(catalog, catalog, {kLeastMemory, threads});
  RC_ASSERT(plan.cost.buffer_bytes <= kLeastMemory);

  std::vector<int64_t> next(tensors.size());  // the row-major number of the first element not in a tile yet
  for (size_t i = 0; i < plan.tiles(); ++i) {
    int64_t used = 0;
    RC_ASSERT(!plan.tile(i).empty());
    for (const TilePart& part : plan.tile(i)) {
      const TensorEntry& tensor = catalog.tensors[part.target];
      const Dims strides = row_major_strides(tensor.shape);
      const Box box = plan.box_of(part, catalog);
      int64_t first = 0;
      for (size_t d = 0; d < strides.size(); ++d) first += box.offsets[d] * strides[d];
      RC_ASSERT(first == next[part.target]);
      next[part.target] += box.numel();
      used += box.numel() * element_bytes(tensor.dtype);
    }
    RC_ASSERT(used <= plan.tile_bytes);
  }
  for (size_t t = 0; t < tensors.size(); ++t) RC_ASSERT(next[t] == numel(catalog.tensors[t].shape));
}

TEST(TransferPlan, TensorThatIsCutSharesNoTile) {
  const Catalog catalog =
      catalog_of({tensor_of("a", DType::kInt8, {10}), tensor_of("b", DType::kInt8, {3, 3 << 20}),
                  tensor_of("c", DType::kInt8, {10})});
  const TransferPlan plan = plan_all(catalog, catalog, {kLeastMemory, 1});
  for (size_t i = 0; i < plan.tiles(); ++i) {
    for (const TilePart& part : plan.tile(i)) {
      if (part.target == 1) {
        EXPECT_EQ(plan.tile(i).front().target, 1u);
        EXPECT_EQ(plan.tile(i).back().target, 1u);
      }
    }
  }
}

TEST(TransferPlan, SameTilesForAnyNumberOfThreadsWithinTheTileSize) {
  const Catalog catalog = catalog_of({tensor_of("a", DType::kFloat32, {1000, 5000})});
  const TransferPlan one = plan_all(catalog, catalog, {int64_t{256} << 20, 1});
  const TransferPlan four = plan_all(catalog, catalog, {int64_t{256} << 20, 4});
  EXPECT_EQ(one.first_part, four.first_part);
}

TEST(TransferPlan, SubByteTensorsAreMovedAsBytes) {
  const Catalog catalog = catalog_of({tensor_of("a", DType::kFloat6E2M3FN, {4, 6})});
  const TransferPlan plan = plan_all(catalog, catalog);
  ASSERT_EQ(plan.tiles(), 1u);
  EXPECT_EQ(plan.box_of(plan.tile(0)[0], catalog), whole(Dims{18}));
}

TEST(TransferPlan, RefusesWhatDoesNotFit) {
  const Catalog source = catalog_of({tensor_of("a", DType::kFloat32, {4, 6})});
  auto refusal = [&](const Catalog& target, RegionCopy copy, int64_t memory = kLeastMemory) -> std::string {
    const size_t order[] = {0};
    try {
      plan_transfer(source, target, {copy}, order, {memory, 1});
    } catch (const Error& error) {
      return error.what();
    }
    return "planned";
  };
  const RegionCopy all = copy_whole(0, 0);
  EXPECT_EQ(refusal(source, all), "planned");
  EXPECT_NE(refusal(source, all, 1 << 20).find("too small"), std::string::npos);

  const Box half{{0, 0}, {2, 6}};
  EXPECT_NE(refusal(source, copy_region(0, 0, {half, half, {}})).find("would not be filled exactly"),
            std::string::npos);

  const Box outside{{1, 0}, {4, 6}};
  EXPECT_NE(refusal(source, copy_region(0, 0, {outside, whole(Dims{4, 6}), {}})).find("outside"),
            std::string::npos);

  const Catalog transposed = catalog_of({tensor_of("a", DType::kFloat32, {6, 4})});
  Region permuted{whole(Dims{4, 6}), whole(Dims{6, 4}), {1, 0}};
  EXPECT_EQ(refusal(transposed, copy_region(0, 0, permuted)), "planned");
  EXPECT_NE(refusal(transposed, all).find("would not be filled exactly"), std::string::npos);
  permuted.permute = {};
  EXPECT_NE(refusal(transposed, copy_region(0, 0, permuted)).find("sizes differ"), std::string::npos);

  EXPECT_EQ(refusal(catalog_of({tensor_of("a", DType::kBFloat16, {4, 6})}), all), "planned");
  EXPECT_NE(refusal(catalog_of({tensor_of("a", DType::kInt32, {4, 6})}), all).find("cannot be cast"),
            std::string::npos);
}

TEST(TransferPlan, DimsOfOneSideAloneHaveSizeOne) {
  const Catalog source = catalog_of({tensor_of("a", DType::kFloat32, {4, 6, 5})}),
                target = catalog_of({tensor_of("b", DType::kFloat32, {1, 5, 4})});
  auto planned = [&](const Region& region) {
    const size_t order[] = {0};
    try {
      plan_transfer(source, target, {copy_region(0, 0, region)}, order, {kLeastMemory, 1});
    } catch (const InvalidArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("sizes differ"), std::string::npos) << error.what();
      return false;
    }
    return true;
  };
  const Box all = whole(Dims{1, 5, 4}), slice{{0, 3, 0}, {4, 1, 5}};
  EXPECT_TRUE(planned({slice, all, {-1, 2, 0}}));
  EXPECT_TRUE(planned({slice, all, {1, 2, 0}}));
  EXPECT_FALSE(planned({slice, all, {-1, 0, 2}}));   // 4 are not 5
  EXPECT_FALSE(planned({slice, all, {-1, 2, -1}}));  // nothing becomes the last dim
  EXPECT_FALSE(planned({slice, all, {2, 2, 0}}));    // one dim twice
  EXPECT_FALSE(planned({slice, all, {-2, 2, 0}}));   // there is none such
  EXPECT_FALSE(planned({slice, all, {3, 2, 0}}));
  EXPECT_FALSE(planned({slice, all, {2, 0}}));                          // not one for each
  EXPECT_FALSE(planned({Box{{0, 3, 0}, {4, 2, 5}}, all, {-1, 2, 0}}));  // two rows that become nothing
}

TEST(TransferPlan, RefusesSourceWithAGap) {
  TensorEntry tensor = tensor_of("a", DType::kFloat32, {4, 6});
  tensor.boxes = BoxList(2);
  tensor.boxes.add(Box{{0, 0}, {4, 5}});
  const Catalog source = catalog_of({tensor});
  EXPECT_THROW(plan_all(source, source), CorruptError);
}

TEST(TransferPlan, PrintsItself) {
  const Catalog source = catalog_of({tensor_of("a", DType::kFloat32, {4, 6})});
  const Catalog target = catalog_of({tensor_of("a", DType::kBFloat16, {4, 6})});
  const TransferPlan plan = plan_all(source, target);
  EXPECT_NE(plan_text(plan, source, target).find("bfloat16  4x6  a <- a (1 chunk) cast from float32"),
            std::string::npos);
  const nlohmann::ordered_json json = plan_json(plan, source, target);
  EXPECT_EQ(json["bytes_read"], 96);
  EXPECT_EQ(json["bytes_written"], 48);
  EXPECT_EQ(json["tensors"]["a"]["from"][0], "a");
}

}  // namespace
}  // namespace spolia
