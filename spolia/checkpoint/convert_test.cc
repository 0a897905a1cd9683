// Conversions of real checkpoints, proved by the digests that PyTorch computed.
#include "spolia/checkpoint/convert.h"

#include <cerrno>
#include <fstream>
#include <map>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/testing_cases.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

constexpr PlanOptions kSmall{kLeastMemory, 2};

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
  const Report report = run_conversion(*source, plan_conversion(*source, options), *store, "/out", {});
  EXPECT_EQ(report.tensors, static_cast<int64_t>(expected.size()));
  EXPECT_EQ(digests_of(*open_source(store, "/out")), expected);
}

INSTANTIATE_TEST_SUITE_P(ByPyTorch, RealCheckpoint, testing::ValuesIn(all_cases()), name_of_case);

fs::path fsdp2_4() { return fs::path(SPOLIA_TEST_DATA) / "torch-2.14/fsdp2-4/checkpoint"; }

std::string read_file(const Store& store, const fs::path& path) {
  const auto file = store.open(path);
  std::string text(static_cast<size_t>(file->size()), ' ');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Every file directly in a folder, by name.
std::map<std::string, std::string> files_in(const Store& store, const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const FolderEntry& entry : store.list(folder))
    files[entry.name] = read_file(store, folder / entry.name);
  return files;
}

/// What a test does for each format that can be written.
class EachFormat : public testing::TestWithParam<TargetFormat> {
 protected:
  /// Into several files, cut across where the format allows it.
  ConvertOptions options() const {
    ConvertOptions options{.to = GetParam()};
    options.plan = kSmall;
    options.max_shard_bytes = 200'000;
    if (GetParam() != TargetFormat::kSafetensors) {
      options.layout = parse_layout_rules("mesh = 2x2 (dp, tp); *: [replicate, shard(-1)]");
    }
    return options;
  }
};

std::string name_of_format(const testing::TestParamInfo<TargetFormat>& info) {
  const std::vector<std::string> names = {"Safetensors", "Dcp", "Spolia"};
  return names[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Targets, EachFormat,
                         testing::Values(TargetFormat::kSafetensors, TargetFormat::kDcp,
                                         TargetFormat::kSpolia),
                         name_of_format);

TEST_P(EachFormat, SameBytesAtAnyNumberOfThreadsAndAnyBudget) {
  const auto source = open_source(posix_store(), fsdp2_4());
  std::map<std::string, std::string> first;
  for (size_t threads : {1, 2, 3, 8}) {
    for (int64_t memory : {kLeastMemory, int64_t{1} << 28}) {
      ConvertOptions convert = options();
      convert.plan = {memory, threads};
      convert.plan.largest_tile = 5000;  // the same for all, so small that tensors are cut
      MemoryStore store;
      run_conversion(*source, plan_conversion(*source, convert), store, "/out", {});
      const std::map<std::string, std::string> files = files_in(store, "/out");
      if (first.empty()) first = files;
      EXPECT_TRUE(files == first) << threads << " threads, " << memory << " bytes";
    }
  }
  EXPECT_GT(first.size(), 2u);
}

TEST_P(EachFormat, TilesOfAnySizeGiveTheSameBytes) {
  const auto source = open_source(posix_store(), fsdp2_4());
  std::map<std::string, std::string> first;
  for (int64_t tile : {512, 4000, 1 << 20}) {
    ConvertOptions convert = options();
    convert.plan.largest_tile = tile;
    MemoryStore store;
    run_conversion(*source, plan_conversion(*source, convert), store, "/out", {});
    const std::map<std::string, std::string> files = files_in(store, "/out");
    if (first.empty()) first = files;
    EXPECT_TRUE(files == first) << tile;
  }
}

TEST(Convert, RootAndPrefixRenameAndValuesAreListed) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions options{.plan = kSmall};
  options.selection.root = "model";
  options.selection.strip_prefix = "model.";
  const Conversion conversion = plan_conversion(*source, options);
  EXPECT_NE(conversion.target->catalog().find_tensor("layers.0.mlp.up_proj.weight"), nullptr);
  EXPECT_NE(conversion.target->catalog().find_tensor("lm_head.weight"), nullptr);
  EXPECT_TRUE(conversion.target->left_out().empty()) << "no value lies below model";
  const Conversion all = plan_conversion(*source, {.plan = kSmall});
  EXPECT_EQ(all.target->left_out().size(), source->catalog().values.size());
}

