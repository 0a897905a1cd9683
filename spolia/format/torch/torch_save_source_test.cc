#include "spolia/format/torch/torch_save_source.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

TEST(TorchSaveSource, ReadsWhatPyTorchWrote) {
  for (const char* version : {"torch-2.14", "torch-2.6"}) {
    SCOPED_TRACE(version);
    auto folder = kData / version / "torch-save-1";
    auto source = open_torch_save(posix_store(), folder / "checkpoint" / "state.pt");
    EXPECT_EQ(source->catalog().format, "torch.save");
    expect_matches(*source, folder / "expected.json");
  }
}

TEST(TorchSaveSource, TiedTensorsShareTheirBytes) {
  auto source = open_torch_save(posix_store(), kData / "torch-2.14/torch-save-1/checkpoint/state.pt");
  const Catalog& catalog = source->catalog();
  auto payload = [&](const char* name) {
    return source->payload(static_cast<size_t>(catalog.find_tensor(name) - catalog.tensors.data()), 0);
  };
  EXPECT_EQ(payload("tied.a").stored, payload("tied.b").stored);
  EXPECT_EQ(payload("tied.a").stored, payload("tied.row").stored);
  EXPECT_EQ(payload("tied.row").first, 3);
}

std::string vector_of(const std::string& key, int64_t numel) {
  return py_tensor(py_storage("FloatStorage", key, numel), 0, {numel}, {1});
}

/// A file of one tensor.
std::string file_of(const std::string& name, const std::string& bytes = std::string(8, 'a')) {
  return make_archive(py_fields({{name, vector_of("0", 2)}}), {{"0", bytes}});
}

std::string index_of(const std::vector<std::pair<std::string, std::string>>& map) {
  nlohmann::json index = {{"metadata", {{"total_size", 16}}}, {"weight_map", nlohmann::json::object()}};
  for (const auto& [name, file] : map) index["weight_map"][name] = file;
  return index.dump();
}

/// A folder "/m" with these files.
std::shared_ptr<MemoryStore> folder_of(const std::vector<std::pair<std::string, std::string>>& files) {
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/m");
  for (const auto& [name, bytes] : files) put_file(*store, "/m/" + name, bytes);
  return store;
}

std::optional<ErrorKind> kind_of(const std::vector<std::pair<std::string, std::string>>& files,
                                 const std::vector<std::string>& words) {
  return kind_thrown([&] { open_torch_bin_folder(folder_of(files), "/m"); }, words);
}

TEST(TorchBinFolder, OneFileNeedsNoIndex) {
  for (const char* name : {"pytorch_model.bin", "pytorch_model_fsdp.bin"}) {
    auto source = open_torch_bin_folder(folder_of({{name, file_of("w")}, {"config.json", "{}"}}), "/m");
    ASSERT_EQ(source->catalog().tensors.size(), 1u);
    EXPECT_EQ(gather(*source, 0), to_bytes(std::string(8, 'a')));
  }
}

TEST(TorchBinFolder, IndexJoinsSeveralFiles) {
  auto source = open_torch_bin_folder(
      folder_of({{"pytorch_model-00001-of-00002.bin", file_of("a")},
                 {"pytorch_model-00002-of-00002.bin", file_of("b", std::string(8, 'b'))},
                 {"pytorch_model.bin.index.json", index_of({{"a", "pytorch_model-00001-of-00002.bin"},
                                                            {"b", "pytorch_model-00002-of-00002.bin"}})}}),
      "/m");
  ASSERT_EQ(source->catalog().tensors.size(), 2u);
  EXPECT_EQ(gather(*source, 0), to_bytes(std::string(8, 'a')));
  EXPECT_EQ(gather(*source, 1), to_bytes(std::string(8, 'b')));
}

