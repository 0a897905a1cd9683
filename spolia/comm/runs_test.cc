#include "spolia/comm/runs.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/world.h"
#include "spolia/layout/test_random.h"

namespace spolia {
namespace {

std::vector<std::byte> bytes_of(const Runs& runs) {
  std::vector<std::byte> bytes;
  for (const Run& run : runs) {
    for (int64_t row = 0; row < run.rows; ++row)
      bytes.insert(bytes.end(), run.data + row * run.pitch, run.data + row * run.pitch + run.bytes);
  }
  return bytes;
}

/// A view of random shape whose elements lie in random order, with gaps, forwards and backwards.
View random_view(std::vector<std::byte>& memory, DType dtype) {
  const int64_t width = element_bytes(dtype);
  View view{nullptr, dtype, {}, {}, {}};
  for (int64_t dims = pick(0, 5); dims > 0; --dims) view.shape.push_back(pick(0, 12) == 0 ? 0 : pick(1, 7));
  view.strides.resize(view.shape.size(), 0);
  std::vector<size_t> order(view.shape.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (pick(0, 3) > 0) {
    std::ranges::reverse(order);
  } else {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[static_cast<size_t>(pick(0, i))]);
  }
  int64_t step = width, first = 0;
  for (size_t d : order) {
    if (pick(0, 4) == 0) step += width * pick(0, 3);
    view.strides[d] = step;
    step *= std::max<int64_t>(view.shape[d], 1);
    if (pick(0, 6) > 0) continue;
    first += view.strides[d] * (std::max<int64_t>(view.shape[d], 1) - 1);
    view.strides[d] = -view.strides[d];
  }
  memory.resize(static_cast<size_t>(step + width));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 37 + i / 251);
  view.data = memory.data() + first;
  return view;
}

/// The addresses of the elements in row-major order.
std::vector<std::byte*> elements_of(const View& view) {
  std::vector<std::byte*> elements;
  for (int64_t at = 0; at < numel(view.shape); ++at) {
    std::byte* element = view.data;
    int64_t left = at;
    for (size_t d = view.shape.size(); d-- > 0;) {
      element += left % view.shape[d] * view.strides[d];
      left /= view.shape[d];
    }
    elements.push_back(element);
  }
  return elements;
}

RC_GTEST_PROP(Runs, AreAViewsElementsInRowMajorOrder, ()) {
  std::vector<std::byte> memory;
  const View view = random_view(memory, pick(0, 2) == 0 ? DType::kFloat32 : DType::kUInt8);
  Runs runs;
  append_runs(view, runs);
  std::vector<std::byte> expected;
  for (std::byte* element : elements_of(view))
    expected.insert(expected.end(), element, element + element_bytes(view.dtype));
  RC_ASSERT(bytes_of(runs) == expected);
  for (const Run& run : runs) RC_ASSERT(run.bytes > 0 && run.rows > 0);
}

TEST(Runs, ASliceIsOneRunAndWhatLiesEndToEndToo) {
  std::vector<std::byte> memory(1 << 16);
  const View slice{memory.data() + 8, DType::kFloat32, {16, 4, 32}, {1024, 128, 4}, {}};
  EXPECT_TRUE(lies_in_runs(slice));
  Runs runs;
  append_runs(slice, runs);
  ASSERT_EQ(runs.size(), 1);
  EXPECT_EQ(runs[0].bytes, 512);
  EXPECT_EQ(runs[0].rows, 16);
  EXPECT_EQ(runs[0].pitch, 1024);

  runs.clear();
  append_runs(byte_view(std::span(memory).first(1000)), runs);
  append_runs(byte_view(std::span(memory).subspan(1000, 24)), runs);
  ASSERT_EQ(runs.size(), 1);
  EXPECT_EQ(runs[0].bytes, 1024);
}

TEST(Runs, ShortRowsAndSmallPiecesAreBetterPacked) {
  std::vector<std::byte> memory(1 << 16);
  EXPECT_FALSE(lies_in_runs({memory.data(), DType::kFloat32, {64, 3}, {128, 4}, {}}));
  EXPECT_TRUE(lies_in_runs({memory.data(), DType::kFloat32, {64, 4}, {128, 4}, {}}));
  EXPECT_FALSE(lies_in_runs({memory.data(), DType::kFloat32, {31, 4}, {128, 4}, {}}));
  EXPECT_FALSE(lies_in_runs({memory.data(), DType::kFloat32, {64, 64}, {4, 256}, {}}));  // transposed
  EXPECT_FALSE(lies_in_runs(byte_view(std::span(memory).first(511))));
  EXPECT_TRUE(lies_in_runs(byte_view(std::span(memory).first(512))));
  EXPECT_FALSE(lies_in_runs(byte_view(std::span(memory).first(0))));
}

/// So many bytes in random runs; the memory between them is poisoned.
Runs random_runs(std::vector<std::byte>& memory, int64_t bytes) {
  memory.assign(static_cast<size_t>(3 * bytes + 20'000), std::byte{0xA5});
  Runs runs;
  std::byte* at = memory.data();
  while (bytes > 0) {
    Run run{at, pick(1, std::min<int64_t>(bytes, 300) + 1), 1, 0};
    if (pick(0, 2) == 0) run.rows = pick(1, bytes / run.bytes + 1);
    if (pick(0, 5) == 0) run.bytes = bytes / run.rows;
    run.pitch = run.bytes + pick(0, 2) * pick(0, 1 + std::min<int64_t>(64, 10'000 / run.rows));
    bytes -= run.bytes * run.rows;
    at += run.rows * run.pitch + pick(0, 3);
    runs.push_back(run);
  }
  return runs;
}

RC_GTEST_PROP(Runs, GoFromPlaceToPlaceHoweverTheyLieOnOtherRanks, ()) {
  const int ranks = static_cast<int>(pick(2, 5));
  const int root = static_cast<int>(pick(0, ranks)), peer = (root + 1) % ranks;
  const int64_t bytes = pick(0, 4) == 0 ? pick(100'000, 400'000) : pick(1, 3000);
  std::vector<std::vector<std::byte>> memory(static_cast<size_t>(ranks)), given(memory);
  std::vector<Runs> runs;
  std::vector<std::byte> sent;
  for (int r = 0; r < ranks; ++r) {
    runs.push_back(random_runs(memory[static_cast<size_t>(r)], bytes));
    int64_t number = 0;
    for (const Run& run : runs.back()) {
      for (int64_t row = 0; row < run.rows; ++row) {
        for (int64_t b = 0; b < run.bytes; ++b)
          run.data[row * run.pitch + b] = static_cast<std::byte>((number++ + r) * 41 >> 3);
      }
    }
    if (r == root) sent = bytes_of(runs.back());
  }
  given = memory;
  const bool all = pick(0, 2) == 0, dense = pick(0, 3) == 0;
  std::vector<std::byte> plain = sent;  // one of the ranks may have no runs at all
  launch(ranks, [&](World& world) {
    const auto r = static_cast<size_t>(world.rank());
    Group& group = *world.all();
    if (all && dense && world.rank() == root) {
      group.broadcast(byte_view(std::span(plain)), root).wait();
    } else if (all) {
      group.broadcast(runs[r], DType::kUInt8, root).wait();
    } else if (world.rank() == root) {
      group.send(runs[r], DType::kUInt8, peer).wait();
    } else if (world.rank() == peer) {
      group.receive(runs[r], DType::kUInt8, root).wait();
    }
  });
  for (int r = 0; r < ranks; ++r) {
    const auto at = static_cast<size_t>(r);
    const bool receives = all ? r != root : r == peer;
    if (receives) RC_ASSERT(bytes_of(runs[at]) == sent);
    // And nothing else was written.
    for (const Run& run : runs[at]) {
      for (int64_t row = 0; row < run.rows; ++row) {
        const auto offset = run.data + row * run.pitch - memory[at].data();
        std::copy_n(given[at].begin() + offset, run.bytes, memory[at].begin() + offset);
      }
    }
    RC_ASSERT(memory[at] == given[at]);
  }
}

TEST(Runs, AreNotForBackendsThatTakeNone) {
  struct Packing final : ForwardingBackend {
    using ForwardingBackend::ForwardingBackend;
    bool takes_runs() const override { return false; }
  };
  launch(
      1,
      [](World& world) {
        std::vector<std::byte> memory(10);
        EXPECT_THROW(world.all()->broadcast(Runs{{memory.data(), 10}}, DType::kUInt8, 0),
                     InvalidArgumentError);
      },
      {.decorate = [](std::shared_ptr<GroupBackend> b) { return std::make_shared<Packing>(std::move(b)); }});
}

}  // namespace
}  // namespace spolia
