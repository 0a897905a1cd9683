// The command when it is cut short or kept short: signals, a full disk, little memory.
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "spolia/format/safetensors/header.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // memory is the sanitizer's then
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

/// A safetensors file of `count` int32 tensors of `mebibytes` each, rows of 4 KiB: zeros, which take no room
/// on the disk, but for a number at either end of each tensor.
void make_large(const fs::path& path, int count, int64_t mebibytes) {
  const Dims shape = {mebibytes * kMiB / 4096, 1024};
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back("weight." + std::to_string(i));
  std::vector<SafetensorsSpec> specs;
  for (const std::string& name : names) specs.push_back({name, DType::kInt32, shape});
  const SafetensorsLayout layout = lay_out_safetensors(specs);
  std::ofstream file(path, std::ios::binary);
  file << layout.header;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t begin = layout.offsets[static_cast<size_t>(i)];
    for (const int64_t offset : {begin, begin + mebibytes * kMiB - 4}) {
      const int32_t number = i + 1;
      file.seekp(offset).write(reinterpret_cast<const char*>(&number), sizeof number);
    }
  }
}

/// A format, and the file that is written last of all.
struct Format {
  std::string name, last_file;
};

const Format kSafetensors = {"safetensors", "model.safetensors.index.json"};
const Format kDcp = {"dcp", ".metadata"};
const Format kSpolia = {"spolia", "spolia.json"};

class CutShort : public testing::Test {
 protected:
  CutShort() { make_large(source_, 100, 2); }

  std::vector<std::string> arguments(const Format& format = kSafetensors) const {
    return {"convert", source_, out_, "--to", format.name, "--memory", "16MiB"};
  }

  /// The name of the unfinished folder, where there is one.
  std::optional<std::string> partial() const {
    for (const std::string& name : names_in(temp_.path())) {
      if (name.starts_with("out.partial-")) return name;
    }
    return std::nullopt;
  }

  /// A conversion that stands still in the middle: it has begun to write, and has not come to the file that
  /// is written last. `prepare` runs before each attempt, when nothing is there but the source.
  std::unique_ptr<Command> stopped_in_the_middle(
      const std::vector<std::string>& arguments, const Format& format,
      const std::function<void()>& prepare = [] {}) const {
    for (int attempt = 0; attempt < 20; ++attempt) {
      for (const std::string& name : names_in(temp_.path())) {
        if (name.starts_with("out")) fs::remove_all(temp_.path() / name);
      }
      prepare();
      auto command = std::make_unique<Command>(arguments);
      // It may be over before it was seen to have begun.
      for (int i = 0; i < 1000 && !partial(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (command->pause() && partial() && !fs::exists(temp_.path() / *partial() / format.last_file)) {
        return command;
      }
    }
    throw std::runtime_error("every conversion was over before it could be stopped");
  }

  void expect_nothing_left(int signal, const Format& format) const {
    SCOPED_TRACE(format.name);
    const auto command = stopped_in_the_middle(arguments(format), format);
    command->send(signal);
    command->resume();
    const Outcome outcome = command->wait();
    EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
    expect_contains(outcome.err, "interrupted");
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"source.safetensors"});
  }

  const TempFolder temp_;
  const fs::path source_ = temp_.path() / "source.safetensors";
  const fs::path out_ = temp_.path() / "out";
};

TEST_F(CutShort, AnInterruptLeavesNothing) {
  for (const Format& format : {kSafetensors, kDcp, kSpolia}) expect_nothing_left(SIGINT, format);
  for (const int signal : {SIGTERM, SIGHUP}) expect_nothing_left(signal, kSafetensors);
}

TEST_F(CutShort, AKillLeavesOnlyWhatSaysThatItIsPartial) {
  const auto command = stopped_in_the_middle(arguments(), kSafetensors);
  command->send(SIGKILL);
  EXPECT_EQ(command->wait().signal, SIGKILL);
  ASSERT_TRUE(partial());
  const std::string leftover = *partial();
  EXPECT_EQ(names_in(temp_.path()), (std::set<std::string>{"source.safetensors", leftover}));

  const Outcome later = spolia(arguments());
  EXPECT_EQ(later.exit_code, 0) << later.err;
  expect_contains(later.err, leftover);
  EXPECT_EQ(names_in(out_), (std::set<std::string>{"model.safetensors", kSafetensors.last_file}));
  EXPECT_EQ(names_in(temp_.path()), (std::set<std::string>{"source.safetensors", "out", leftover}));
}

