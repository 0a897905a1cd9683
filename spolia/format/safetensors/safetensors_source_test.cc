#include "spolia/format/safetensors/safetensors_source.h"

#include <stdlib.h>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/safetensors/sharding_info.h"
#include "spolia/format/safetensors/test_files.h"
#include "spolia/format/torch/testing.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

const fs::path kFixtures = fs::path(SPOLIA_TEST_DATA) / "torch-2.14";

void expect_fixture(const Source& source, std::string_view name) {
  testing::expect_matches(source, kFixtures / name / "expected.json");
}

TEST(SafetensorsFixtures, OneFile) {
  auto source =
      open_safetensors_file(posix_store(), kFixtures / "safetensors-1/checkpoint/model.safetensors");
  EXPECT_EQ(source->catalog().format, "safetensors");
  EXPECT_EQ(source->catalog().files, std::vector<std::string>{"model.safetensors"});
  EXPECT_TRUE(source->catalog().notes.empty());
  expect_fixture(*source, "safetensors-1");
}

TEST(SafetensorsFixtures, FolderOfOneFile) {
  auto source = open_safetensors_folder(posix_store(), kFixtures / "safetensors-1/checkpoint");
  expect_fixture(*source, "safetensors-1");
}

TEST(SafetensorsFixtures, ConsolidatedFolderIsReadByItsIndex) {
  auto source = open_safetensors_folder(posix_store(), kFixtures / "hf-consolidated-3/checkpoint");
  const Catalog& catalog = source->catalog();
  EXPECT_EQ(catalog.format, "safetensors");
  EXPECT_EQ(catalog.files, (std::vector<std::string>{"model-00001-of-00002.safetensors",
                                                     "model-00002-of-00002.safetensors"}));
  ASSERT_EQ(catalog.notes.size(), 1u);
  EXPECT_TRUE(catalog.notes[0].starts_with("not listed by the index")) << catalog.notes[0];
  EXPECT_NE(catalog.notes[0].find("shard-00003-model-00002-of-00002.safetensors"), std::string::npos);
  expect_fixture(*source, "hf-consolidated-3");
}

TEST(SafetensorsFixtures, IndexByName) {
  auto index = kFixtures / "hf-consolidated-3/checkpoint/model.safetensors.index.json";
  expect_fixture(*open_safetensors_index(posix_store(), index), "hf-consolidated-3");
}

TEST(SafetensorsFixtures, ShardsOfRanks) {
  auto source = open_safetensors_folder(posix_store(), kFixtures / "hf-shards-3/checkpoint");
  const Catalog& catalog = source->catalog();
  EXPECT_EQ(catalog.format, "dcp safetensors");
  EXPECT_EQ(catalog.files.size(), 3u);
  EXPECT_TRUE(catalog.notes.empty());
  const TensorEntry* columns = catalog.find_tensor("model.layers.1.w");
  ASSERT_NE(columns, nullptr);
  ASSERT_EQ(columns->chunks(), 3u);
  EXPECT_EQ(columns->boxes[1], (Box{{0, 2}, {7, 2}}));
  expect_fixture(*source, "hf-shards-3");
}

class FolderTest : public ::testing::Test {
 protected:
  void put_tensors(const std::string& name, const std::vector<TestTensor>& tensors,
                   const SafetensorsMetadata& metadata = {{"format", "pt"}}) {
    put(*store_, fs::path("/c") / name, safetensors_bytes(tensors, metadata));
  }
  /// The file of one rank: `info` is the text of its DCP_SHARDING_INFO.
  void put_shard(const std::string& name, const std::vector<TestTensor>& tensors, const std::string& info) {
    put_tensors(name, tensors,
                {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {std::string(kShardingInfoKey), info}});
  }
  void put_index(const std::string& weight_map, const std::string& metadata = "{}",
                 const std::string& name = "model.safetensors.index.json") {
    put(*store_, fs::path("/c") / name,
        fmt::format(R"({{"metadata": {}, "weight_map": {}}})", metadata, weight_map));
  }

