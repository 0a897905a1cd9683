// spolia convert as a stranger runs it: into every format, over older checkpoints, with and without checks.
#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "spolia/format/safetensors/test_files.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

const std::vector<std::string> kFormats = {"safetensors", "dcp", "spolia"};
const std::vector<std::string> kFormatsWithValues = {"dcp", "spolia"};

Json digests(const fs::path& path) { return json_of({"digest", "--json", path}); }
Json inspected(const fs::path& path) { return json_of({"inspect", "--json", path}); }

/// The values as inspect prints them as text, which tells more of objects than JSON does.
std::string values_text(const fs::path& path) {
  const std::string text = spolia({"inspect", "--quiet", path}).out;
  const size_t values = text.find("\nvalue\n");
  return values == std::string::npos ? "" : text.substr(values);
}

class ConvertCommand : public testing::Test {
 protected:
  fs::path at(const std::string& name) const { return temp_.path() / name; }

  Outcome convert(const fs::path& source, const fs::path& out, const std::string& format,
                  const std::vector<std::string>& options = {},
                  const std::function<void()>& in_child = {}) const {
    std::vector<std::string> arguments = {"convert", source, out, "--to", format};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return spolia(arguments, in_child);
  }

  /// The same where nothing may go wrong, without waiting for the disk: what was made.
  fs::path made(const fs::path& source, const std::string& name, const std::string& format,
                std::vector<std::string> options = {}) const {
    options.push_back("--no-sync");
    const Outcome outcome = convert(source, at(name), format, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return at(name);
  }

  std::set<std::string> here() const { return names_in(temp_.path()); }

  const TempFolder temp_;
  const fs::path out_ = at("out");
};

// ---- formats

TEST_F(ConvertCommand, TurnsEveryFormatIntoEveryOther) {
  const Json tensors = expected_tensors("torch-2.14/fsdp2-4");
  const Json values = inspected(fsdp())["values"];
  const std::string text = values_text(fsdp());
  ASSERT_EQ(values.size(), 14u);
  for (const std::string& from : kFormats) {
    const fs::path source = made(fsdp(), from, from);
    for (const std::string& to : kFormats) {
      SCOPED_TRACE(from + " to " + to);
      const Outcome outcome = convert(source, at(from + "-" + to), to, {"--json"});
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_EQ(Json::parse(outcome.out)["left_out"].size(), to == "safetensors" && from != to ? 14u : 0u);

      const fs::path result = at(from + "-" + to);
      EXPECT_EQ(digests(result), tensors);
      const Json shown = inspected(result);
      EXPECT_EQ(shown["format"], to);
      EXPECT_TRUE(std::ranges::all_of(shown["tensors"], [](const Json& t) { return t["chunks"] == 1; }));
      const bool has_values = from != "safetensors" && to != "safetensors";
      EXPECT_EQ(shown["values"], has_values ? values : Json::object());
      EXPECT_EQ(values_text(result), has_values ? text : "");
    }
  }
}

TEST_F(ConvertCommand, KeepsEveryKindOfTensorAndValueThroughDcpAndSpolia) {
  for (const std::string name :
       {"torch-2.14/dtypes-1", "torch-2.14/nested-1", "torch-2.14/muon-1", "torch-2.14/rank-files-2"}) {
    SCOPED_TRACE(name);
    const TempFolder temp;
    fs::path source = checkpoint(name);
    const Json tensors = expected_tensors(name), values = inspected(source)["values"];
    const std::string text = values_text(source);
    for (const std::string step : {"1-dcp", "2-spolia", "3-dcp"}) {
      const Outcome outcome = convert(source, temp.path() / step, step.substr(2), {"--no-sync"});
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_EQ(outcome.err, "") << step;
      source = temp.path() / step;
    }
    EXPECT_EQ(digests(source), tensors);
    EXPECT_EQ(inspected(source)["values"], values);
    EXPECT_EQ(values_text(source), text);
    EXPECT_EQ(spolia({"diff", checkpoint(name), source}).exit_code, 0);
  }
}

TEST_F(ConvertCommand, WritesTheSameBytesWithAnyNumberOfThreadsAndAnyMemory) {
  const std::string rules = "mesh = 2x2; *: [shard(0), replicate]; *.weight: [shard(0), shard(-1)]";
  for (const std::string& format : kFormats) {
    std::vector<std::string> few = {"--threads", "1", "--memory", "16MiB"}, many = {"--threads", "7"};
    for (auto* options : {&few, &many}) {
      if (format != "safetensors") options->insert(options->end(), {"--layout", rules});
    }
    const fs::path a = made(fsdp(), format + " by few", format, few),
                   b = made(fsdp(), format + " by many", format, many);
    EXPECT_EQ(names_in(a), names_in(b));
    for (const std::string& file : names_in(a))
      EXPECT_TRUE(read_file(a / file) == read_file(b / file)) << file;
  }
}

TEST_F(ConvertCommand, SpreadsTensorsOverFilesOfALimitedSize) {
  for (const auto& [format, files] :
       {std::pair<std::string, std::string>("dcp", "__?_0.distcp"), {"spolia", "data-*.safetensors"}}) {
    SCOPED_TRACE(format);
    const fs::path out = made(fsdp(), format, format, {"--max-shard-size", "100KB"});
    std::map<std::string, int64_t> bytes;
    const Json shown = json_of({"inspect", "--json", "--chunks", out});
    for (const Json& tensor : shown["tensors"]) {
      EXPECT_EQ(tensor["chunks"], 1);
      bytes[tensor["chunk_list"][0]["file"]] += tensor["bytes"].get<int64_t>();
    }
    EXPECT_GT(bytes.size(), 5u);
    EXPECT_TRUE(std::ranges::all_of(bytes, [](const auto& file) { return file.second <= 100'000; }));
    EXPECT_EQ(digests(out), expected_tensors("torch-2.14/fsdp2-4"));
  }
}

TEST_F(ConvertCommand, SelectsRenamesAndCastsIntoEveryFormat) {
  const std::vector<std::string> options = {"--root",   "model",        "--drop", "*norm*",         "--dtype",
                                            "bfloat16", "--add-prefix", "new.",   "--strip-prefix", "model."};
  const Json expected = digests(made(fsdp(), "safetensors", "safetensors", options));
  EXPECT_TRUE(expected.contains("new.embed_tokens.weight"));
  for (const std::string& format : kFormatsWithValues) {
    const fs::path out = made(fsdp(), format, format, options);
    EXPECT_EQ(digests(out), expected);
    EXPECT_EQ(inspected(out)["values"], Json::object());
  }
}

TEST_F(ConvertCommand, NestedKeysStayRoots) {
  const Json model = digests(made(fsdp(), "model", "safetensors", {"--root", "model"}));
  fs::path source = fsdp();
  for (const std::string& format : kFormatsWithValues) {
    source = made(source, format, format);
    EXPECT_EQ(digests(made(source, "model of " + format, "safetensors", {"--root", "model"})), model);
    const fs::path optimizer = made(source, "optimizer of " + format, format, {"--root", "optimizer"});
    EXPECT_EQ(inspected(optimizer)["values"].size(), 12u);
    EXPECT_TRUE(inspected(optimizer)["values"].contains("param_groups.0.betas"));
  }
}

TEST_F(ConvertCommand, KeepsStrangeNamesThroughEveryFormat) {
  const std::vector<std::string> names = {"a",
                                          "a.b",
                                          "a.0",
                                          "..",
                                          "../../etc/passwd",
                                          "/absolute/path",
                                          "a/b/../../c",
                                          ".metadata",
                                          "__0_0.distcp",
                                          "spolia.json",
                                          "a#1",
                                          "tensor 1",
                                          "$text",
                                          "ключ 模型 🙂",
                                          " spaces ",
                                          "red \x1b[31m\nline",
                                          "quo\"ted\\",
                                          std::string("nul\0nul", 7),
                                          std::string(4096, 'L')};
  std::vector<TestTensor> tensors;
  for (size_t i = 0; i < names.size(); ++i) {
    tensors.push_back({names[i], DType::kFloat32, {4, 3}, static_cast<char>('a' + i)});
  }
  write_file(at("source.safetensors"), safetensors_bytes(tensors));
  const Json expected = digests(at("source.safetensors"));
  ASSERT_EQ(expected.size(), names.size());

  fs::path source = at("source.safetensors");
  for (const std::string format : {"dcp", "spolia", "dcp", "safetensors", "spolia", "safetensors"}) {
    const std::string name = std::to_string(here().size()) + format;
    // In parts, where the format has such: then a tensor has several names in a file of Spolia's.
    source =
        made(source, name, format,
             format == "safetensors" ? std::vector<std::string>()
                                     : std::vector<std::string>{"--layout", "mesh = 2; *: [strided(0, 2)]"});
    EXPECT_EQ(digests(source), expected) << name;
    EXPECT_EQ(spolia({"verify", source}).exit_code, 0) << name;
  }
  EXPECT_EQ(here().size(), 7u) << "something was written elsewhere";
}

// ---- where something is already

TEST_F(ConvertCommand, OverwritesACheckpointOfAnyFormat) {
  made(checkpoint("torch-2.14/nested-1"), "out", "safetensors");
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{"--overwrite"}, {"--overwrite", "--non-atomic"}}) {
    for (const std::string format : {"safetensors", "dcp", "spolia"}) {
      SCOPED_TRACE(format + " " + options.back());
      const auto before = snapshot(out_);
      expect_refused(convert(fsdp(), out_, format), {"exists already"});
      EXPECT_EQ(snapshot(out_), before);

      const Outcome outcome = convert(fsdp(), out_, format, options);
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_EQ(inspected(out_)["format"], format);
      EXPECT_EQ(digests(out_), expected_tensors("torch-2.14/fsdp2-4"));
      EXPECT_EQ(here(), std::set<std::string>{"out"});
    }
  }
}

TEST_F(ConvertCommand, OverwritesAnEmptyFolderAndNothing) {
  for (const bool is_there : {false, true}) {
    if (is_there) fs::create_directory(out_);
    made(checkpoint("torch-2.14/nested-1"), "out", "spolia", {"--overwrite"});
    EXPECT_EQ(digests(out_), expected_tensors("torch-2.14/nested-1"));
    fs::remove_all(out_);
  }
}

TEST_F(ConvertCommand, OverwritesNothingElse) {
  const fs::path source = checkpoint("torch-2.14/nested-1");
  const fs::path old = made(source, "old", "dcp");
  fs::create_symlink("old", at("link"));
  write_file(at("file"), "dear");
  copy_checkpoint(old, at("with-notes"));
  write_file(at("with-notes/notes.txt"), "dear");
  copy_checkpoint(old, at("with-folder"));
  fs::create_directory(at("with-folder/logs"));

  const auto before = snapshot(temp_.path());
  const auto names = here();
  const std::map<std::string, std::vector<std::string>> refusals = {
      {"link", {"link", "symbolic link"}},         {"file", {"file", "no folder"}},
      {"with-notes", {"with-notes", "notes.txt"}}, {"with-folder", {"with-folder", "logs"}},
      {"none/out", {"there is no folder"}},
  };
  for (const auto& [destination, reasons] : refusals) {
    for (const std::string& format : kFormats) {
      for (const std::vector<std::string>& options : std::vector<std::vector<std::string>>{
               {"--overwrite"}, {"--overwrite", "--non-atomic"}, {"--overwrite", "--dry-run"}}) {
        SCOPED_TRACE(destination + " as " + format + " " + options.back());
        expect_refused(convert(source, at(destination), format, options), reasons);
      }
    }
  }
  // Nor what it reads.
  expect_refused(convert(old, old, "spolia", {"--overwrite"}), {"old", "only read"});
  expect_refused(convert(old, at("link"), "spolia", {"--overwrite"}), {"link", "only read"});
  expect_refused(convert(old, temp_.path(), "spolia", {"--overwrite"}), {"only read"});
  EXPECT_EQ(snapshot(temp_.path()), before);
  EXPECT_EQ(here(), names);
}

TEST_F(ConvertCommand, WhatFailsLeavesTheOldOneAsItWas) {
  const fs::path source = made(fsdp(), "source", "spolia");
  flip_bit(source / "data-00000.safetensors", -1);
  made(checkpoint("torch-2.14/nested-1"), "out", "dcp");
  const auto before = snapshot(out_);
  for (const std::string& format : kFormats) {
    for (const std::vector<std::string>& options :
         std::vector<std::vector<std::string>>{{"--overwrite"},
                                               {"--overwrite", "--non-atomic"},
                                               {"--overwrite", "--verify"},
                                               {"--overwrite", "--drop", "mistyped"}}) {
      expect_refused(convert(source, out_, format, options), {});
    }
  }
  EXPECT_EQ(snapshot(out_), before);
  EXPECT_EQ(here(), (std::set<std::string>{"source", "out"}));
}

// ---- checks

TEST_F(ConvertCommand, ReadsBackWhatItWrote) {
  for (const std::string& format : kFormats) {
    const Outcome outcome = convert(fsdp(), at(format), format, {"--verify"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    expect_contains(outcome.out, "read back: every digest as it should be");
    EXPECT_EQ(digests(at(format)), expected_tensors("torch-2.14/fsdp2-4"));
    const Json report = Json::parse(
        convert(fsdp(), at(format), format, {"--verify", "--json", "--overwrite", "--dtype", "float16"}).out);
    EXPECT_EQ(report["read_back"], true);
  }
}

TEST_F(ConvertCommand, WithoutChecksTheBytesAreTheSame) {
  for (const std::string& format : kFormats) {
    SCOPED_TRACE(format);
    const Outcome outcome = convert(fsdp(), at(format), format, {"--no-verify", "--no-sync", "--json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json report = Json::parse(outcome.out);
    EXPECT_EQ(report["checksums_checked"], 0);
    EXPECT_EQ(report["read_back"], false);
    EXPECT_EQ(digests(at(format)), expected_tensors("torch-2.14/fsdp2-4"));
    expect_contains(spolia({"verify", at(format)}).out, "0 checksums right, 85 chunks carry none; 0 faults");
    // From there, with nothing to compare, the checked way works too.
    for (const std::string& to : kFormats) {
      EXPECT_EQ(digests(made(at(format), format + "-" + to, to)), expected_tensors("torch-2.14/fsdp2-4"));
    }
  }
  expect_contains(spolia({"verify", made(fsdp(), "checked", "spolia", {"--no-sync"})}).out,
                  "85 checksums right, 0 chunks carry none");
}

TEST_F(ConvertCommand, TwoWaysOfCheckingAreWrongUse) {
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{"--verify", "--no-verify"}, {"--non-atomic"}}) {
    const Outcome outcome = convert(fsdp(), out_, "spolia", options);
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_EQ(outcome.out, "");
    expect_contains(outcome.err, options[0]);
  }
  EXPECT_EQ(here(), std::set<std::string>{});
}

TEST_F(ConvertCommand, DamageIsSeenUnlessNobodyLooks) {
  const Json right = expected_tensors("torch-2.14/fsdp2-4");
  for (const std::string& from : kFormatsWithValues) {
    SCOPED_TRACE(from);
    const fs::path source = made(fsdp(), "source-" + from, from);
    const Json tensors = json_of({"inspect", "--json", "--chunks", source})["tensors"];
    const std::string name = "model.lm_head.weight";
    const Json& chunk = tensors[name]["chunk_list"][0];
    // The middle of what is stored lies in the elements, whatever stands around them.
    flip_bit(source / chunk["file"], chunk["offset"].get<int64_t>() + chunk["length"].get<int64_t>() / 2);
    for (const std::string& to : kFormats) {
      expect_refused(convert(source, out_, to), {name, "CRC-32"});
      const fs::path unseen = made(source, from + "-" + to, to, {"--no-verify"});
      const Json found = digests(unseen);
      ASSERT_EQ(found.size(), right.size());
      for (const auto& [tensor, digest] : found.items()) {
        EXPECT_EQ(digest == right[tensor], tensor != name) << tensor;
      }
    }
  }
  EXPECT_FALSE(fs::exists(out_));
}

// ---- what it says

TEST_F(ConvertCommand, DryRunPrintsThePlanOfEveryFormat) {
  const std::map<std::string, std::string> files = {
      {"safetensors", "model.safetensors"}, {"dcp", "__0_0.distcp"}, {"spolia", "data-00000.safetensors"}};
  for (const auto& [format, file] : files) {
    const Outcome text = convert(fsdp(), out_, format, {"--dry-run"});
    EXPECT_EQ(text.exit_code, 0) << text.err;
    expect_contains(text.out, file + "  float32  259x48  model.lm_head.weight <- model.lm_head.weight");
    EXPECT_EQ(text.err.find("14 values left out") != std::string::npos, format == "safetensors") << text.err;

    const Json plan = Json::parse(convert(fsdp(), out_, format, {"--dry-run", "--json"}).out);
    EXPECT_EQ(plan["tensors"].size(), 85u);
    EXPECT_EQ(plan["tensors"]["model.lm_head.weight"]["files"], Json{file});
    EXPECT_EQ(plan["bytes_written"], 794'396);
    EXPECT_EQ(plan["left_out"].size(), format == "safetensors" ? 14u : 0u);
    EXPECT_EQ(here(), std::set<std::string>{});
  }
  const Json plan = Json::parse(
      convert(fsdp(), out_, "dcp", {"--dry-run", "--json", "--layout", "mesh = 2; *: [shard(0)]"}).out);
  EXPECT_EQ(plan["tensors"]["model.lm_head.weight"]["files"],
            Json::parse(R"(["__0_0.distcp", "__1_0.distcp"])"));
  EXPECT_EQ(here(), std::set<std::string>{});
}

TEST_F(ConvertCommand, DryRunIsRefusedWhereTheConversionWouldBe) {
  const fs::path source = checkpoint("torch-2.14/nested-1");
  fs::create_directory(at("unwritable"));
  fs::permissions(at("unwritable"), fs::perms(0555));
  made(source, "out", "dcp");
  const auto before = snapshot(temp_.path());
  const auto names = here();
  for (const std::vector<std::string>& options : std::vector<std::vector<std::string>>{{}, {"--dry-run"}}) {
    expect_refused(convert(source, out_, "spolia", options), {"out", "exists already"});
    expect_refused(convert(source, at("none/out"), "spolia", options), {"there is no folder", "none"});
    expect_refused(convert(source, at("out/.."), "spolia", options), {"own name"});
    expect_refused(convert(source, at("unwritable/out"), "spolia", options, drop_privileges),
                   {"Permission denied"});
    expect_refused(convert(out_, out_ / "inside", "spolia", options), {"inside the source"});
  }
  EXPECT_EQ(convert(source, out_, "spolia", {"--dry-run", "--overwrite"}).exit_code, 0);
  EXPECT_EQ(convert(source, out_, "spolia", {"--dry-run", "--overwrite", "--non-atomic"}).exit_code, 0);
  EXPECT_EQ(snapshot(temp_.path()), before);
  EXPECT_EQ(here(), names);
}

TEST_F(ConvertCommand, ReportsInEveryFormat) {
  const std::map<std::string, std::string> files = {
      {"safetensors", "model.safetensors"}, {"dcp", "__0_0.distcp"}, {"spolia", "data-00000.safetensors"}};
  for (const auto& [format, file] : files) {
    const Outcome outcome = convert(fsdp(), at(format), format, {"--json"});
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_EQ(outcome.err, "");
    const Json report = Json::parse(outcome.out);
    EXPECT_EQ(report["tensors"], 85);
    EXPECT_EQ(report["files"], Json{file});
    EXPECT_EQ(report["bytes_written"], 794'396);
    EXPECT_GE(report["bytes_read"], 794'396);
    EXPECT_EQ(report["checksums_checked"], 274);
    EXPECT_GT(report["seconds"], 0);
    EXPECT_GT(report["peak_resident_bytes"], 0);
    EXPECT_EQ(report["notes"], Json::array());
    EXPECT_TRUE(report.contains("left_out") && report.contains("read_back"));

    const Outcome quiet = convert(fsdp(), at("quiet-" + format), format, {"--quiet", "--verify"});
    EXPECT_EQ(quiet.exit_code, 0);
    EXPECT_EQ(quiet.out + quiet.err, "");
  }
}

TEST_F(ConvertCommand, TellsOfWhatAKilledRunLeft) {
  fs::create_directory(at("out.partial-1"));
  const Outcome outcome = convert(checkpoint("torch-2.14/nested-1"), out_, "spolia");
  EXPECT_EQ(outcome.exit_code, 0);
  expect_contains(outcome.err, "out.partial-1");
}

// ---- many tensors

TEST_F(ConvertCommand, HundredThousandTensorsSlow) {
  constexpr int kCount = 100'000;
  std::vector<TestTensor> tensors;
  for (int i = 0; i < kCount; ++i) {
    tensors.push_back(
        {"layers." + std::to_string(i) + ".weight", DType::kFloat32, {32, 32}, static_cast<char>(i % 251)});
  }
  const fs::path source = at("source.safetensors");
  write_file(source, safetensors_bytes(tensors));
  const std::string expected = spolia({"digest", source}).out;
  ASSERT_EQ(lines_of(expected).size(), static_cast<size_t>(kCount));

  const std::vector<std::string> parts = {"--layout", "mesh = 8; *: [shard(0)]", "--memory", "64MiB"};
  const fs::path whole = made(source, "whole", "dcp");
  EXPECT_TRUE(spolia({"digest", whole}).out == expected);
  const fs::path cut = made(whole, "cut", "spolia", parts);
  EXPECT_TRUE(spolia({"digest", cut}).out == expected);
  fs::remove_all(whole);
  const fs::path again = made(cut, "again", "dcp", parts);
  EXPECT_TRUE(spolia({"digest", again}).out == expected);
  const fs::path back = made(again, "back", "spolia");
  EXPECT_TRUE(spolia({"digest", back}).out == expected);
  EXPECT_EQ(spolia({"verify", back}).exit_code, 0);
}

}  // namespace
}  // namespace spolia
