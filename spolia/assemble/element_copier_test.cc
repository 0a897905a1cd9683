#include "spolia/assemble/element_copier.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/assemble/testing_devices.h"
#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

/// Elements at random strides somewhere, and their memory as the host has it.
struct Placed {
  Buffer memory;
  View view;

  Placed(const Dims& shape, DType dtype, Device device, bool may_repeat) {
    const int64_t width = element_bytes(dtype);
    view = {nullptr, dtype, shape, Dims(shape.size(), 0), device};
    std::vector<size_t> order(shape.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::reverse(order);
    if (pick(0, 3) == 0 && order.size() > 1) std::swap(order[0], order.back());
    int64_t step = width, first = 0;
    for (size_t d : order) {
      if (pick(0, 3) == 0) step += width * pick(0, 3);
      if (may_repeat && pick(0, 8) == 0) continue;  // stride 0
      view.strides[d] = step;
      step *= shape[d];
      if (pick(0, 8) > 0) continue;
      first += view.strides[d] * (shape[d] - 1);
      view.strides[d] = -view.strides[d];
    }
    memory = Buffer(step, device);
    view.data = memory.data() + first;
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all(static_cast<size_t>(memory.size()));
    backend_of(memory.device()).copy_to_host(all.data(), memory.data(), memory.size());
    return all;
  }
  void set(std::span<const std::byte> all) {
    backend_of(memory.device()).copy_from_host(memory.data(), all.data(), memory.size());
  }
  /// In `all`, which is bytes().
  template <class Byte>
  Byte* element(std::vector<Byte>& all, int64_t index) const {
    Byte* at = all.data() + (view.data - memory.data());
    for (size_t d = view.shape.size(); d-- > 0;) {
      at += index % view.shape[d] * view.strides[d];
      index /= view.shape[d];
    }
    return at;
  }
};

RC_GTEST_PROP(ElementCopier, CopiesAndCastsFromAnywhereToAnywhere, ()) {
  FaultyCuda::use();
  const Device places[] = {{}, device_of(0), device_of(3)};
  constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  Dims shape;
  for (int64_t dims = pick(0, 4); dims > 0; --dims) shape.push_back(pick(1, 9));
  const DType from_dtype = kDTypes[pick(0, 4)], to_dtype = pick(0, 2) == 0 ? from_dtype : kDTypes[pick(0, 4)];
  Placed from(shape, from_dtype, places[pick(0, 3)], true), to(shape, to_dtype, places[pick(0, 3)], false);
  std::vector<std::byte> source = from.bytes();
  for (int64_t i = 0; i < numel(shape); ++i) {
    const auto number = static_cast<double>(i % 199 - 60);
    cast(from_dtype, from.element(source, i), DType::kFloat64, &number, 1);
  }
  from.set(source);
  std::vector<std::byte> expected(static_cast<size_t>(to.memory.size()), std::byte{0xA5});
  to.set(expected);
  for (int64_t i = 0; i < numel(shape); ++i)
    cast(to_dtype, to.element(expected, i), from_dtype, from.element(source, i), 1);

  // Far less memory than elements, mostly.
  ElementCopier copier({0, 3}, ElementCopier::kLeastBytes + pick(0, 2) * 4000);
  copier.copy(to.view, from.view);
  RC_ASSERT(to.bytes() == expected);
  RC_ASSERT(from.bytes() == source);
  RC_ASSERT(FakeCuda::instance().take_faults().empty());
}

TEST(ElementCopier, OnTheHostItNeedsNoMemory) {
  ElementCopier copier;
  EXPECT_EQ(copier.bytes(), 0);
  const float from[4] = {1, 2, 3, 4};
  double to[4] = {};
  const int64_t shape[] = {4};
  copier.copy(dense_view(reinterpret_cast<std::byte*>(to), DType::kFloat64, shape),
              dense_view(reinterpret_cast<const std::byte*>(from), DType::kFloat32, shape));
  EXPECT_EQ(to[3], 4.0);
}

}  // namespace
}  // namespace spolia
