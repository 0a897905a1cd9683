#include "spolia/assemble/sinks.h"

#include <cstring>

#include <gtest/gtest.h>

#include "spolia/assemble/testing_devices.h"
#include "spolia/assemble/testing_streams.h"
#include "spolia/base/error.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/comm/world.h"
#include "spolia/format/source.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

std::vector<WantedTensor> some_tensors(int ranks) {
  const std::string on = " over " + std::to_string(ranks);
  return {{"a.large", DType::kFloat32, {3000, 31}, layout_of("[shard(0)]" + on), {}, {}},
          {"b", DType::kBFloat16, {30, 20}, layout_of("[shard(1)]" + on), {}, {}},
          {"c", DType::kInt64, {}, nullptr, {}, {}},
          {"d", DType::kFloat32, {0, 3}, nullptr, {}, {}},
          {"e", DType::kInt8, {501, 7}, layout_of("[strided(0, 2)]" + on), {}, {}}};
}

/// Every tensor of the folder has the bytes that a RankState gives it.
void expect_whole(std::shared_ptr<const Store> store, const std::string& path,
                  const std::vector<WantedTensor>& tensors) {
  const auto source = open_source(store, path);
  const std::vector<std::string> digests = digest_tensors(*source, {});
  ASSERT_EQ(digests.size(), tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    EXPECT_EQ(source->catalog().tensors[t].name, tensors[t].name);
    EXPECT_EQ(source->catalog().tensors[t].shape, tensors[t].shape);
    Sha256 hash;
    hash.update(expected_bytes(tensors[t]));
    EXPECT_EQ(digests[t], hash.finish_hex()) << tensors[t].name;
  }
}

TEST(Sinks, AFolderOfSafetensorsFromOneRankOrAll) {
  const std::vector<WantedTensor> tensors = some_tensors(4);
  for (const Writers writers : {Writers::kOne, Writers::kAll}) {
    for (const bool grid : {false, true}) {
      const auto store = std::make_shared<MemoryStore>();
      launch(4, [&](World& world) {
        RankState state(tensors, world.rank());
        state.fill();
        Formation formation;
        if (grid) formation = {false, {{0, 3}, {2, 1}}};
        const Ensemble ensemble(world, formation);
        AssemblerOptions options;
        options.memory = 2 * kLeastStaging;  // the large one comes in pieces
        const Report report = stream_to_safetensors(ensemble.ends(), state.dict(), options, *store, "/out",
                                                    {.writers = writers, .durable = false});
        if (writers == Writers::kOne && world.rank() != 0) {
          EXPECT_EQ(report.bytes_written, 0);
        }
        if (writers == Writers::kAll && world.rank() == 0) {
          EXPECT_LT(report.bytes_written, 3000 * 31 * 4 + 1200 + 8 + 3507);
        }
        EXPECT_LE(report.buffer_bytes, options.memory);
      });
      expect_whole(store, "/out", tensors);
      EXPECT_EQ(store->list("/").size(), 1);
    }
  }
}

TEST(Sinks, TakeWhatDevicesHold) {
  const std::vector<WantedTensor> tensors = some_tensors(4);
  for (const bool nccl : {false, true}) {
    const Stage stage{.state = Stage::State::kBoth, .nccl = nccl};
    const auto store = std::make_shared<MemoryStore>();
    stage.launch(4, [&](World& world) {
      RankState host(tensors, world.rank());
      host.fill();
      stage.place(host.dict(), world.rank(), [&](StateDict& dict) {
        const Ensemble ensemble(world, {false, {{0, 3}, {2, 1}}});
        stream_to_safetensors(ensemble.ends(), dict, {}, *store, "/out", {.durable = false});
        const auto all = stream_to_memory(*ensemble.assembler(dict, {}));
        for (const WantedTensor& tensor : tensors)
          EXPECT_TRUE(std::ranges::equal(all.at(tensor.name).memory.bytes(), expected_bytes(tensor)));
      });
    });
    expect_whole(store, "/out", tensors);
  }
}

TEST(Sinks, AFolderThatIsThereIsAnErrorOnAllRanksAndKept) {
  const auto store = std::make_shared<MemoryStore>();
  store->create_folder("/out");
  store->create("/out/mine");
  launch(3, [&](World& world) {
    RankState state(some_tensors(3), world.rank());
    state.fill();
    EXPECT_THROW(stream_to_safetensors({world.all().get(), nullptr}, state.dict(), {}, *store, "/out"),
                 InvalidArgumentError);
  });
  EXPECT_EQ(store->list("/out").size(), 1);
  EXPECT_EQ(store->list("/").size(), 1);
}

TEST(Sinks, PiecesOfElementsFinerThanAByteCountBytes) {
  for (const DType dtype : {DType::kFloat4E2M1FN, DType::kFloat6E2M3FN}) {
    const WantedTensor tensor{"fine", dtype, {1024, 1024}, nullptr, {}, {1}};
    std::vector<std::byte> expected(static_cast<size_t>(byte_size(dtype, tensor.shape)));
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = std::byte(i * 7 + i / 253);
    const auto store = std::make_shared<MemoryStore>();
    launch(3, [&](World& world) {
      RankState state({tensor}, world.rank());
      if (world.rank() == 1) std::ranges::copy(expected, state.dict().find("fine")->tensor()->memory.data);
      AssemblerOptions options;
      options.memory = 3 * kLeastStaging;
      options.pieces = true;
      Assembler assembler(*world.all(), state.dict(), options);
      EXPECT_GT(assembler.plan().units.size(), 4);
      EXPECT_TRUE(std::ranges::equal(stream_to_memory(assembler).at("fine").memory.bytes(), expected));
      stream_to_safetensors({world.all().get(), nullptr}, state.dict(), options, *store, "/out",
                            {.durable = false});
    });
    const auto source = open_source(store, "/out");
    Sha256 hash;
    hash.update(expected);
    EXPECT_EQ(digest_tensors(*source, {})[0], hash.finish_hex());
  }
}

TEST(Sinks, MemoryHoldsEverythingAlsoWhatComesInPieces) {
  const std::vector<WantedTensor> tensors = some_tensors(3);
  launch(3, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    AssemblerOptions options;
    options.memory = 2 * kLeastStaging;
    options.pieces = true;
    Assembler assembler(*world.all(), state.dict(), options);
    const auto all = stream_to_memory(assembler);
    ASSERT_EQ(all.size(), tensors.size());
    for (const WantedTensor& tensor : tensors) {
      const StreamedTensor& streamed = all.at(tensor.name);
      const std::vector<std::byte> expected = expected_bytes(tensor);
      EXPECT_EQ(streamed.shape, tensor.shape);
      ASSERT_EQ(streamed.memory.size(), std::ssize(expected));
      EXPECT_TRUE(expected.empty() ||
                  std::memcmp(streamed.memory.data(), expected.data(), expected.size()) == 0);
    }
  });
}

}  // namespace
}  // namespace spolia
