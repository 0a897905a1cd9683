#include "spolia/checkpoint/diff.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/layout/test_random.h"
#include "spolia/plan/distribution.h"
#include "spolia/store/memory_store.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLeastForTwo = 2 * kLeastMemory;

// ---- Checkpoints in memory, in any layout ----

struct DenseTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<std::byte> bytes;  // row-major
};

template <class T>
DenseTensor dense(std::string name, DType dtype, const Dims& shape, const std::vector<T>& elements) {
  std::vector<std::byte> bytes(elements.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), elements.data(), bytes.size());
  return {std::move(name), dtype, shape, std::move(bytes)};
}

class BytesFile final : public InputFile {
 public:
  const fs::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
  }
  std::vector<std::byte> bytes;

 private:
  fs::path path_ = "memory";
};

/// Tensors, each cut as the rules say, in one file.
class MemorySource final : public Source {
 public:
  explicit MemorySource(const std::vector<DenseTensor>& tensors, const std::string& rules = "mesh = 0-d",
                        std::vector<std::pair<std::string, Value>> values = {}) {
    for (const DenseTensor& tensor : tensors) {
      catalog_.tensors.push_back(whole_tensor(tensor.name, tensor.dtype, tensor.shape, {}));
    }
    sort_entries(catalog_);
    distribute(catalog_, parse_layout_rules(rules));
    catalog_.files = {"memory"};
    for (TensorEntry& tensor : catalog_.tensors) {
      const auto at = std::ranges::find(tensors, tensor.name, &DenseTensor::name);
      for (size_t c = 0; c < tensor.chunks(); ++c) {
        tensor.extents[c].file = 0;
        tensor.extents[c].offset = file_.size();
        append(*at, tensor.boxes[c]);
      }
    }
    std::ranges::sort(values, {}, &std::pair<std::string, Value>::first);
    for (auto& [name, value] : values) catalog_.values.push_back({name, std::nullopt, std::move(value), {}});
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    const TensorEntry& entry = catalog_.tensors[tensor];
    const Extent& extent = entry.extents[chunk];
    const auto bytes = std::span(file_.bytes)
                           .subspan(static_cast<size_t>(extent.offset), static_cast<size_t>(extent.length));
    return {.stored = extent,
            .length = extent.length,
            .strides = row_major_strides(addressable_box(entry, chunk).sizes),
            .crc32 = crc32(0, bytes) ^ crc_fault};
  }
  Value value(size_t index) const override { return catalog_.values[index].value; }
  const InputFile& file(uint32_t) const override { return file_; }

  uint32_t crc_fault = 0;

 private:
  void append(const DenseTensor& tensor, const Box& box) {
    const size_t width = static_cast<size_t>(element_bytes(tensor.dtype));
    const Dims strides = row_major_strides(tensor.shape);
    if (is_sub_byte(tensor.dtype)) return append(tensor.bytes);
    for (int64_t n = 0; n < box.numel(); ++n) {
      int64_t at = 0, rest = n;
      for (size_t d = box.ndim(); d-- > 0; rest /= box.sizes[d]) {
        at += (box.offsets[d] + rest % box.sizes[d]) * strides[d];
      }
      append(std::span(tensor.bytes).subspan(static_cast<size_t>(at) * width, width));
    }
  }
  void append(std::span<const std::byte> bytes) {
    file_.bytes.insert(file_.bytes.end(), bytes.begin(), bytes.end());
  }

  BytesFile file_;
};

// ---- Brute force ----

struct Expected {
  ElementDifferences found;
  Dims first;
};

/// Compares two whole tensors, in float64 where their dtypes differ.
Expected compare_whole(const DenseTensor& a, const DenseTensor& b, const Tolerance& tolerance) {
  const int64_t count = numel(addressable_shape(a.dtype, a.shape));
  Expected expected;
  if (a.dtype == b.dtype) {
    expected.found = compare_elements(a.dtype, a.bytes.data(), b.bytes.data(), count, tolerance);
  } else {
    std::vector<double> in_a(static_cast<size_t>(count)), in_b(in_a);
    cast(DType::kFloat64, in_a.data(), a.dtype, a.bytes.data(), count);
    cast(DType::kFloat64, in_b.data(), b.dtype, b.bytes.data(), count);
    expected.found = compare_elements(DType::kFloat64, in_a.data(), in_b.data(), count, tolerance);
  }
  if (expected.found.first < 0) return expected;
  const Dims shape = addressable_shape(a.dtype, a.shape), strides = row_major_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    expected.first.push_back(expected.found.first / strides[d] % shape[d]);
  }
  return expected;
}