TEST_F(CutShort, AnOlderCheckpointOutlivesARunThatWasToReplaceIt) {
  const fs::path old = fsdp();
  const auto put_old = [&] { EXPECT_EQ(spolia({"convert", old, out_, "--to", "dcp"}).exit_code, 0); };
  for (const Format& format : {kDcp, kSpolia}) {
    for (const int signal : {SIGKILL, SIGINT}) {
      std::vector<std::string> words = arguments(format);
      words.push_back("--overwrite");
      if (signal == SIGINT) words.push_back("--non-atomic");
      const auto command = stopped_in_the_middle(words, format, put_old);
      command->send(signal);
      command->resume();
      command->wait();
      EXPECT_EQ(spolia({"digest", out_}).out, spolia({"digest", old}).out) << format.name;
      EXPECT_EQ(partial().has_value(), signal == SIGKILL);
    }
  }
}

TEST_F(CutShort, AFullDiskIsNamedAndLeavesNothing) {
  const auto small_disk = [] {
    std::signal(SIGXFSZ, SIG_IGN);  // writes fail with an error instead
    const rlimit limit{rlim_t{50} << 20, rlim_t{50} << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  const Outcome outcome = spolia(arguments(), small_disk);
  EXPECT_EQ(outcome.exit_code, 2);
  expect_contains(outcome.err, "model.safetensors");
  expect_contains(outcome.err, "too large");
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"source.safetensors"});
}

/// A conversion to which and from which there are `chunks` stays within a budget and changes no content.
void expect_within_budget(const fs::path& source, const fs::path& out, int64_t budget_mebibytes,
                          int64_t chunks, const std::vector<std::string>& options) {
  std::vector<std::string> arguments = {"convert",   source,     out,
                                        "--no-sync", "--memory", std::to_string(budget_mebibytes) + "MiB"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  const Outcome outcome = spolia(arguments);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(spolia({"digest", out}).out, spolia({"digest", source}).out);
  constexpr int64_t kBytesAChunk = 150;
  if (!kSanitized) {
    EXPECT_LE(outcome.peak_resident_bytes, (64 + budget_mebibytes) * kMiB + chunks * kBytesAChunk)
        << testing::PrintToString(arguments);
  }
}

/// Converts `count` tensors of `mebibytes` each into a format.
void expect_within_budget(int count, int64_t mebibytes, int64_t budget_mebibytes, const Format& format) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source.safetensors";
  make_large(source, count, mebibytes);
  expect_within_budget(source, temp.path() / "out", budget_mebibytes, count, {"--to", format.name});
}

/// Converts what ranks share by rows to what other ranks share by columns.
void expect_within_budget_from_rows_to_columns(int count, int64_t mebibytes, int64_t budget_mebibytes,
                                               const Format& from, const Format& to) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source.safetensors", rows = temp.path() / "rows";
  make_large(source, count, mebibytes);
  expect_within_budget(source, rows, budget_mebibytes, count * 8,
                       {"--to", from.name, "--layout", "mesh = 8; *: [shard(0)]"});
  expect_within_budget(rows, temp.path() / "columns", budget_mebibytes, count * (8 + 5),
                       {"--to", to.name, "--layout", "mesh = 5; *: [shard(1)]"});
}

TEST(Memory, ManyTensorsInLittle) {
  expect_within_budget(75, 4, 16, kSafetensors);
  expect_within_budget(75, 4, 16, kSpolia);
}

TEST(Memory, OneTensorLargerThanTheBudget) {
  expect_within_budget(1, 200, 32, kSafetensors);
  expect_within_budget(1, 200, 32, kDcp);
}

TEST(Memory, RowsToColumns) { expect_within_budget_from_rows_to_columns(1, 200, 16, kDcp, kSpolia); }

TEST(Memory, OtherWayRoundSlow) {
  expect_within_budget(75, 4, 32, kSafetensors);
  expect_within_budget(1, 200, 16, kSafetensors);
  expect_within_budget(75, 4, 32, kDcp);
  expect_within_budget(1, 200, 16, kSpolia);
  for (const auto& [from, to] : {std::pair(kSpolia, kDcp), {kDcp, kDcp}, {kSpolia, kSpolia}}) {
    expect_within_budget_from_rows_to_columns(75, 4, 16, from, to);
    expect_within_budget_from_rows_to_columns(1, 200, 32, from, to);
  }
}

}  // namespace
}  // namespace spolia
