// The command when it is cut short or kept short: signals, a full disk, little memory.
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <fstream>
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

/// A safetensors file of `count` int32 tensors of `mebibytes` each: zeros, which take no room on the disk,
/// but for a number at either end of each tensor.
void make_large(const fs::path& path, int count, int64_t mebibytes) {
  const Dims shape = {mebibytes * kMiB / 4};
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

class CutShort : public testing::Test {
 protected:
  CutShort() { make_large(source_, 100, 2); }

  std::vector<std::string> arguments() const {
    return {"convert", source_, out_, "--to", "safetensors", "--memory", "16MiB"};
  }

  /// The name of the unfinished folder, where there is one.
  std::optional<std::string> partial() const {
    for (const std::string& name : names_in(temp_.path())) {
      if (name.starts_with("out.partial-")) return name;
    }
    return std::nullopt;
  }

  /// A conversion that stands still in the middle: it has begun to write, and has not come to its index,
  /// which is written last.
  std::unique_ptr<Command> stopped_in_the_middle() const {
    for (int attempt = 0; attempt < 20; ++attempt) {
      auto command = std::make_unique<Command>(arguments());
      while (!partial() && !fs::exists(out_)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (command->pause() && partial() && !fs::exists(temp_.path() / *partial() / kIndex)) return command;
      command.reset();  // it was too fast
      for (const std::string& name : names_in(temp_.path())) {
        if (name.starts_with("out")) fs::remove_all(temp_.path() / name);
      }
    }
    throw std::runtime_error("every conversion was over before it could be stopped");
  }

  static constexpr const char* kIndex = "model.safetensors.index.json";
  const TempFolder temp_;
  const fs::path source_ = temp_.path() / "source.safetensors";
  const fs::path out_ = temp_.path() / "out";
};

TEST_F(CutShort, AnInterruptLeavesNothing) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto command = stopped_in_the_middle();
    command->send(signal);
    command->resume();
    const Outcome outcome = command->wait();
    EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
    expect_contains(outcome.err, "interrupted");
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"source.safetensors"});
  }
}

TEST_F(CutShort, AKillLeavesOnlyWhatSaysThatItIsPartial) {
  const auto command = stopped_in_the_middle();
  command->send(SIGKILL);
  EXPECT_EQ(command->wait().signal, SIGKILL);
  ASSERT_TRUE(partial());
  const std::string leftover = *partial();
  EXPECT_EQ(names_in(temp_.path()), (std::set<std::string>{"source.safetensors", leftover}));

  const Outcome later = spolia(arguments());
  EXPECT_EQ(later.exit_code, 0) << later.err;
  expect_contains(later.err, leftover);
  EXPECT_EQ(names_in(out_), (std::set<std::string>{"model.safetensors", kIndex}));
  EXPECT_EQ(names_in(temp_.path()), (std::set<std::string>{"source.safetensors", "out", leftover}));
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

/// Converts `count` tensors of `mebibytes` each within a budget, and looks at what that took.
void expect_within_budget(int count, int64_t mebibytes, int64_t budget_mebibytes) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source.safetensors", out = temp.path() / "out";
  make_large(source, count, mebibytes);
  const Outcome outcome = spolia(
      {"convert", source, out, "--to", "safetensors", "--memory", std::to_string(budget_mebibytes) + "MiB"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(spolia({"digest", out}).out, spolia({"digest", source}).out);
  constexpr int64_t kBytesAChunk = 150;
  if (!kSanitized) {
    EXPECT_LE(outcome.peak_resident_bytes, (64 + budget_mebibytes) * kMiB + count * kBytesAChunk);
  }
}

TEST(Memory, ManyTensorsInLittle) { expect_within_budget(75, 4, 16); }

TEST(Memory, OneTensorLargerThanTheBudget) { expect_within_budget(1, 200, 32); }

TEST(Memory, OtherWayRoundSlow) {
  expect_within_budget(75, 4, 32);
  expect_within_budget(1, 200, 16);
}

}  // namespace
}  // namespace spolia
