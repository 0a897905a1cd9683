#include "spolia/format/source.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/safetensors/test_files.h"
#include "spolia/format/torch/testing.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

const fs::path kTestData = SPOLIA_TEST_DATA;

/// Every checkpoint that PyTorch wrote, opened without a word on its format.
class EveryFixture : public ::testing::TestWithParam<std::string> {};

std::vector<std::string> fixtures() {
  std::vector<std::string> names;
  for (const char* version : {"torch-2.6", "torch-2.14"}) {
    for (const auto& entry : fs::directory_iterator(kTestData / version)) {
      names.push_back(fmt::format("{}/{}", version, entry.path().filename().string()));
    }
  }
  std::ranges::sort(names);
  return names;
}

TEST_P(EveryFixture, IsWhatPyTorchSaved) {
  auto source = open_source(posix_store(), kTestData / GetParam() / "checkpoint");
  testing::expect_matches(*source, kTestData / GetParam() / "expected.json");
}

INSTANTIATE_TEST_SUITE_P(OpenSource, EveryFixture, ::testing::ValuesIn(fixtures()), [](const auto& test) {
  std::string name = test.param;
  std::ranges::replace_if(
      name, [](char c) { return c < '0' || (c > '9' && c < 'A') || c > 'z'; }, '_');
  return name;
});

class OpenSource : public ::testing::Test {
 protected:
  OpenSource() { store_->create_folder("/c"); }

  void put_file(const fs::path& path, std::string_view bytes = "") { put(*store_, path, bytes); }
  std::unique_ptr<Source> open(const fs::path& path = "/c") const { return open_source(store_, path); }

  void expect_error(const fs::path& path, ErrorKind kind,
                    std::initializer_list<std::string_view> parts) const {
    try {
      open(path);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      std::string message = error.what();
      EXPECT_EQ(error.kind(), kind) << message;
      for (auto part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << "\n in " << message;
    }
  }

  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  const std::string safetensors_ = safetensors_bytes({{"a", DType::kInt8, {3}, 'a'}});
  const std::string torch_save_ =
      testing::read_file(kTestData / "torch-2.14/torch-save-1/checkpoint/state.pt");
};

TEST_F(OpenSource, NothingThere) { expect_error("/nowhere", ErrorKind::kNotFound, {"/nowhere"}); }

TEST_F(OpenSource, AFolderOfNothing) {
  put_file("/c/config.json", "{}");
  store_->create_folder("/c/logs");
  expect_error("/c", ErrorKind::kUnsupported, {"\"/c\" is no checkpoint", ".metadata", "*.safetensors"});
}

TEST_F(OpenSource, AFileByItsNameOrItsContent) {
  put_file("/c/model.safetensors", safetensors_);
  put_file("/c/weights", safetensors_);
  put_file("/c/torch", torch_save_);
  put_file("/c/text", "hello");
  put_file("/c/empty", "");
  put_file("/c/broken.safetensors", "hello");
  EXPECT_EQ(open("/c/model.safetensors")->catalog().format, "safetensors");
  EXPECT_EQ(open("/c/weights")->catalog().format, "safetensors");
  EXPECT_EQ(open("/c/torch")->catalog().format, "torch.save");
  expect_error("/c/text", ErrorKind::kUnsupported, {"\"/c/text\"", "neither safetensors nor"});
  expect_error("/c/empty", ErrorKind::kUnsupported, {"\"/c/empty\"", "neither safetensors nor"});
  expect_error("/c/broken.safetensors", ErrorKind::kCorrupt, {"/c/broken.safetensors", "too few"});
}

TEST_F(OpenSource, ALegacyTorchFileIsRefusedByName) {
  const std::string legacy = std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15) +
                             std::string("\x80\x02M\xe9\x03.", 6);
  put_file("/c/old", legacy);
  put_file("/c/old.pt", legacy);
  expect_error("/c/old", ErrorKind::kUnsupported, {"/c/old", "1.6"});
  expect_error("/c/old.pt", ErrorKind::kUnsupported, {"/c/old.pt", "1.6"});
}