TEST(TorchBinFolder, IndexAndContentsMustAgree) {
  const std::string index = "pytorch_model.bin.index.json";
  EXPECT_EQ(kind_of({{"1.bin", file_of("a")},
                     {"2.bin", file_of("b")},
                     {index, index_of({{"a", "1.bin"}, {"b", "1.bin"}})}},
                    {"1.bin", "\"b\""}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_of({{"1.bin", file_of("a")},
                     {"2.bin", file_of("b")},
                     {index, index_of({{"a", "2.bin"}, {"b", "1.bin"}})}},
                    {"\"a\"", "\"2.bin\""}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_of({{"1.bin", file_of("x")}, {index, index_of({{"a", "1.bin"}})}}, {"\"x\""}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_of({{"1.bin", file_of("a")},
                     {"2.bin", file_of("a")},
                     {index, index_of({{"a", "1.bin"}, {"b", "2.bin"}})}},
                    {"\"a\""}),
            ErrorKind::kMismatch);
  EXPECT_EQ(
      kind_of({{"1.bin", file_of("a")}, {index, index_of({{"a", "1.bin"}, {"b", "2.bin"}})}}, {"2.bin"}),
      ErrorKind::kNotFound);
  EXPECT_EQ(kind_of({{"1.bin", file_of("a")}, {index, index_of({{"a", "../1.bin"}})}}, {}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({{"pytorch_model-00001-of-00002.bin", file_of("a")},
                     {"pytorch_model-00002-of-00002.bin", file_of("b")}},
                    {"index"}),
            ErrorKind::kUnsupported);
}

TEST(TorchSaveSource, DeflatedStoragesAreRead) {
  // A deflate stream of one stored block of 8 bytes.
  std::string packed = std::string("\1\x08\0\xF7\xFF", 5) + std::string(8, 'p');
  std::string file = make_zip({{.name = "a/data.pkl", .data = py_pickle(vector_of("0", 2))},
                               {.name = "a/data/0",
                                .data = packed,
                                .method = 8,
                                .size = 8,
                                .crc = crc32(0, bytes_of(std::string(8, 'p')))}});
  auto source = open_torch_save(folder_of({{"x.pt", file}}), "/m/x.pt");
  EXPECT_EQ(source->payload(0, 0).codec, Codec::kDeflate);
  EXPECT_EQ(gather(*source, 0), to_bytes(std::string(8, 'p')));
}

TEST(TorchSaveSource, NamesThatMeetAreCorrupt) {
  std::string file =
      make_archive(py_fields({{"a.b", vector_of("0", 2)}, {"a", py_fields({{"b", vector_of("0", 2)}})}}),
                   {{"0", std::string(8, 'a')}});
  EXPECT_EQ(kind_thrown(
                [&] {
                  open_torch_save(folder_of({{"x.pt", file}}), "/m/x.pt");
                },
                {"a.b"}),
            ErrorKind::kCorrupt);
}

TEST(TorchSaveSource, APartOfADTensorIsRefused) {
  auto file = kData / "torch-2.14/rank-files-2/checkpoint/model_world_size_2_rank_1.pt";
  EXPECT_EQ(kind_thrown([&] { open_torch_save(posix_store(), file); }, {"DTensor", "folder"}),
            ErrorKind::kUnsupported);
}

TEST(TorchSaveSource, EveryDamagedByteIsAnErrorOrHarmless) {
  const std::string whole = make_archive(
      py_fields({{"w", py_fields({{"x", vector_of("0", 2)}})}, {"v", py_list({py_int(1), py_text("two")})}}),
      {{"0", "abcdefgh"}});
  for (size_t i = 0; i < whole.size(); ++i) {
    for (int flip : {0x01, 0x80, 0xFF}) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      try {
        auto source = open_torch_save(folder_of({{"x.pt", damaged}}), "/m/x.pt");
        for (size_t t = 0; t < source->catalog().tensors.size(); ++t) {
          Payload payload = source->payload(t, 0);
          auto bytes = open_bytes(source->file(payload.stored.file), payload.stored.offset,
                                  payload.stored.length, payload.codec);
          std::vector<std::byte> data(static_cast<size_t>(payload.length));
          bytes->read(payload.offset, data);
        }
      } catch (const Error& error) {
        EXPECT_NE(error.kind(), ErrorKind::kInvalidArgument) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace spolia
