// Converting from several ranks: the bytes that one rank writes, or nothing.
#include <atomic>
#include <map>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/layout_option.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/world.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

constexpr PlanOptions kPart{kLeastMemory, 2};
constexpr TargetFormat kAll[] = {TargetFormat::kSafetensors, TargetFormat::kDcp, TargetFormat::kSpolia};

std::unique_ptr<Source> source() {
  return open_source(posix_store(),
                     std::filesystem::path(SPOLIA_TEST_DATA) / "torch-2.14/fsdp2-4/checkpoint");
}

std::map<std::string, std::string> files_of(const Store& store, const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const FolderEntry& entry : store.list(folder)) {
    const auto file = store.open(folder + "/" + entry.name);
    std::string& bytes = files[entry.name];
    bytes.resize(static_cast<size_t>(file->size()));
    file->read(0, std::as_writable_bytes(std::span(bytes)));
  }
  return files;
}

std::string text_of_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Small files, so that there are many, and a rank has several that do not follow each other.
ConvertOptions many_files(TargetFormat format) {
  ConvertOptions options;
  options.to = format;
  options.max_shard_bytes = 50'000;
  options.plan = kPart;
  return options;
}

TEST(ConvertTogether, WritesTheBytesThatOneRankWrites) {
  const auto from = source();
  for (TargetFormat format : kAll) {
    for (const char* layout : {"", "mesh = 7; *: [shard(0)]", "mesh = 2x3; *: [replicate, shard(-1)]"}) {
      if (format == TargetFormat::kSafetensors && *layout != '\0') continue;
      ConvertOptions options = many_files(format);
      if (*layout != '\0') options.layout = read_layout_rules(layout);
      const Conversion conversion = plan_conversion(*from, options);
      EXPECT_GT(conversion.target->catalog().files.size(), 2u);
      MemoryStore store;
      const Report alone = run_conversion(*from, conversion, store, "/alone", {});
      const auto expected = files_of(store, "/alone");
      for (int ranks : {1, 2, 3, 5, 16}) {
        SCOPED_TRACE(
            fmt::format("format {}, layout \"{}\", {} ranks", static_cast<int>(format), layout, ranks));
        const std::string path = "/on-" + std::to_string(ranks);
        launch(ranks, [&](World& world) {
          const Report report = convert_together(*world.all(), *from, conversion, kPart, store, path,
                                                 {.read_back = ranks == 3, .durable = ranks == 2});
          EXPECT_EQ(report.bytes_written, alone.bytes_written);
          EXPECT_EQ(report.tensors, alone.tensors);
          if (world.rank() == 0) {
            EXPECT_EQ(report.left_out, alone.left_out);
          }
        });
        EXPECT_TRUE(files_of(store, path) == expected);
      }
    }
  }
}

TEST(ConvertTogether, AFaultOfOneRanksStoreStopsAll) {
  const auto from = source();
  for (TargetFormat format : kAll) {
    const Conversion conversion = plan_conversion(*from, many_files(format));
    for (int64_t victim : {0, 2}) {
      bool failed = true;
      for (int64_t nth = 0; failed; nth += 3) {
        SCOPED_TRACE(fmt::format("format {}, rank {}, operation {}", static_cast<int>(format), victim, nth));
        const auto memory = std::make_shared<MemoryStore>();
        std::atomic<int> threw{0};
        launch(3, [&](World& world) {
          FaultStore own(memory);
          if (world.rank() == victim) own.fail(std::nullopt, nth, EIO);
          const std::string text = text_of_error(
              [&] { convert_together(*world.all(), *from, conversion, kPart, own, "/out", {}); });
          if (text.empty()) return;
          ++threw;
          EXPECT_NE(text.find(fmt::format("rank {}: ", victim)), std::string::npos) << text;
        });
        failed = threw > 0;
        EXPECT_TRUE(threw == 0 || threw == 3) << threw;
        if (memory->exists("/out")) {
          EXPECT_EQ(verify(*open_source(memory, "/out"), {}).faults, std::vector<std::string>());
        } else {
          EXPECT_TRUE(failed);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(ConvertTogether, ARankThatDiesStopsAll) {
  const auto from = source();
  const Conversion conversion = plan_conversion(*from, many_files(TargetFormat::kSpolia));
  bool died = true;
  for (int64_t nth = 0; died; ++nth) {
    SCOPED_TRACE(nth);
    const auto memory = std::make_shared<MemoryStore>();
    const std::string text = text_of_error([&] {
      launch(3,
             [&](World& world) {
               convert_together(*world.all(), *from, conversion, kPart, *memory, "/out", {});
             },
             {.timeout = std::chrono::seconds(60), .decorate = on_rank(1, dying(nth))});
    });
    died = !text.empty();
    if (memory->exists("/out")) {
      EXPECT_EQ(verify(*open_source(memory, "/out"), {}).faults, std::vector<std::string>());
    } else {
      EXPECT_TRUE(died);
      EXPECT_TRUE(memory->list("/").empty());
    }
    if (!died) {
      EXPECT_GT(nth, 5);
    }
  }
}

TEST(ConvertTogether, IsCancelledOnAllRanks) {
  const auto from = source();
  const Conversion conversion = plan_conversion(*from, many_files(TargetFormat::kDcp));
  MemoryStore store;
  CancelToken cancel;
  std::atomic<int> threw{0};
  launch(3, [&](World& world) {
    RunOptions options;
    if (world.rank() == 1) {
      cancel.cancel();
      options.cancel = &cancel;
    }
    try {
      convert_together(*world.all(), *from, conversion, kPart, store, "/out", options);
    } catch (const CancelledError&) {
      ++threw;
    }
  });
  EXPECT_EQ(threw, 3);
  EXPECT_TRUE(store.list("/").empty());
}

}  // namespace
}  // namespace spolia