void check_tensor(const TensorDiff& diff, const DenseTensor& a, const DenseTensor& b,
                  const Tolerance& tolerance) {
  RC_ASSERT(diff.dtype_a == a.dtype && diff.dtype_b == b.dtype);
  RC_ASSERT(diff.shape_a == a.shape && diff.shape_b == b.shape);
  const bool comparable =
      a.dtype == b.dtype || (can_cast(DType::kFloat64, a.dtype) && can_cast(DType::kFloat64, b.dtype));
  RC_ASSERT(diff.compared == (a.shape == b.shape && comparable));
  if (!diff.compared) return;
  const Expected expected = compare_whole(a, b, tolerance);
  RC_ASSERT(diff.elements == numel(addressable_shape(a.dtype, a.shape)));
  RC_ASSERT(diff.differing == expected.found.differing);
  RC_ASSERT(diff.nan_on_one_side == expected.found.nan_on_one_side);
  RC_ASSERT(diff.first == expected.first);
  RC_ASSERT(diff.max_absolute == expected.found.max_absolute);
  RC_ASSERT(diff.max_relative == expected.found.max_relative);
  const double mean = expected.found.sum_absolute / static_cast<double>(std::max<int64_t>(diff.elements, 1));
  RC_ASSERT(mean == diff.mean_absolute || std::abs(mean - diff.mean_absolute) <= 1e-12 * mean);
  RC_ASSERT(diff.is_equal() == (a.dtype == b.dtype && expected.found.differing == 0));
}

DenseTensor random_tensor(std::string name) {
  static const std::vector<DType> kDTypes = {
      DType::kFloat32, DType::kBFloat16,  DType::kFloat16,      DType::kFloat64, DType::kInt64,
      DType::kUInt8,   DType::kComplex64, DType::kFloat8E4M3FN, DType::kBool,    DType::kFloat4E2M1FN};
  DenseTensor tensor{std::move(name), kDTypes[static_cast<size_t>(pick(0, std::ssize(kDTypes)))], {}, {}};
  for (int64_t d = pick(0, 4); d > 0; --d) tensor.shape.push_back(pick(0, 12));
  if (is_sub_byte(tensor.dtype)) tensor.shape.push_back(2);
  tensor.bytes.resize(static_cast<size_t>(byte_size(tensor.dtype, tensor.shape)));
  for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(pick(0, 256));
  return tensor;
}

/// The same with a few other bytes, or of another dtype or shape.
DenseTensor changed(const DenseTensor& tensor) {
  if (pick(0, 6) == 0) return random_tensor(tensor.name);
  DenseTensor other = tensor;
  if (pick(0, 6) == 0 && can_cast(DType::kFloat64, tensor.dtype)) {
    other.dtype = *rc::gen::element(DType::kFloat32, DType::kBFloat16, DType::kFloat64);
    other.bytes.resize(static_cast<size_t>(byte_size(other.dtype, other.shape)));
    cast(other.dtype, other.bytes.data(), tensor.dtype, tensor.bytes.data(), numel(tensor.shape));
  }
  for (int64_t n = other.bytes.empty() ? 0 : pick(0, 5); n > 0; --n) {
    other.bytes[static_cast<size_t>(pick(0, std::ssize(other.bytes)))] = static_cast<std::byte>(pick(0, 256));
  }
  return other;
}

std::string random_rules(const std::vector<DenseTensor>& tensors) {
  std::string rules = "mesh = 2x3";
  for (const DenseTensor& tensor : tensors) {
    if (tensor.shape.empty() || is_sub_byte(tensor.dtype) || pick(0, 3) == 0) continue;
    rules += "; " + tensor.name + ": [strided(-1, 2), shard(0, balanced)]";
  }
  return rules;
}

PlanOptions random_plan() {
  return {.memory = kLeastForTwo, .threads = static_cast<size_t>(pick(1, 4)), .largest_tile = pick(16, 600)};
}

