// Conversions of real checkpoints, proved by the digests that PyTorch computed.
#include "spolia/checkpoint/convert.h"

#include <cerrno>
#include <fstream>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

constexpr PlanOptions kSmall{kLeastMemory, 2};

/// Every case that PyTorch wrote: SPOLIA_TEST_DATA/torch-X/CASE.
std::vector<fs::path> all_cases() {
  std::set<fs::path> cases;
  for (const auto& version : fs::directory_iterator(SPOLIA_TEST_DATA)) {
    if (!version.path().filename().string().starts_with("torch-")) continue;
    for (const auto& c : fs::directory_iterator(version)) cases.insert(c.path());
  }
  return {cases.begin(), cases.end()};
}

nlohmann::json expected_of(const fs::path& c) {
  return nlohmann::json::parse(std::ifstream(c / "expected.json"))["tensors"];
}

/// name -> {dtype, shape, sha256}, as expected.json has it.
nlohmann::json digests_of(const Source& source) {
  nlohmann::json out = nlohmann::json::object();
  const std::vector<std::string> digests = digest_tensors(source, {.plan = kSmall});
  for (size_t t = 0; t < digests.size(); ++t) {
    const TensorEntry& tensor = source.catalog().tensors[t];
    out[tensor.name] = {{"dtype", name_of(tensor.dtype)},
                        {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
                        {"sha256", digests[t]}};
  }
  return out;
}

class RealCheckpoint : public testing::TestWithParam<fs::path> {};

TEST_P(RealCheckpoint, DigestsAreThoseOfPyTorch) {
  const auto source = open_source(posix_store(), GetParam() / "checkpoint");
  EXPECT_EQ(digests_of(*source), expected_of(GetParam()));
}

TEST_P(RealCheckpoint, SurvivesConversionToSafetensors) {
  const auto source = open_source(posix_store(), GetParam() / "checkpoint");
  nlohmann::json expected = expected_of(GetParam());
  ConvertOptions options{.plan = kSmall};
  options.max_shard_bytes = 100'000;
  for (const TensorEntry& tensor : source->catalog().tensors) {
    if (!info(tensor.dtype).safetensors.empty()) continue;
    options.selection.drop.push_back(tensor.name);
    expected.erase(tensor.name);
  }
  const auto store = std::make_shared<MemoryStore>();
  const Report report =
      run_conversion(*source, plan_conversion(source->catalog(), options), *store, "/out", {});
  EXPECT_EQ(report.tensors, static_cast<int64_t>(expected.size()));
  EXPECT_EQ(digests_of(*open_source(store, "/out")), expected);
}

INSTANTIATE_TEST_SUITE_P(ByPyTorch, RealCheckpoint, testing::ValuesIn(all_cases()), [](const auto& param) {
  std::string name = param.param.parent_path().filename().string() + "_" + param.param.filename().string();
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

fs::path fsdp2_4() { return fs::path(SPOLIA_TEST_DATA) / "torch-2.14/fsdp2-4/checkpoint"; }

std::string read_file(const Store& store, const fs::path& path) {
  const auto file = store.open(path);
  std::string text(static_cast<size_t>(file->size()), ' ');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

TEST(Convert, SameBytesAtAnyNumberOfThreadsAndAnyBudget) {
  const auto source = open_source(posix_store(), fsdp2_4());
  std::map<std::string, std::string> first;
  for (size_t threads : {1, 2, 8}) {
    for (int64_t memory : {kLeastMemory, int64_t{1} << 28}) {
      ConvertOptions options{.plan = {memory, threads}};
      options.max_shard_bytes = 200'000;
      MemoryStore store;
      run_conversion(*source, plan_conversion(source->catalog(), options), store, "/out", {});
      std::map<std::string, std::string> files;
      for (const FolderEntry& entry : store.list("/out"))
        files[entry.name] = read_file(store, fs::path("/out") / entry.name);
      if (first.empty()) first = files;
      EXPECT_EQ(files, first) << threads << " threads, " << memory << " bytes";
    }
  }
  EXPECT_GT(first.size(), 2u);
}

TEST(Convert, RootAndPrefixRenameAndValuesAreListed) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions options{.plan = kSmall};
  options.selection.root = "model";
  options.selection.strip_prefix = "model.";
  const Conversion conversion = plan_conversion(source->catalog(), options);
  EXPECT_NE(conversion.target.catalog.find_tensor("layers.0.mlp.up_proj.weight"), nullptr);
  EXPECT_NE(conversion.target.catalog.find_tensor("lm_head.weight"), nullptr);
  EXPECT_TRUE(conversion.left_out.empty()) << "no value lies below model";
  const Conversion all = plan_conversion(source->catalog(), {.plan = kSmall});
  EXPECT_EQ(all.left_out.size(), source->catalog().values.size());
}

TEST(Convert, CastsFloatsAndLeavesTheRest) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions options{.dtype = DType::kBFloat16, .plan = kSmall};
  const auto store = std::make_shared<MemoryStore>();
  run_conversion(*source, plan_conversion(source->catalog(), options), *store, "/out", {});
  const auto converted = open_source(store, "/out");
  size_t kept = 0;
  for (const TensorEntry& tensor : source->catalog().tensors) {
    const TensorEntry* now = converted->catalog().find_tensor(tensor.name);
    ASSERT_NE(now, nullptr) << tensor.name;
    const bool is_float = info(tensor.dtype).kind == DTypeKind::kFloat;
    EXPECT_EQ(now->dtype, is_float ? DType::kBFloat16 : tensor.dtype);
    kept += !is_float;
  }
  EXPECT_GT(kept, 0u);
}

TEST(Convert, RefusesDtypesThatSafetensorsLacks) {
  const auto source =
      open_source(posix_store(), fs::path(SPOLIA_TEST_DATA) / "torch-2.14/dtypes-1/checkpoint");
  try {
    plan_conversion(source->catalog(), {.plan = kSmall});
    FAIL() << "complex128 went through";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("\"complex128\""), std::string::npos) << error.what();
  }
}

TEST(Convert, LeavesNothingHalfMadeWhereverItFails) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions options{.plan = kSmall};
  options.max_shard_bytes = 400'000;
  const Conversion conversion = plan_conversion(source->catalog(), options);
  auto disk = std::make_shared<MemoryStore>();
  FaultStore counting(disk);
  run_conversion(*source, conversion, counting, "/out", {});
  const int64_t operations = counting.count();
  for (int64_t stop = 0; stop < operations; ++stop) {
    disk = std::make_shared<MemoryStore>();
    FaultStore store(disk);
    store.fail(std::nullopt, stop, ENOSPC);
    try {
      run_conversion(*source, conversion, store, "/out", {});
    } catch (const Error&) {
      const std::vector<FolderEntry> left = disk->list("/");
      // Only the very last step, making the new name durable, can fail with everything in place.
      EXPECT_TRUE(left.empty() || stop == operations - 1) << stop;
    }
  }
}