TEST(Convert, CastsFloatsAndLeavesTheRest) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions options{.dtype = DType::kBFloat16, .plan = kSmall};
  const auto store = std::make_shared<MemoryStore>();
  run_conversion(*source, plan_conversion(*source, options), *store, "/out", {});
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
    plan_conversion(*source, {.plan = kSmall});
    FAIL() << "complex128 went through";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("\"complex128\""), std::string::npos) << error.what();
  }
}

TEST_P(EachFormat, LeavesNothingHalfMadeWhereverItFails) {
  const auto source = open_source(posix_store(), fsdp2_4());
  const Conversion conversion = plan_conversion(*source, options());
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
      EXPECT_TRUE(disk->list("/").empty()) << stop;
    }
  }
}

TEST_P(EachFormat, ACrashAnywhereLeavesTheWholeOrNothing) {
  const auto source = open_source(posix_store(), fsdp2_4());
  const Conversion conversion = plan_conversion(*source, options());
  auto disk = std::make_shared<MemoryStore>();
  FaultStore counting(disk);
  run_conversion(*source, conversion, counting, "/out", {});
  const std::map<std::string, std::string> whole = files_in(*disk, "/out");
  const int64_t operations = counting.count();
  for (MemoryStore::UnsyncedNames names :
       {MemoryStore::UnsyncedNames::kLost, MemoryStore::UnsyncedNames::kKept}) {
    for (int64_t stop = 0; stop < operations; ++stop) {
      disk = std::make_shared<MemoryStore>();
      FaultStore store(disk);
      store.before(std::nullopt, stop, [&] {
        disk->crash(names);
        throw IoError("the power is gone");
      });
      try {
        // What runs on after a crash does not reach the disk as it was then.
        run_conversion(*source, conversion, store, "/out", {});
      } catch (const Error&) {
      }
      if (disk->exists("/out")) {
        EXPECT_TRUE(files_in(*disk, "/out") == whole) << stop;
      }
    }
  }
}

TEST_P(EachFormat, ReadsBackWhatItWroteAndNoticesADamage) {
  const auto source = open_source(posix_store(), fsdp2_4());
  const Conversion conversion = plan_conversion(*source, options());
  const auto disk = std::make_shared<MemoryStore>();
  EXPECT_NO_THROW(run_conversion(*source, conversion, *disk, "/out", {.read_back = true}));
  const std::string data = conversion.target->catalog().files[0];
  const int64_t damaged = conversion.target->catalog().tensors[0].extents[0].offset;
  // The partial folder's name is only known once it is there.
  FaultStore store(disk);
  store.before(Operation::kOpen, 0, [&] {
    for (const FolderEntry& entry : disk->list("/")) {
      if (entry.name.starts_with("bad.partial")) store.flip(fs::path("/") / entry.name / data, damaged);
    }
  });
  EXPECT_THROW(run_conversion(*source, conversion, store, "/bad", {.read_back = true}), CorruptError);
  EXPECT_FALSE(disk->exists("/bad"));
}

TEST_P(EachFormat, NoticesASourceThatIsDamagedOrShrinksWhileItIsRead) {
  for (const bool shrink : {false, true}) {
    const auto store = std::make_shared<FaultStore>(posix_store());
    const auto source = open_source(store, fsdp2_4());
    const Conversion conversion = plan_conversion(*source, options());
    const TensorEntry& tensor = source->catalog().tensors[3];
    const Payload payload = source->payload(3, 0);
    const fs::path file = source->catalog().path_of(payload.stored.file);
    ASSERT_GT(tensor.bytes(), 0);
    if (shrink) {
      store->shrink(file, payload.stored.offset + payload.offset);
    } else {
      store->flip(file, payload.stored.offset + payload.offset);
    }
    MemoryStore disk;
    EXPECT_THROW(run_conversion(*source, conversion, disk, "/out", {}), CorruptError);
    EXPECT_TRUE(disk.list("/").empty());
  }
}

