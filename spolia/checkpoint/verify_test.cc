#include "spolia/checkpoint/verify.h"

#include <cstring>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/native/native_target.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

/// A copy of a real checkpoint in memory, at /in, whose files the tests may damage.
std::shared_ptr<MemoryStore> copy_of(const fs::path& folder) {
  auto memory = std::make_shared<MemoryStore>();
  const auto disk = posix_store();
  memory->create_folder("/in");
  for (const FolderEntry& entry : disk->list(folder)) {
    const auto file = disk->open(folder / entry.name);
    std::vector<std::byte> bytes(static_cast<size_t>(file->size()));
    file->read(0, bytes);
    memory->create(fs::path("/in") / entry.name)->write(0, bytes);
  }
  return memory;
}

fs::path data(const char* name) { return fs::path(SPOLIA_TEST_DATA) / name / "checkpoint"; }

Verdict verdict_on(std::shared_ptr<const Store> store) {
  return verify(*open_source(store, "/in"), {.threads = 2});
}

TEST(Verify, FindsNoFaultInWhatPyTorchWrote) {
  for (const char* name : {"torch-2.14/fsdp2-4", "torch-2.14/zstd-2", "torch-2.6/uneven-5",
                           "torch-2.14/hf-shards-3", "torch-2.14/rank-files-2", "torch-2.14/torch-save-1"}) {
    const auto source = open_source(posix_store(), data(name));
    const Verdict verdict = verify(*source, {.threads = 2});
    EXPECT_TRUE(verdict.faults.empty()) << name << ": " << verdict.faults.front();
    EXPECT_EQ(verdict.report.tensors, std::ssize(source->catalog().tensors));
  }
}

TEST(Verify, ChecksEveryChunkThatHasACrc) {
  const auto source = open_source(posix_store(), data("torch-2.14/fsdp2-4"));
  int64_t chunks = 0;
  for (const TensorEntry& tensor : source->catalog().tensors) {
    for (size_t c = 0; c < tensor.chunks(); ++c) chunks += !tensor.boxes[c].empty();
  }
  EXPECT_EQ(verify(*source, {.threads = 2}).report.crcs_checked, chunks);
}

TEST(Verify, NamesEveryFlippedBitByTensorAndFile) {
  const auto memory = copy_of(data("torch-2.14/uneven-5"));
  auto store = std::make_shared<FaultStore>(memory);
  const auto sound = open_source(memory, "/in");
  size_t damaged = 0;
  for (const char* name : {"vec", "w7x5.p0", "w12x2.p1"}) {
    const size_t t =
        static_cast<size_t>(sound->catalog().find_tensor(name) - sound->catalog().tensors.data());
    const Payload payload = sound->payload(t, 0);
    store->flip(sound->catalog().path_of(payload.stored.file), payload.stored.offset + payload.offset);
    ++damaged;
  }
  const Verdict verdict = verdict_on(store);
  ASSERT_EQ(verdict.faults.size(), damaged);
  EXPECT_NE(verdict.faults[0].find("\"vec\""), std::string::npos) << verdict.faults[0];
  EXPECT_NE(verdict.faults[0].find("CRC-32"), std::string::npos) << verdict.faults[0];
  EXPECT_NE(verdict.faults[0].find("distcp"), std::string::npos) << verdict.faults[0];
}

TEST(Verify, NamesAFileThatIsGoneForEachTensorInIt) {
  const auto memory = copy_of(data("torch-2.14/uneven-5"));
  const auto sound = open_source(memory, "/in");
  size_t lost = 0;
  for (const TensorEntry& tensor : sound->catalog().tensors) {
    for (const Extent& extent : tensor.extents) lost += sound->catalog().files[extent.file] == "__3_0.distcp";
  }
  memory->remove_all("/in/__3_0.distcp");
  const Verdict verdict = verdict_on(memory);
  EXPECT_EQ(verdict.faults.size(), lost);
  EXPECT_GT(lost, 1u);
}

TEST(Verify, NamesATruncatedFile) {
  const auto memory = copy_of(data("torch-2.14/uneven-5"));
  const auto file = memory->open("/in/__0_0.distcp");
  std::vector<std::byte> bytes(static_cast<size_t>(file->size()) - 10);
  file->read(0, bytes);
  memory->remove_all("/in/__0_0.distcp");
  memory->create("/in/__0_0.distcp")->write(0, bytes);
  const Verdict verdict = verdict_on(memory);
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_NE(verdict.faults[0].find("__0_0.distcp"), std::string::npos) << verdict.faults[0];
}