TEST(Convert, CancelledLeavesNothing) {
  const auto source = open_source(posix_store(), fsdp2_4());
  const Conversion conversion = plan_conversion(source->catalog(), {.plan = kSmall});
  MemoryStore store;
  CancelToken cancel;
  RunOptions options{&cancel, [&](int64_t, int64_t) { cancel.cancel(); }};
  EXPECT_THROW(run_conversion(*source, conversion, store, "/out", options), CancelledError);
  EXPECT_TRUE(store.list("/").empty());
}

TEST(Convert, SyncsEveryFileBeforeTheRename) {
  const auto source = open_source(posix_store(), fsdp2_4());
  FaultStore store(std::make_shared<MemoryStore>());
  run_conversion(*source, plan_conversion(source->catalog(), {.plan = kSmall}), store, "/out", {});
  std::set<fs::path> dirty;
  bool renamed = false;
  for (const FaultStore::Event& event : store.log()) {
    if (event.operation == Operation::kWrite) dirty.insert(event.path);
    if (event.operation == Operation::kSync) dirty.erase(event.path);
    if (event.operation == Operation::kRename) {
      EXPECT_TRUE(dirty.empty());
      renamed = true;
    }
  }
  EXPECT_TRUE(renamed);
}

}  // namespace
}  // namespace spolia