TEST_F(OpenSource, AnIndexByName) {
  put_file("/c/m.safetensors", safetensors_);
  put_file("/c/x.safetensors.index.json", R"({"weight_map": {"a": "m.safetensors"}})");
  EXPECT_EQ(open("/c/x.safetensors.index.json")->catalog().tensors.size(), 1u);
  put_file("/c/pytorch_model.bin.index.json", R"({"weight_map": {}})");
  expect_error("/c/pytorch_model.bin.index.json", ErrorKind::kUnsupported, {"name its folder"});
}

TEST_F(OpenSource, AFileOfADcpFolderNamesTheFolder) {
  put_file("/c/.metadata");
  put_file("/c/__0_0.distcp");
  put_file("/c/__3.metadata");
  for (const char* name : {".metadata", "__0_0.distcp", "__3.metadata"}) {
    expect_error(fs::path("/c") / name, ErrorKind::kUnsupported, {name, "name its folder"});
  }
}

TEST_F(OpenSource, SafetensorsComeBeforeOtherWeights) {
  put_file("/c/model.safetensors", safetensors_);
  put_file("/c/pytorch_model.bin", torch_save_);
  put_file("/c/training_args.bin", torch_save_);
  EXPECT_EQ(open()->catalog().format, "safetensors");
}

TEST_F(OpenSource, TheOnlyTorchFileOfAFolder) {
  put_file("/c/model.ckpt", torch_save_);
  put_file("/c/notes.txt", "");
  EXPECT_EQ(open()->catalog().format, "torch.save");
  put_file("/c/other.pth", torch_save_);
  expect_error("/c", ErrorKind::kUnsupported, {"several torch.save files", "\"model.ckpt\", \"other.pth\""});
}

TEST_F(OpenSource, CheckpointsBelowComeBeforeATorchFile) {
  put_file("/c/scheduler.bin", torch_save_);
  put_file("/c/pytorch_model_fsdp_0/.metadata");
  expect_error("/c", ErrorKind::kUnsupported,
               {"\"/c\" is not a checkpoint itself", "\"pytorch_model_fsdp_0\""});
}

TEST_F(OpenSource, AParentNamesItsCheckpoints) {
  put_file("/c/step-10/.metadata");
  put_file("/c/step-20/__0_0.distcp");
  put_file("/c/hf/model.safetensors", safetensors_);
  put_file("/c/logs/log.txt");
  expect_error("/c", ErrorKind::kUnsupported, {"\"hf\", \"step-10\", \"step-20\""});
}

TEST_F(OpenSource, AMegatronRunNamesItsNewest) {
  put_file("/c/latest_checkpointed_iteration.txt", "100\n");
  put_file("/c/iter_0000050/.metadata");
  put_file("/c/iter_0000100/.metadata");
  expect_error("/c", ErrorKind::kUnsupported, {"Megatron", "\"/c/iter_0000100\""});
}

TEST_F(OpenSource, AMegatronRelease) {
  put_file("/c/latest_checkpointed_iteration.txt", "release");
  put_file("/c/release/.metadata");
  expect_error("/c", ErrorKind::kUnsupported, {"Megatron", "\"/c/release\""});
}

TEST_F(OpenSource, AMegatronRunWithoutItsNewest) {
  for (const std::string text : {"100", "", "../../etc", "1e3", "\x1b[2J"}) {
    store_->remove_all("/c");
    put_file("/c/latest_checkpointed_iteration.txt", text);
    expect_error("/c", ErrorKind::kUnsupported, {"\"/c\" is no checkpoint"});
    put_file("/c/iter_0000050/.metadata");
    expect_error("/c", ErrorKind::kUnsupported, {"\"iter_0000050\""});
  }
}

TEST_F(OpenSource, AnInterruptedDcpSaveIsLeftToItsReader) {
  put_file("/c/__0_0.distcp");
  put_file("/c/model.safetensors", safetensors_);
  try {
    open();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(".metadata"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace spolia
