#include "spolia/format/torch/dcp_source.h"

#include <string>

#include <gtest/gtest.h>
#include <zstd.h>

#include "spolia/base/error.h"
#include "spolia/base/threads.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

class DcpFixture : public ::testing::TestWithParam<const char*> {};

TEST_P(DcpFixture, ReadsWhatPyTorchWrote) {
  auto folder = kData / GetParam();
  auto source = open_dcp(posix_store(), folder / "checkpoint");
  EXPECT_EQ(source->catalog().format, "dcp");
  expect_matches(*source, folder / "expected.json");
}

INSTANTIATE_TEST_SUITE_P(All, DcpFixture,
                         ::testing::Values("torch-2.14/dtypes-1", "torch-2.14/files-per-item-2",
                                           "torch-2.14/fsdp-tp-2x2", "torch-2.14/fsdp2-3",
                                           "torch-2.14/fsdp2-4", "torch-2.14/fsdp2-4-flat",
                                           "torch-2.14/hsdp-2x2", "torch-2.14/muon-1", "torch-2.14/nested-1",
                                           "torch-2.14/threads-2", "torch-2.14/uneven-3x2",
                                           "torch-2.14/uneven-5", "torch-2.14/zstd-2", "torch-2.6/dtypes-1",
                                           "torch-2.6/nested-1", "torch-2.6/uneven-5"));

// ------------------------------------------------------------- checkpoints made by hand

constexpr const char* kModule = "torch.distributed.checkpoint.metadata";

std::string py_size(std::vector<int64_t> dims) {
  return py_call(py_global("torch", "Size"), {py_ints(dims)});
}

/// One chunk of the tensor "w", stored in `file`.
struct TestChunk {
  int64_t offset = 0;  // along its only dim
  int64_t size = 0;
  std::string file;
  int64_t item_offset = 0;
  int64_t item_length = 0;
};

/// The metadata of a float32 vector "w" of `size` elements, and where `value` is given, of a value "v".
std::string metadata_of(int64_t size, const std::vector<TestChunk>& chunks,
                        const TestChunk* value = nullptr) {
  auto info = [](const TestChunk& c) {
    return py_object("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                     py_fields({{"relative_path", py_text(c.file)},
                                {"offset", py_int(c.item_offset)},
                                {"length", py_int(c.item_length)}}));
  };
  std::string properties = py_object(
      kModule, "TensorProperties",
      py_tuple({py_global("torch", "float32"),
                py_call(py_global("torch.serialization", "_get_layout"), {py_text("torch.strided")}),
                py_bool(false), py_call(py_global(kModule, "_MEM_FORMAT_ENCODING"), {py_int(0)}),
                py_bool(false)}));
  std::vector<std::string> list;
  Pairs storage;
  for (size_t i = 0; i < chunks.size(); ++i) {
    list.push_back(py_object(
        kModule, "ChunkStorageMetadata",
        py_fields({{"offsets", py_size({chunks[i].offset})}, {"sizes", py_size({chunks[i].size})}})));
    storage.emplace_back(py_object(kModule, "MetadataIndex",
                                   py_fields({{"fqn", py_text("w")},
                                              {"offset", py_size({chunks[i].offset})},
                                              {"index", py_int(static_cast<int64_t>(i))}})),
                         info(chunks[i]));
  }
  Pairs state{
      {py_text("w"),
       py_object(
           kModule, "TensorStorageMetadata",
           py_fields({{"properties", properties}, {"size", py_size({size})}, {"chunks", py_list(list)}}))}};
  if (value != nullptr) {
    state.emplace_back(py_text("v"), py_object(kModule, "BytesStorageMetadata", py_fields({})));
    storage.emplace_back(
        py_object(kModule, "MetadataIndex", py_fields({{"fqn", py_text("v")}, {"index", py_none()}})),
        info(*value));
  }
  return py_pickle(py_object(kModule, "Metadata",
                             py_fields({{"state_dict_metadata", py_dict(state)},
                                        {"planner_data", py_none()},
                                        {"storage_data", py_dict(storage)}})));
}