  std::unique_ptr<Source> open() const { return open_safetensors_folder(store_, "/c"); }

  void expect_error(ErrorKind kind, std::initializer_list<std::string_view> parts) const {
    try {
      open();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      std::string message = error.what();
      EXPECT_EQ(error.kind(), kind) << message;
      for (auto part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << "\n in " << message;
    }
  }

  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
};

const TestTensor kA{"a", DType::kFloat32, {2, 3}, 'a'};
const TestTensor kB{"b", DType::kInt8, {4}, 'b'};

TEST_F(FolderTest, FilesWithoutAnIndex) {
  put_tensors("x.safetensors", {kB});
  put_tensors("w.safetensors", {kA});
  put(*store_, "/c/config.json", "{}");
  auto source = open();
  EXPECT_EQ(source->catalog().files, (std::vector<std::string>{"w.safetensors", "x.safetensors"}));
  ASSERT_EQ(source->catalog().tensors.size(), 2u);
  EXPECT_EQ(source->catalog().tensors[1].extents[0].file, 1u);
  EXPECT_EQ(testing::gather(*source, 0), std::vector<std::byte>(24, std::byte{'a'}));
  EXPECT_EQ(testing::gather(*source, 1), std::vector<std::byte>(4, std::byte{'b'}));
}

TEST_F(FolderTest, WithoutAnIndexNamesMustDiffer) {
  put_tensors("x.safetensors", {kA});
  put_tensors("w.safetensors", {kA, kB});
  expect_error(ErrorKind::kMismatch, {"\"a\"", "/c/w.safetensors", "/c/x.safetensors"});
}

TEST_F(FolderTest, SubByteTensorsAreAddressedByBytes) {
  put_tensors("x.safetensors", {{"six", DType::kFloat6E2M3FN, {4, 3}, '6'},
                                {"odd", DType::kFloat4E2M1FN, {2, 3}, '4'},
                                {"pairs", DType::kFloat4E2M1FNx2, {2, 3}, 'p'}});
  auto source = open();
  const TensorEntry& six = source->catalog().tensors[2];
  EXPECT_EQ(six.shape, (Dims{4, 3}));
  EXPECT_EQ(six.boxes[0], whole(six.shape));
  EXPECT_EQ(source->payload(2, 0).strides, (Dims{1}));
  EXPECT_EQ(testing::gather(*source, 0), std::vector<std::byte>(3, std::byte{'4'}));
  EXPECT_EQ(testing::gather(*source, 1), std::vector<std::byte>(6, std::byte{'p'}));
  EXPECT_EQ(testing::gather(*source, 2), std::vector<std::byte>(9, std::byte{'6'}));
}

TEST_F(FolderTest, OtherMetadataIsNoted) {
  put_tensors("w.safetensors", {kA}, {{"format", "pt"}, {"title", "t"}});
  put_tensors("x.safetensors", {kB}, {{"format", "pt"}, {"author", "t"}, {"title", "u"}});
  EXPECT_EQ(open()->catalog().notes,
            std::vector<std::string>{R"(__metadata__ also holds "author", "title")"});
}

TEST_F(FolderTest, ADamagedFileIsNamed) {
  put_tensors("w.safetensors", {kA});
  put(*store_, "/c/x.safetensors", "short");
  expect_error(ErrorKind::kCorrupt, {"/c/x.safetensors", "too few"});
}

TEST_F(FolderTest, TheIndexDecides) {
  put_tensors("m1.safetensors", {kA});
  put_tensors("m2.safetensors", {kB});
  put_tensors("consolidated.safetensors", {kA, kB, {"c", DType::kInt8, {1}, 'c'}});
  put_index(R"({"b": "m2.safetensors", "a": "m1.safetensors"})", R"({"total_size": 28})");
  auto source = open();
  EXPECT_EQ(source->catalog().tensors.size(), 2u);
  EXPECT_EQ(
      source->catalog().notes,
      std::vector<std::string>{R"(not listed by the index, and left alone: "consolidated.safetensors")"});
}

TEST_F(FolderTest, AWrongTotalSizeIsNoted) {
  put_tensors("m.safetensors", {kA});
  put_index(R"({"a": "m.safetensors"})", R"({"total_size": 25})");
  EXPECT_EQ(open()->catalog().notes,
            std::vector<std::string>{"the index gives total_size 25; the tensors have 24 bytes"});
}

TEST_F(FolderTest, FilesMayLieInSubfolders) {
  put_tensors("m.safetensors", {kA});
  put(*store_, "/c/sub/m.safetensors", safetensors_bytes({kB}));
  put_index(R"({"a": "m.safetensors", "b": "sub/m.safetensors"})");
  EXPECT_EQ(open()->catalog().tensors.size(), 2u);
}

TEST_F(FolderTest, ATensorTheIndexDoesNotListIsAnError) {
  put_tensors("m.safetensors", {kA, kB});
  put_index(R"({"a": "m.safetensors"})");
  expect_error(ErrorKind::kMismatch,
               {"index.json", "\"b\" is in \"m.safetensors\", but not in the weight_map"});
}

TEST_F(FolderTest, ATensorInAnotherFileThanTheIndexSaysIsAnError) {
  put_tensors("m1.safetensors", {kA, kB});
  put_tensors("m2.safetensors", {{"c", DType::kInt8, {1}, 'c'}});
  put_index(R"({"a": "m1.safetensors", "b": "m2.safetensors", "c": "m2.safetensors"})");
  expect_error(ErrorKind::kMismatch,
               {"index.json", "\"b\" is in \"m1.safetensors\", but the weight_map says \"m2.safetensors\""});
}

TEST_F(FolderTest, ATensorThatIsNotThereIsAnError) {
  put_tensors("m.safetensors", {kA});
  put_index(R"({"a": "m.safetensors", "b": "m.safetensors"})");
  expect_error(ErrorKind::kMismatch, {"index.json", "\"b\" is in \"m.safetensors\", but it is not"});
}

TEST_F(FolderTest, AFileThatIsNotThereIsAnError) {
  put_tensors("m.safetensors", {kA});
  put_index(R"({"a": "m.safetensors", "b": "n.safetensors"})");
  expect_error(ErrorKind::kNotFound, {"index.json", "\"n.safetensors\""});
}

TEST_F(FolderTest, TheIndexCannotLeaveTheFolder) {
  put(*store_, "/m.safetensors", safetensors_bytes({kA}));
  for (const char* file : {"../m.safetensors", "/m.safetensors", "sub/../../m.safetensors"}) {
    SCOPED_TRACE(file);
    store_->remove_all("/c");
    put_index(fmt::format(R"({{"a": "{}"}})", file));
    expect_error(ErrorKind::kCorrupt, {"index.json", file});
  }
}

TEST_F(FolderTest, OfSeveralIndicesTheUsualOneIsTaken) {
  put_tensors("m.safetensors", {kA});
  put_tensors("m.fp16.safetensors", {kB});
  put_index(R"({"b": "m.fp16.safetensors"})", "{}", "model.fp16.safetensors.index.json");
  put_index(R"({"b": "m.fp16.safetensors"})", "{}", "other.safetensors.index.json");
  expect_error(ErrorKind::kUnsupported,
               {"\"model.fp16.safetensors.index.json\"", "\"other.safetensors.index.json\""});
  put_index(R"({"a": "m.safetensors"})");
  EXPECT_NE(open()->catalog().find_tensor("a"), nullptr);
  auto named = open_safetensors_index(store_, "/c/other.safetensors.index.json");
  EXPECT_NE(named->catalog().find_tensor("b"), nullptr);
}

TEST_F(FolderTest, PartsMakeOneTensorAndReplicasCountOnce) {
  put_shard("shard-2.safetensors", {{"w", DType::kInt8, {1, 2}, '2'}, {"r", DType::kInt8, {3}, 'R'}},
            R"({"w": {"saved_offsets": [2, 0]}, "r": {"saved_offsets": [0]}})");
  put_shard("shard-1.safetensors",
            {{"w", DType::kInt8, {2, 2}, '1'}, {"r", DType::kInt8, {3}, 'r'}, {"s", DType::kInt8, {}, 's'}},
            R"({"w": {"saved_offsets": [0, 0]}, "r": {"saved_offsets": [0]}})");
  put_shard("shard-3.safetensors", {{"w", DType::kInt8, {0, 2}, '3'}}, R"({"w": {"saved_offsets": [3, 0]}})");
  auto source = open();
  const Catalog& catalog = source->catalog();
  EXPECT_EQ(catalog.format, "dcp safetensors");
  ASSERT_EQ(catalog.tensors.size(), 3u);
  EXPECT_EQ(catalog.tensors[0].chunks(), 1u);
  EXPECT_EQ(catalog.tensors[0].extents[0].file, 0u);
  EXPECT_EQ(catalog.tensors[1].shape, Dims{});
  const TensorEntry& w = catalog.tensors[2];
  EXPECT_EQ(w.shape, (Dims{3, 2}));
  ASSERT_EQ(w.chunks(), 3u);
  EXPECT_EQ(w.boxes[2], (Box{{3, 0}, {0, 2}}));
  EXPECT_EQ(testing::gather(*source, 2), testing::to_bytes("111122"));
  EXPECT_EQ(catalog.notes,
            std::vector<std::string>{"parts that several files hold, and of which the first is read: 1"});
}

TEST_F(FolderTest, OneShardAloneIsNoted) {
  put_shard("shard-1.safetensors", {kA}, R"({"a": {"saved_offsets": [2, 0]}})");
  auto source = open_safetensors_file(store_, "/c/shard-1.safetensors");
  EXPECT_EQ(source->catalog().tensors[0].shape, (Dims{4, 3}));
  ASSERT_EQ(source->catalog().notes.size(), 1u);
  EXPECT_NE(source->catalog().notes[0].find("folder"), std::string::npos);
}

TEST_F(FolderTest, PartsMustAgree) {
  put_shard("s1.safetensors", {kA}, R"({"a": {"saved_offsets": [0, 0]}})");
  put_shard("s2.safetensors", {{"a", DType::kBFloat16, {2, 3}, 'a'}}, R"({"a": {"saved_offsets": [2, 0]}})");
  expect_error(ErrorKind::kMismatch,
               {"\"a\"", "float32", "/c/s1.safetensors", "bfloat16", "/c/s2.safetensors"});
  store_->remove_all("/c/s2.safetensors");
  put_shard("s2.safetensors", {{"a", DType::kFloat32, {2}, 'a'}}, R"({"a": {"saved_offsets": [2]}})");
  expect_error(ErrorKind::kMismatch, {"\"a\"", "2 dims", "but float32 and 1"});
}

TEST_F(FolderTest, ShardingInfoMustFitTheFile) {
  auto expect = [&](const std::string& info, ErrorKind kind, std::string_view reason) {
    SCOPED_TRACE(info);
    store_->remove_all("/c");
    put_shard("s.safetensors", {kA}, info);
    expect_error(kind, {"/c/s.safetensors", reason});
  };
  expect("x", ErrorKind::kCorrupt, "DCP_SHARDING_INFO");
  expect(R"({"a": {"saved_offsets": [0]}})", ErrorKind::kCorrupt, "[0] do not fit its shape [2, 3]");
  expect(R"({"b": {"saved_offsets": [0]}})", ErrorKind::kMismatch, "\"b\", which is not in the file");
  expect(R"({"a": {"saved_offsets": [9223372036854775806, 0]}})", ErrorKind::kCorrupt, "beyond 64 bits");
  expect(R"({"a": {"saved_offsets": [4611686018427387904, 0]}})", ErrorKind::kCorrupt, "overflows");
}

TEST_F(FolderTest, PartsOfSubByteTensorsCannotBeRead) {
  put_shard("s1.safetensors", {{"q", DType::kFloat6E2M3FN, {4}, '1'}}, R"({"q": {"saved_offsets": [0]}})");
  put_shard("s2.safetensors", {{"q", DType::kFloat6E2M3FN, {4}, '2'}}, R"({"q": {"saved_offsets": [4]}})");
  EXPECT_THROW(open()->payload(0, 0), UnsupportedError);
}

/// A folder on the real disk, gone at the end of the test.
class DiskTest : public ::testing::Test {
 protected:
  DiskTest() {
    std::string path = (fs::temp_directory_path() / "spolia-test-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = path;
    put(*store_, folder_ / "outside/m.safetensors", safetensors_bytes({kA}));
    store_->create_folder(folder_ / "c");
  }
  ~DiskTest() override { fs::remove_all(folder_); }

  std::shared_ptr<Store> store_ = posix_store();
  fs::path folder_;
};

TEST_F(DiskTest, ALinkOutOfTheFolderIsRefused) {
  fs::create_symlink("../outside/m.safetensors", folder_ / "c/m.safetensors");
  put(*store_, folder_ / "c/model.safetensors.index.json", R"({"weight_map": {"a": "m.safetensors"}})");
  EXPECT_THROW(open_safetensors_folder(store_, folder_ / "c"), Error);
  fs::remove(folder_ / "c/model.safetensors.index.json");
  EXPECT_THROW(open_safetensors_folder(store_, folder_ / "c"), Error);
}

TEST_F(DiskTest, AFileThatTheUserNamesMayBeALink) {
  fs::create_symlink("../outside/m.safetensors", folder_ / "c/m.safetensors");
  auto source = open_safetensors_file(store_, folder_ / "c/m.safetensors");
  EXPECT_EQ(testing::gather(*source, 0), std::vector<std::byte>(24, std::byte{'a'}));
}

TEST_F(DiskTest, HuggingFaceCacheIsOneFolder) {
  fs::path model = folder_ / "models--a--b";
  fs::create_directories(model / "snapshots/1");
  put(*store_, model / "blobs/d1", safetensors_bytes({kA}));
  put(*store_, model / "blobs/d2", R"({"weight_map": {"a": "m.safetensors"}})");
  fs::create_symlink("../../blobs/d1", model / "snapshots/1/m.safetensors");
  EXPECT_EQ(open_safetensors_folder(store_, model / "snapshots/1")->catalog().tensors.size(), 1u);
  fs::create_symlink("../../blobs/d2", model / "snapshots/1/model.safetensors.index.json");
  EXPECT_EQ(open_safetensors_folder(store_, model / "snapshots/1")->catalog().tensors.size(), 1u);
}

TEST_F(DiskTest, RelativePathsNeedNoFolder) {
  put(*store_, folder_ / "c/m.safetensors", safetensors_bytes({kA}));
  put(*store_, folder_ / "c/model.safetensors.index.json", R"({"weight_map": {"a": "m.safetensors"}})");
  fs::path before = fs::current_path();
  fs::current_path(folder_ / "c");
  auto file = open_safetensors_file(store_, "m.safetensors");
  auto index = open_safetensors_index(store_, "model.safetensors.index.json");
  fs::current_path(before);
  EXPECT_EQ(file->catalog().tensors.size(), 1u);
  EXPECT_EQ(testing::gather(*index, 0), testing::gather(*file, 0));
}

}  // namespace
}  // namespace spolia
