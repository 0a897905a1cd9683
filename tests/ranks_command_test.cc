// spolia convert --ranks, and under mpirun: what several ranks write together is what one writes.
#include <cstdlib>
#include <map>

#include <gtest/gtest.h>

#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

Json digests(const fs::path& path) { return json_of({"digest", "--json", path}); }

fs::path source_of(const std::string& name) {
  const fs::path folder = fs::path(SPOLIA_TEST_DATA) / name;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("checkpoint")) return entry.path();
  }
  return {};
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : names_in(folder)) files[name] = read_file(folder / name);
  return files;
}

class RanksCommand : public testing::Test {
 protected:
  fs::path at(const std::string& name) const { return temp_.path() / name; }

  Outcome convert(const fs::path& source, const std::string& out, const std::string& format,
                  const std::vector<std::string>& options) const {
    std::vector<std::string> arguments = {"convert", source, at(out), "--to", format, "--no-sync"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return spolia(arguments);
  }

  fs::path made(const fs::path& source, const std::string& out, const std::string& format,
                const std::vector<std::string>& options) const {
    const Outcome outcome = convert(source, out, format, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return at(out);
  }

  const TempFolder temp_;
};

TEST_F(RanksCommand, WriteWhatOneRankWrites) {
  for (const std::string name : {"torch-2.14/fsdp2-4", "torch-2.14/uneven-5", "torch-2.14/hf-shards-3",
                                 "torch-2.14/rank-files-2", "torch-2.14/zstd-2", "torch-2.14/torch-save-1",
                                 "torch-2.14/muon-1", "torch-2.6/dtypes-1", "torch-2.6/nested-1"}) {
    const fs::path source = source_of(name);
    for (const std::string format : {"safetensors", "dcp", "spolia"}) {
      SCOPED_TRACE(name + " to " + format);
      // Complex tensors and others that safetensors cannot hold are refused alike.
      const Outcome alone = convert(source, "alone", format, {});
      if (alone.exit_code != 0) {
        expect_refused(convert(source, "together", format, {"--ranks", "3"}), {});
        EXPECT_FALSE(fs::exists(at("together")));
        continue;
      }
      const Json expected = digests(at("alone"));
      const Outcome one_values = spolia({"inspect", "--json", at("alone")});
      for (const std::string ranks : {"2", "3", "8"}) {
        const fs::path together = made(source, "together", format, {"--ranks", ranks});
        EXPECT_EQ(digests(together), expected) << ranks;
        EXPECT_EQ(Json::parse(spolia({"inspect", "--json", together}).out)["values"],
                  Json::parse(one_values.out)["values"]);
        EXPECT_EQ(spolia({"verify", "--quiet", together}).exit_code, 0) << ranks;
        fs::remove_all(together);
      }
      fs::remove_all(at("alone"));
    }
  }
}

TEST_F(RanksCommand, GiveTheSameBytesForALayout) {
  const std::string layout = "mesh = 2x3 (replica, shard); *: [shard(0)] over (shard)";
  for (const std::string format : {"dcp", "spolia"}) {
    const auto expected = files_of(made(fsdp(), format, format, {"--layout", layout}));
    for (const std::string ranks : {"2", "5", "7", "16"}) {
      const auto found = files_of(
          made(fsdp(), format + ranks, format, {"--layout", layout, "--ranks", ranks, "--threads", "2"}));
      EXPECT_TRUE(found == expected) << format << " on " << ranks;
    }
  }
}

TEST_F(RanksCommand, WriteAtLeastAFileEach) {
  const fs::path out = made(fsdp(), "out", "safetensors", {"--ranks", "4", "--root", "model"});
  int files = 0;
  for (const std::string& name : names_in(out)) files += name.ends_with(".safetensors");
  EXPECT_GE(files, 4);
}

TEST_F(RanksCommand, ShareTheMemory) {
  expect_refused(convert(fsdp(), "out", "spolia", {"--ranks", "4", "--memory", "32MiB"}),
                 {"--memory", "4 ranks", "64"});
  EXPECT_TRUE(names_in(temp_.path()).empty());
  made(fsdp(), "out", "spolia", {"--ranks", "4", "--memory", "64MiB"});
  EXPECT_NE(convert(fsdp(), "none", "spolia", {"--ranks", "0"}).exit_code, 0);
  EXPECT_NE(convert(fsdp(), "none", "spolia", {"--ranks", "many"}).exit_code, 0);
  EXPECT_FALSE(fs::exists(at("none")));
}

TEST_F(RanksCommand, ReportOnce) {
  const Outcome outcome = convert(fsdp(), "out", "dcp", {"--ranks", "3", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json report = Json::parse(outcome.out),
             alone = Json::parse(convert(fsdp(), "alone", "dcp", {"--json"}).out);
  for (const char* key : {"tensors", "bytes_written", "left_out"}) EXPECT_EQ(report[key], alone[key]) << key;
  EXPECT_GE(report["files"].size(), 3u);
  const std::vector<std::string> lines = lines_of(convert(fsdp(), "again", "spolia", {"--ranks", "3"}).out);
  EXPECT_EQ(lines.size(), 1u);
}

TEST_F(RanksCommand, ReplaceOnlyWhereThatIsAskedFor) {
  const fs::path out = made(fsdp(), "out", "spolia", {"--ranks", "2"});
  const Snapshot before = snapshot(out);
  expect_refused(convert(fsdp(), "out", "dcp", {"--ranks", "3"}), {"out"});
  EXPECT_EQ(snapshot(out), before);
  made(fsdp(), "out", "dcp", {"--ranks", "3", "--overwrite", "--verify"});
  EXPECT_TRUE(fs::exists(out / ".metadata"));
  EXPECT_EQ(digests(out), expected_tensors("torch-2.14/fsdp2-4"));
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"out"});
}

TEST_F(RanksCommand, ADamagedSourceIsNotPublished) {
  const fs::path good = made(fsdp(), "good", "spolia", {"--ranks", "3"});
  for (const std::string& name : names_in(good)) {
    if (name.ends_with(".safetensors")) flip_bit(good / name, -1);
  }
  const Outcome outcome = convert(good, "out", "dcp", {"--ranks", "3"});
  expect_refused(outcome, {"rank"});
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"good"});
}