RC_GTEST_PROP(Diff, FindsWhatBruteForceFinds, ()) {
  std::vector<DenseTensor> a, b, both_a, both_b;
  for (int64_t n = 0, count = pick(0, 6); n < count; ++n) {
    DenseTensor tensor = random_tensor("t" + std::to_string(n));
    const int64_t place = pick(0, 6);
    if (place != 0) a.push_back(tensor);
    if (place != 1) b.push_back(changed(tensor));
    if (place > 1) both_a.push_back(a.back());
    if (place > 1) both_b.push_back(b.back());
  }
  DiffOptions options{.plan = random_plan()};
  options.tolerance = {*rc::gen::element(0.0, 0.01), *rc::gen::element(0.0, 10.0)};
  const Difference found = diff(MemorySource(a, random_rules(a)), MemorySource(b, random_rules(b)), options);

  RC_ASSERT(found.tensors_only_in_a.size() == a.size() - both_a.size());
  RC_ASSERT(found.tensors_only_in_b.size() == b.size() - both_b.size());
  RC_ASSERT(found.tensors.size() == both_a.size());
  bool equal = a.size() == both_a.size() && b.size() == both_b.size();
  for (size_t i = 0; i < both_a.size(); ++i) {
    RC_LOG() << both_a[i].name << " " << name_of(both_a[i].dtype) << " " << list_text(both_a[i].shape)
             << "\n";
    check_tensor(found.tensors[i], both_a[i], both_b[i], options.tolerance);
    equal = equal && found.tensors[i].is_equal();
  }
  RC_ASSERT(found.is_equal() == equal);
}

RC_GTEST_PROP(Diff, FiguresDoNotDependOnThreads, ()) {
  std::vector<float> x(2000), y(x);
  for (float& number : x) number = static_cast<float>(pick(0, 1'000'000)) / 7;
  for (float& number : y) number = static_cast<float>(pick(0, 1'000'000)) / 7;
  const MemorySource a({dense("t", DType::kFloat32, {40, 50}, x)}, "mesh = 3; *: [shard(0)]");
  const MemorySource b({dense("t", DType::kFloat32, {40, 50}, y)}, "mesh = 4; *: [shard(1)]");
  DiffOptions one{.plan = {.memory = 4 * kLeastForTwo, .threads = 1, .largest_tile = 256}}, four = one;
  four.plan.threads = 4;
  RC_ASSERT(diff(a, b, one).tensors[0].mean_absolute == diff(a, b, four).tensors[0].mean_absolute);
}

// ---- Examples ----

Difference diff_of(const Source& a, const Source& b, DiffOptions options = {}) {
  options.plan = {kLeastForTwo, 2};
  return diff(a, b, options);
}

TEST(Diff, TellsWhereAndByHowMuch) {
  const MemorySource a({dense<float>("x", DType::kFloat32, {2, 3}, {1, 2, 3, 4, 5, 6})});
  const MemorySource b({dense<float>("x", DType::kFloat32, {2, 3}, {1, 2, 3, 4, 5.5, 4})});
  const TensorDiff x = diff_of(a, b).tensors.at(0);
  EXPECT_EQ(x.differing, 2);
  EXPECT_EQ(x.elements, 6);
  EXPECT_EQ(x.first, (Dims{1, 1}));
  EXPECT_EQ(x.first_a, "5");
  EXPECT_EQ(x.first_b, "5.5");
  EXPECT_EQ(x.max_absolute, 2);
  EXPECT_EQ(x.mean_absolute, 2.5 / 6);
  EXPECT_EQ(x.max_relative, 0.5);
  EXPECT_TRUE(diff_of(a, b, {.tolerance = {.absolute = 2}}).is_equal());
}

TEST(Diff, FloatsOfDifferentDtypesAreComparedByValue) {
  const MemorySource a({dense<float>("x", DType::kFloat32, {2}, {1.5F, 0.1F})});
  const MemorySource b({dense<uint16_t>("x", DType::kBFloat16, {2}, {0x3FC0, 0x3DCD})});
  const Difference found = diff_of(a, b, {.tolerance = {.relative = 0.01}});
  EXPECT_TRUE(found.tensors[0].compared);
  EXPECT_EQ(found.tensors[0].differing, 0);
  EXPECT_FALSE(found.tensors[0].is_equal());
  EXPECT_FALSE(found.is_equal());
  EXPECT_EQ(diff_of(a, b).tensors[0].first_b, "0.10009765625");
}

TEST(Diff, WhatCannotBeComparedDiffers) {
  const MemorySource a(
      {dense<int32_t>("i", DType::kInt32, {1}, {1}), dense<int32_t>("s", DType::kInt32, {2}, {1, 2})});
  const MemorySource b(
      {dense<int64_t>("i", DType::kInt64, {1}, {1}), dense<int32_t>("s", DType::kInt32, {2, 1}, {1, 2})});
  const Difference found = diff_of(a, b);
  for (const TensorDiff& tensor : found.tensors) EXPECT_FALSE(tensor.compared || tensor.is_equal());
}