/// The item of a tensor of `dtype_storage` whose bytes are all `fill`.
std::string item_of(int64_t numel, char fill, const std::string& storage = "FloatStorage",
                    int64_t width = 4) {
  return make_archive(py_tensor(py_storage(storage, "0", numel), 0, {numel}, {1}),
                      {{"0", std::string(static_cast<size_t>(numel * width), fill)}});
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::shared_ptr<MemoryStore> folder_of(const std::vector<std::pair<std::string, std::string>>& files) {
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/c");
  for (const auto& [name, bytes] : files) put_file(*store, "/c/" + name, bytes);
  return store;
}

/// A checkpoint of one vector in one item, with other bytes around it.
std::shared_ptr<MemoryStore> single(int64_t numel, const std::string& item) {
  return folder_of({{".metadata", metadata_of(numel, {{0, numel, "__0_0.distcp", 6, std::ssize(item)}})},
                    {"__0_0.distcp", "before" + item + "after"}});
}

std::optional<ErrorKind> payload_kind(std::shared_ptr<MemoryStore> store,
                                      const std::vector<std::string>& words) {
  auto source = open_dcp(store, "/c");
  return kind_thrown([&] { source->payload(0, 0); }, words);
}

TEST(DcpSource, ReadsItemsOfEverySizePlainAndCompressed) {
  for (int64_t numel : {0, 1, 5000, 100'000, 600'000}) {
    for (bool packed : {false, true}) {
      std::string item = item_of(numel, 'w');
      auto source = open_dcp(single(numel, packed ? zstd(item) : item), "/c");
      EXPECT_EQ(gather(*source, 0), to_bytes(std::string(static_cast<size_t>(numel * 4), 'w')));
      EXPECT_EQ(source->payload(0, 0).codec, packed ? Codec::kZstd : Codec::kNone);
    }
  }
}

TEST(DcpSource, ItemsMustHoldWhatTheMetadataSays) {
  EXPECT_EQ(payload_kind(single(4, item_of(4, 'x', "IntStorage")),
                         {"\"w\"", "__0_0.distcp", "from byte 6", "int32"}),
            ErrorKind::kMismatch);
  EXPECT_EQ(payload_kind(single(4, item_of(5, 'x')), {"\"w\"", "[5]", "[4]"}), ErrorKind::kMismatch);
  EXPECT_EQ(payload_kind(single(4, make_archive(py_int(3), {})), {"\"w\"", "not a tensor"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(payload_kind(single(4, make_archive(py_tensor(py_storage("FloatStorage", "0", 3), 0, {4}, {1}),
                                                {{"0", std::string(12, 'x')}})),
                         {"\"w\""}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(payload_kind(single(4, "nothing that is known"), {"\"w\"", "not a torch.save archive"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(payload_kind(single(4, zstd(item_of(4, 'x')).substr(0, 100)), {"\"w\"", "ends early"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(payload_kind(single(4, zstd(std::string(64 << 20, '\0'))), {"\"w\"", "more than"}),
            ErrorKind::kCorrupt);
}

TEST(DcpSource, EveryDamagedByteOfAnItemIsAnErrorOrFoundByItsCrc) {
  const std::string item = item_of(4, 'x');
  const std::string right(16, 'x');
  for (size_t i = 0; i < item.size(); ++i) {
    for (int flip : {0x01, 0x80, 0xFF}) {
      std::string damaged = item;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      auto source = open_dcp(single(4, damaged), "/c");
      try {
        Payload payload = source->payload(0, 0);
        auto bytes = open_bytes(source->file(0), payload.stored.offset, payload.stored.length, payload.codec);
        std::vector<std::byte> data(static_cast<size_t>(payload.length));
        bytes->read(payload.offset, data);
        bool crc_right = payload.crc32 && crc32(0, data) == *payload.crc32;
        EXPECT_TRUE(!crc_right || data == to_bytes(right)) << i;
      } catch (const Error& error) {
        EXPECT_NE(std::string_view(error.what()).find("tensor \"w\""), std::string_view::npos)
            << error.what();
      }
    }
  }
}

TEST(DcpSource, TruncatedFilesAreCorrupt) {
  std::string item = item_of(4, 'x');
  std::string metadata = metadata_of(4, {{0, 4, "__0_0.distcp", 0, std::ssize(item)}});
  for (size_t length = 0; length < item.size(); ++length) {
    EXPECT_EQ(payload_kind(folder_of({{".metadata", metadata}, {"__0_0.distcp", item.substr(0, length)}}),
                           {"\"w\"", "__0_0.distcp"}),
              ErrorKind::kCorrupt);
  }
}

TEST(DcpSource, AMissingFileIsNamedWithItsTensor) {
  EXPECT_EQ(payload_kind(folder_of({{".metadata", metadata_of(4, {{0, 4, "__3_0.distcp", 0, 100}})}}),
                         {"\"w\"", "__3_0.distcp"}),
            ErrorKind::kNotFound);
  for (const char* name : {"../x", "/etc/passwd", "a/../../x"}) {
    auto store = folder_of({{".metadata", metadata_of(4, {{0, 4, name, 0, 100}})}});
    put_file(*store, "/x", "secret");
    EXPECT_EQ(kind_thrown([&] { open_dcp(store, "/c")->payload(0, 0); }), ErrorKind::kCorrupt) << name;
  }
}

TEST(DcpSource, AnInterruptedSaveIsToldApart) {
  auto open = [](const std::vector<std::pair<std::string, std::string>>& files) {
    open_dcp(folder_of(files), "/c");
  };
  EXPECT_EQ(kind_thrown([&] { open({{"__0_0.distcp", "x"}}); }, {"interrupted"}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { open({{".metadata.tmp", "x"}}); }, {"interrupted"}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { open({{"readme", "x"}}); }, {".metadata"}), ErrorKind::kNotFound);
  std::string item = item_of(4, 'x');
  auto later = folder_of({{".metadata", metadata_of(4, {{0, 4, "0", 0, std::ssize(item)}})},
                          {".metadata.tmp", "x"},
                          {"0", item}});
  EXPECT_EQ(open_dcp(later, "/c")->catalog().notes.size(), 1u);
}

TEST(DcpSource, RanksMayWriteMetadataEachForItself) {
  std::string item0 = item_of(2, 'a'), item1 = item_of(2, 'b');
  std::vector<std::pair<std::string, std::string>> files{
      {"__0.metadata", metadata_of(4, {{0, 2, "__0_0.distcp", 0, std::ssize(item0)}})},
      {"__0_0.distcp", item0},
      {"__1.metadata", metadata_of(4, {{2, 2, "__1_0.distcp", 0, std::ssize(item1)}})},
      {"__1_0.distcp", item1}};
  auto source = open_dcp(folder_of(files), "/c");
  EXPECT_EQ(gather(*source, 0), to_bytes("aaaaaaaabbbbbbbb"));
  files.erase(files.begin());
  EXPECT_EQ(kind_thrown([&] { open_dcp(folder_of(files), "/c"); }, {"rank 0"}), ErrorKind::kCorrupt);
}

TEST(DcpSource, ReadsSafetensorsBlobs) {
  auto blob = [](const std::string& name, int64_t at, int64_t numel) {
    Dims shape{numel};
    std::vector<SafetensorsSpec> specs{{name, DType::kFloat32, shape}};
    SafetensorsLayout layout = lay_out_safetensors(
        specs, {{"DCP_SHARDING_INFO", fmt::format(R"({{"{}": {{"saved_offsets": [{}]}}}})", name, at)}});
    return layout.header + std::string(static_cast<size_t>(4 * numel), static_cast<char>('a' + at));
  };
  auto open = [&](const std::string& first, const std::string& second) {
    return open_dcp(folder_of({{".metadata", metadata_of(3, {{0, 1, "0", 0, 4}, {1, 2, "1", 0, 8}})},
                               {"0", first},
                               {"1", second}}),
                    "/c");
  };
  EXPECT_EQ(gather(*open(blob("w", 0, 1), blob("w", 1, 2)), 0), to_bytes("aaaabbbbbbbb"));
  EXPECT_EQ(kind_thrown([&] { open(blob("w", 2, 1), "")->payload(0, 0); }, {"\"w\"", "[2]"}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_thrown([&] { open(blob("w", 0, 2), "")->payload(0, 0); }, {"\"w\"", "[2]"}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_thrown([&] { open(blob("x", 0, 1), "")->payload(0, 0); }, {"\"w\"", "not in this file"}),
            ErrorKind::kCorrupt);
}

TEST(DcpSource, ValuesMayHoldTensors) {
  std::string item = item_of(1, 'x');
  std::string value =
      make_archive(py_tuple({py_text("text"), py_tensor(py_storage("LongStorage", "0", 2), 0, {2}, {1})}),
                   {{"0", std::string(16, 'x')}});
  for (const std::string& stored : {value, zstd(value)}) {
    TestChunk place{0, 0, "v", 0, std::ssize(stored)};
    auto source =
        open_dcp(folder_of({{".metadata", metadata_of(1, {{0, 1, "w", 0, std::ssize(item)}}, &place)},
                            {"w", item},
                            {"v", stored}}),
                 "/c");
    Value read = source->value(0);
    EXPECT_EQ(read.get_if<Tuple>()->items[1].record()->type.name, "Tensor");
  }
  TestChunk place{0, 0, "v", 0, 4};
  auto damaged =
      open_dcp(folder_of({{".metadata", metadata_of(1, {{0, 1, "w", 0, std::ssize(item)}}, &place)},
                          {"w", item},
                          {"v", "oops"}}),
               "/c");
  EXPECT_EQ(kind_thrown([&] { damaged->value(0); }, {"value \"v\""}), ErrorKind::kCorrupt);
}

TEST(DcpSource, ThreadsMayResolveAtOnce) {
  auto source = open_dcp(posix_store(), kData / "torch-2.14/uneven-3x2/checkpoint");
  const Catalog& catalog = source->catalog();
  parallel_for(8, catalog.tensors.size() * 4, [&](size_t, size_t i) {
    size_t t = i % catalog.tensors.size();
    for (size_t c = 0; c < catalog.tensors[t].chunks(); ++c) {
      EXPECT_EQ(source->payload(t, c).stored, catalog.tensors[t].extents[c]);
    }
  });
}

}  // namespace
}  // namespace spolia