TEST_F(RanksCommand, DryRunPlansForThem) {
  const Outcome outcome = convert(fsdp(), "out", "spolia", {"--ranks", "4", "--dry-run"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(names_in(temp_.path()).empty());
}

#ifdef SPOLIA_MPIEXEC

/// A shell's command line, to its end: its exit code, and what it printed, in one text.
std::pair<int, std::string> shell(const std::string& line, const fs::path& printed) {
  const int status = std::system(fmt::format("{} >{} 2>&1", line, printed.string()).c_str());
  return {status, read_file(printed)};
}

std::string under_mpi(int ranks, const std::string& arguments) {
  return fmt::format(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
      "OMPI_MCA_btl_vader_single_copy_mechanism=none SPOLIA_PLUGIN_PATH={} timeout 120 {} -n {} {} {}",
      SPOLIA_PLUGINS, SPOLIA_MPIEXEC, ranks, SPOLIA_COMMAND, arguments);
}

TEST_F(RanksCommand, MayBeProcesses) {
  const Json expected = expected_tensors("torch-2.14/fsdp2-4");
  const std::string layout = "mesh = 3; *: [shard(0)]";
  for (const std::string format : {"dcp", "spolia"}) {
    const auto alone = files_of(made(fsdp(), "alone-" + format, format, {"--layout", layout}));
    const fs::path out = at("out-" + format);
    const auto [status, printed] =
        shell(under_mpi(3, fmt::format("convert {} {} --to {} --no-sync --layout '{}' --json",
                                       fsdp().string(), out.string(), format, layout)),
              at("printed"));
    ASSERT_EQ(status, 0) << printed;
    EXPECT_EQ(Json::parse(printed)["tensors"], expected.size()) << printed;  // by one rank alone
    EXPECT_EQ(digests(out), expected);
    EXPECT_TRUE(files_of(out) == alone);
  }
  const std::string again =
      fmt::format("convert {} {} --to spolia --no-sync", fsdp().string(), at("out-dcp").string());
  auto [status, printed] = shell(under_mpi(2, again), at("printed"));
  EXPECT_NE(status, 0);
  EXPECT_NE(printed.find("out-dcp"), std::string::npos) << printed;
  std::tie(status, printed) = shell(under_mpi(2, again + " --ranks 3"), at("printed"));
  EXPECT_NE(status, 0);
  EXPECT_NE(printed.find("mpirun has started 2 processes"), std::string::npos) << printed;
}

TEST_F(RanksCommand, StreamAsThreadsDo) {
  write_file(at("map"),
             "model.layers.0.w^T -> turned\n_ -> model.lm_head.weight\n_ -> model.model.norm.weight\n");
  const std::string arguments =
      fmt::format("stream {} --digest --map {} --base {}", source_of("torch-2.14/hf-shards-3").string(),
                  at("map").string(), fsdp().string());
  const Outcome threads = spolia({"stream", source_of("torch-2.14/hf-shards-3"), "--digest", "--map",
                                  at("map"), "--base", fsdp(), "--ranks", "3"});
  EXPECT_EQ(lines_of(threads.out).size(), 7u) << threads.err;
  for (const std::string how : {"", " --mesh 3x1"}) {
    const auto [status, printed] = shell(under_mpi(3, arguments + how), at("printed"));
    EXPECT_EQ(status, 0) << printed;
    EXPECT_EQ(printed, threads.out);
  }
  const auto [status, printed] = shell(
      under_mpi(2, fmt::format("stream {} --map {}", fsdp().string(), at("map").string())), at("printed"));
  EXPECT_NE(status, 0);
  EXPECT_NE(printed.find("\"model.layers.0.w\""), std::string::npos) << printed;
}

#else

TEST_F(RanksCommand, MayBeProcesses) {
  GTEST_SKIP() << "MPI is not found, SPOLIA_MPI is OFF, or a sanitizer is on";
}

#endif

}  // namespace
}  // namespace spolia
