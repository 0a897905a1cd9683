// States in a device's memory, by a driver that is a fake: the process dies where the host touches it.
#include <gtest/gtest.h>

#include "spolia/checkpoint/background_save.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/device/testing_cuda.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

/// A rank's shard of a matrix, in the middle of longer rows on a device, and a whole vector.
struct DeviceState {
  static constexpr int64_t kRows = 10, kColumns = 6, kPadded = 9;
  Buffer matrix, vector;
  StateDict dict;
  std::vector<std::byte> host;  // the matrix's memory as it should be

  DeviceState(int64_t rank, int64_t ranks, bool filled) {
    const auto layout =
        std::make_shared<const Layout>(parse_layout("[shard(0)] over " + std::to_string(ranks)));
    const Dims shape = {kRows, kColumns}, local = layout->shard(shape, rank).local_shape;
    const Device device{DeviceKind::kCuda, static_cast<int>(rank)};
    matrix = Buffer(local[0] * kPadded * 4, device);
    vector = Buffer(5 * 4, device);
    View view = dense_view(matrix.data() + 4, DType::kFloat32, Dims{local[0], kPadded}, device);
    view.shape = local;
    dict.add("matrix", sharded_tensor(view, shape, layout));
    dict.add("vector", plain_tensor(dense_view(vector.data(), DType::kFloat32, Dims{5}, device)));

    const int64_t first = local[0] == 0 ? 0 : layout->shard(shape, rank).boxes[0].global.offsets[0];
    std::vector<float> values(static_cast<size_t>(local[0] * kPadded), -1.0f);
    for (int64_t r = 0; r < local[0]; ++r) {
      for (int64_t c = 0; c < kColumns; ++c) {
        values[static_cast<size_t>(r * kPadded + 1 + c)] = static_cast<float>((first + r) * kColumns + c);
      }
    }
    const auto bytes = std::as_bytes(std::span(values));
    host.assign(bytes.begin(), bytes.end());
    const float numbers[5] = {1, 2, 3, 4, 5};
    if (filled) {
      write(matrix, host);
      write(vector, std::as_bytes(std::span(numbers)));
    } else {
      std::vector<float> empty(values.size(), -1.0f);
      write(matrix, std::as_bytes(std::span(empty)));
    }
  }

  static void write(Buffer& to, std::span<const std::byte> from) {
    backend_of(to.device()).copy_from_host(to.data(), from.data(), std::ssize(from));
  }
  static std::vector<std::byte> read(const Buffer& from) {
    std::vector<std::byte> bytes(static_cast<size_t>(from.size()));
    backend_of(from.device()).copy_to_host(bytes.data(), from.data(), from.size());
    return bytes;
  }

  void expect_filled() const {
    EXPECT_EQ(read(matrix), host);
    float numbers[5];
    const std::vector<std::byte> bytes = read(vector);
    std::memcpy(numbers, bytes.data(), bytes.size());
    EXPECT_EQ(std::vector<float>(numbers, numbers + 5), (std::vector<float>{1, 2, 3, 4, 5}));
  }
};

TEST(DeviceMemory, IsSavedAndLoadedWhereverItIs) {
  use_fake_cuda();
  const auto store = std::make_shared<MemoryStore>();
  launch(3, [&](World& world) {
    DeviceState state(world.rank(), 3, true);
    save(*world.all(), state.dict, *store, "/saved");
    BackgroundSaver saver(world);
    saver.start(state.dict, [&](Group& group, const StateDict& copy) {
      return save(group, copy, *store, "/background");
    });
    saver.wait();
  });
  for (const char* path : {"/saved", "/background"}) {
    for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts}) {
      launch(2, [&](World& world) {
        const auto source = open_together(*world.all(), store, path);
        DeviceState state(world.rank(), 2, false);
        load(world, *source, state.dict, {.mode = mode});
        state.expect_filled();
      });
    }
  }
  EXPECT_EQ(FakeCuda::instance().take_faults(), std::vector<std::string>());
}

TEST(DeviceMemory, AShardThatOneRankKeepsOnTheHostIsReadByEach) {
  use_fake_cuda();
  const auto store = std::make_shared<MemoryStore>();
  launch(2, [&](World& world) {
    DeviceState state(world.rank(), 2, true);
    save(*world.all(), state.dict, *store, "/saved");
  });
  launch(2, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    DeviceState device(world.rank(), 2, false);
    std::vector<float> numbers(5);
    StateDict state;
    const View on_host =
        dense_view(std::as_writable_bytes(std::span(numbers)).data(), DType::kFloat32, Dims{5});
    state.add("vector", world.rank() == 0 ? plain_tensor(on_host) : *device.dict.find("vector")->tensor());
    const Report report = load(world, *source, state, {.mode = ReadMode::kOneReader});
    EXPECT_EQ(report.bytes_sent, 0);
    if (world.rank() == 0) {
      EXPECT_EQ(numbers, (std::vector<float>{1, 2, 3, 4, 5}));
    }
  });
}

}  // namespace
}  // namespace spolia