TEST(Diff, Values) {
  const auto number = [](int64_t n) { return Value(Value::Data(n)); };
  const MemorySource a({}, "mesh = 1", {{"same", number(1)}, {"other", number(1)}, {"a", number(1)}});
  const MemorySource b({dense<float>("a", DType::kFloat32, {}, {1})}, "mesh = 1",
                       {{"same", number(1)}, {"other", number(2)}});
  const Difference found = diff_of(a, b);
  EXPECT_EQ(found.values_only_in_a, std::vector<std::string>{"a"});
  EXPECT_EQ(found.tensors_only_in_b, std::vector<std::string>{"a"});
  ASSERT_EQ(found.values.size(), 1u);
  EXPECT_EQ(found.values[0].name, "other");
  EXPECT_EQ(found.values[0].a, "1");
  EXPECT_EQ(found.values[0].b, "2");
  EXPECT_EQ(found.values_compared, 2u);
  EXPECT_TRUE(diff_of(a, b, {.drop = {"a"}, .values = false}).is_equal());
  EXPECT_TRUE(diff_of(a, b, {.select = {"s*"}}).is_equal());
}

TEST(Diff, EmptyCheckpointsAreEqual) { EXPECT_TRUE(diff_of(MemorySource({}), MemorySource({})).is_equal()); }

TEST(Diff, RefusesNonsense) {
  const MemorySource a({dense<float>("x", DType::kFloat32, {}, {1})});
  EXPECT_THROW(diff_of(a, a, {.tolerance = {.relative = -1}}), InvalidArgumentError);
  EXPECT_THROW(diff_of(a, a, {.tolerance = {.absolute = INFINITY}}), InvalidArgumentError);
  EXPECT_THROW(diff_of(a, a, {.select = {"y"}}), InvalidArgumentError);
  EXPECT_THROW(diff_of(a, a, {.drop = {"y*"}}), InvalidArgumentError);
  EXPECT_THROW(diff(a, a, {.plan = {kLeastForTwo - 1}}), InvalidArgumentError);
}

TEST(Diff, ChecksumsOfBothAreChecked) {
  const MemorySource good({dense<float>("x", DType::kFloat32, {2}, {1, 2})});
  MemorySource bad({dense<float>("x", DType::kFloat32, {2}, {1, 2})});
  bad.crc_fault = 1;
  EXPECT_EQ(diff_of(good, good).report.crcs_checked, 2);
  EXPECT_THROW(diff_of(good, bad), CorruptError);
  EXPECT_THROW(diff_of(bad, good), CorruptError);
}

// ---- Real checkpoints ----

class DiffRealCheckpoint : public testing::TestWithParam<const char*> {};

TEST_P(DiffRealCheckpoint, EqualsItselfInAnotherFormat) {
  const auto source = open_source(posix_store(), fs::path(SPOLIA_TEST_DATA) / GetParam() / "checkpoint");
  ConvertOptions options{.plan = {kLeastMemory, 2}};
  for (const TensorEntry& tensor : source->catalog().tensors) {
    if (info(tensor.dtype).safetensors.empty()) options.selection.drop.push_back(tensor.name);
  }
  const auto store = std::make_shared<MemoryStore>();
  run_conversion(*source, plan_conversion(*source, options), *store, "/out", {});
  const auto converted = open_source(store, "/out");

  const DiffOptions tensors_only{.plan = {.memory = kLeastForTwo, .threads = 3, .largest_tile = 4096},
                                 .drop = options.selection.drop,
                                 .values = false};
  EXPECT_TRUE(diff(*source, *converted, tensors_only).is_equal());
  EXPECT_TRUE(diff(*converted, *source, tensors_only).is_equal());
  EXPECT_TRUE(diff_of(*source, *source).is_equal());
}

INSTANTIATE_TEST_SUITE_P(ByPyTorch, DiffRealCheckpoint,
                         testing::Values("torch-2.14/fsdp-tp-2x2", "torch-2.14/zstd-2", "torch-2.14/uneven-5",
                                         "torch-2.14/dtypes-1", "torch-2.14/rank-files-2",
                                         "torch-2.14/torch-save-1"));

}  // namespace
}  // namespace spolia