TEST_P(EachFormat, KeepsWhateverNamesThereAre) {
  const std::vector<std::string> names = {"a/b/../c",
                                          "..",
                                          ".",
                                          "/etc/passwd",
                                          "a.b.c",
                                          "with space",
                                          "\n\x01",
                                          "\xce\xbb\xe2\x82\xac\xf0\x9f\x98\x80",
                                          "C:\\x",
                                          "#1",
                                          "w",
                                          "w#1",
                                          std::string(4096, 'n')};
  std::vector<SafetensorsSpec> specs;
  const int64_t shape[] = {2, 2};
  for (const std::string& name : names) specs.push_back({name, DType::kFloat32, shape});
  const auto store = std::make_shared<MemoryStore>();
  const SafetensorsLayout file = lay_out_safetensors(specs);
  std::string bytes = file.header;
  for (int64_t i = 0; i < file.file_size - std::ssize(file.header); ++i) bytes += static_cast<char>(i);
  store->create("/in.safetensors")->write(0, bytes_of(bytes));

  const auto source = open_source(store, "/in.safetensors");
  run_conversion(*source, plan_conversion(*source, options()), *store, "/out", {});
  const auto written = open_source(store, "/out");
  EXPECT_EQ(digests_of(*written), digests_of(*source));
}

TEST_P(EachFormat, TakesATensorFarLargerThanTheBudget) {
  // 48 MiB through 16 MiB, by rows and then, where that is possible, by columns.
  const int64_t shape[] = {3000, 4096};
  const std::vector<SafetensorsSpec> specs = {{"w", DType::kFloat32, shape}};
  const auto store = std::make_shared<MemoryStore>();
  const SafetensorsLayout file = lay_out_safetensors(specs);
  std::vector<uint32_t> numbers(3000 * 4096);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i * 2654435761u);
  const auto created = store->create("/in.safetensors");
  created->write(0, bytes_of(file.header));
  created->write(std::ssize(file.header), std::as_bytes(std::span(numbers)));

  const auto source = open_source(store, "/in.safetensors");
  const Report report = run_conversion(*source, plan_conversion(*source, options()), *store, "/out", {});
  EXPECT_LE(report.buffer_bytes, kLeastMemory);
  EXPECT_EQ(report.bytes_read, int64_t{4} * 3000 * 4096) << "each byte once";
  EXPECT_EQ(digests_of(*open_source(store, "/out")), digests_of(*source));
}

TEST_P(EachFormat, WithoutChecksumsTheElementsAreTheSame) {
  const auto source = open_source(posix_store(), fsdp2_4());
  ConvertOptions convert = options();
  convert.checksums = false;
  const auto store = std::make_shared<MemoryStore>();
  run_conversion(*source, plan_conversion(*source, convert), *store, "/out", {.check_source = false});
  const auto written = open_source(store, "/out");
  EXPECT_EQ(digests_of(*written), digests_of(*source));
  const Verdict verdict = verify(*written, {});
  EXPECT_TRUE(verdict.faults.empty());
  EXPECT_EQ(verdict.report.crcs_checked, 0);
}

TEST(Convert, CancelledLeavesNothing) {
  const auto source = open_source(posix_store(), fsdp2_4());
  const Conversion conversion = plan_conversion(*source, {.plan = kSmall});
  MemoryStore store;
  CancelToken cancel;
  RunOptions options{&cancel, [&](int64_t, int64_t) { cancel.cancel(); }};
  EXPECT_THROW(run_conversion(*source, conversion, store, "/out", options), CancelledError);
  EXPECT_TRUE(store.list("/").empty());
}

TEST_P(EachFormat, SyncsEveryFileBeforeTheRename) {
  const auto source = open_source(posix_store(), fsdp2_4());
  FaultStore store(std::make_shared<MemoryStore>());
  run_conversion(*source, plan_conversion(*source, options()), store, "/out", {});
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