TEST(Verify, NamesAShardThatIsMissing) {
  const auto memory = copy_of(data("torch-2.14/hf-shards-3"));
  memory->remove_all("/in/shard-00002-model-00001-of-00001.safetensors");
  const Verdict verdict = verdict_on(memory);
  ASSERT_FALSE(verdict.faults.empty());
  EXPECT_NE(verdict.faults[0].find("not whole"), std::string::npos) << verdict.faults[0];
}

/// Spolia's own folder, at /in: bytes of 2.5 MiB, one tensor without any, and one of 12 bytes.
std::shared_ptr<MemoryStore> spolia_folder() {
  TargetContents contents;
  const std::vector<std::pair<std::string, Dims>> tensors = {
      {"large", {5 << 19}}, {"none", {0}}, {"small", {12}}};
  for (const auto& [name, shape] : tensors) {
    contents.order.push_back(contents.order.size());
    contents.catalog.tensors.push_back(whole_tensor(name, DType::kInt8, shape, {0, 0, shape[0]}));
  }
  const auto target = make_spolia_target(contents);
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/in");
  OutputFolder folder(*store, "/in");
  OutputFile* file = &folder.create(target->catalog().files[0]);
  BlockChecksums checksums(target->catalog(), target->checksum_block());
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Extent& extent = target->catalog().tensors[t].extents[0];
    const std::vector<std::byte> bytes(static_cast<size_t>(extent.length), std::byte{7});
    file->write(extent.offset, bytes);
    for (size_t b = 0; b < checksums.of(t, 0).size(); ++b) {
      const auto rest = std::span(bytes).subspan(b << 20);
      checksums.of(t, 0)[b] = crc32(0, rest.first(std::min(rest.size(), size_t{1} << 20)));
    }
  }
  finish_all(*target, *open_source(posix_store(), data("torch-2.14/fsdp2-4")), checksums, std::span(&file, 1),
             folder);
  return store;
}

TEST(Verify, ChecksEveryBlockAndHeaderOfSpoliasOwnFolder) {
  const Verdict verdict = verdict_on(spolia_folder());
  EXPECT_TRUE(verdict.faults.empty()) << verdict.faults.front();
  EXPECT_EQ(verdict.report.crcs_checked, 4);
  EXPECT_EQ(verdict.report.crcs_absent, 0);
  EXPECT_EQ(verdict.report.bytes_read, (5 << 19) + 12);
}

TEST(Verify, FindsAFlippedBitAnywhereInADataFileByItsBlock) {
  const std::string name = "data-00000.safetensors";
  const auto sound = spolia_folder();
  const int64_t size = sound->open("/in/" + name)->size();
  const int64_t header = size - (5 << 19) - 12;
  std::vector<int64_t> places = {0,         7,         8,       header - 1, header, header + (1 << 20) - 1,
                                 size - 13, size - 12, size - 1};
  for (int64_t step = 1; step < 40; ++step) places.push_back(step * 65'537 % size);
  for (int64_t place : places) {
    auto store = std::make_shared<FaultStore>(sound);
    store->flip("/in/" + name, place);
    const Verdict verdict = verdict_on(store);
    ASSERT_EQ(verdict.faults.size(), 1u) << place;
    EXPECT_NE(verdict.faults[0].find(name), std::string::npos) << verdict.faults[0];
    std::string due = "header";
    if (place >= size - 12) {
      due = fmt::format("\"small\" at offset {} (12 bytes", size - 12);
    } else if (place >= header) {
      const int64_t block = (place - header) >> 20;
      due = fmt::format("\"large\" at offset {} ({} bytes", header + (block << 20),
                        block == 2 ? 1 << 19 : 1 << 20);
    }
    EXPECT_NE(verdict.faults[0].find(due), std::string::npos) << due << " is not in: " << verdict.faults[0];
  }
}

TEST(Verify, NamesEveryDamagedBlockOfAChunk) {
  auto store = std::make_shared<FaultStore>(spolia_folder());
  const int64_t size = store->open("/in/data-00000.safetensors")->size();
  store->flip("/in/data-00000.safetensors", size - 100);
  store->flip("/in/data-00000.safetensors", size - (5 << 19));
  EXPECT_EQ(verdict_on(store).faults.size(), 2u);
}

TEST(Verify, StopsWhenCancelled) {
  CancelToken cancel;
  cancel.cancel();
  const auto source = open_source(posix_store(), data("torch-2.14/uneven-5"));
  EXPECT_THROW(verify(*source, {.threads = 2, .cancel = &cancel}), CancelledError);
}

}  // namespace
}  // namespace spolia
