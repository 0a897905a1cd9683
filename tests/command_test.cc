// The command as its contract has it: what each verb prints, writes, refuses, and exits with.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "spolia/base/hash.h"
#include "spolia/format/safetensors/test_files.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

/// The JSON at the front of a safetensors file.
Json safetensors_header(const fs::path& path) {
  const std::string bytes = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  return Json::parse(bytes.substr(sizeof length, length));
}

// ---- every checkpoint that PyTorch wrote

std::vector<fs::path> all_cases() {
  std::set<fs::path> cases;
  for (const auto& version : fs::directory_iterator(SPOLIA_TEST_DATA)) {
    if (!version.path().filename().string().starts_with("torch-")) continue;
    for (const auto& entry : fs::directory_iterator(version)) cases.insert(entry.path());
  }
  return {cases.begin(), cases.end()};
}

class RealCheckpoint : public testing::TestWithParam<fs::path> {
 protected:
  const fs::path path_ = GetParam() / "checkpoint";
  const Json expected_ = Json::parse(read_file(GetParam() / "expected.json"));
};

TEST_P(RealCheckpoint, IsInspectedAsJson) {
  const Json shown = json_of({"inspect", "--json", path_});
  EXPECT_EQ(shown.size(), 3u);
  EXPECT_TRUE(shown["format"].is_string());
  ASSERT_EQ(shown["tensors"].size(), expected_["tensors"].size());
  for (const auto& [name, tensor] : shown["tensors"].items()) {
    const Json& expected = expected_["tensors"].at(name);
    EXPECT_EQ(tensor.size(), 4u);
    EXPECT_EQ(tensor["dtype"], expected["dtype"]) << name;
    EXPECT_EQ(tensor["shape"], expected["shape"]) << name;
    EXPECT_GE(tensor["chunks"], 1) << name;
    int64_t elements = 1;
    for (const int64_t size : expected["shape"]) elements *= size;
    const DType dtype = *dtype_from_name(expected["dtype"].get<std::string>());
    EXPECT_EQ(tensor["bytes"], elements * element_bytes(dtype)) << name;
  }
  Json values = Json::object();
  for (const auto& [name, value] : expected_["values"].items()) {
    values[name] = value.contains("json") ? value["json"] : value;
  }
  EXPECT_EQ(shown["values"], values);
}

TEST_P(RealCheckpoint, ListsItsChunks) {
  const Json shown = json_of({"inspect", "--json", "--chunks", path_});
  for (const auto& [name, tensor] : shown["tensors"].items()) {
    EXPECT_EQ(tensor["chunk_list"].size(), tensor["chunks"]) << name;
    for (const Json& chunk : tensor["chunk_list"]) {
      EXPECT_EQ(chunk["sizes"].size(), tensor["shape"].size()) << name;
      const fs::path file = fs::is_directory(path_) ? path_ / chunk["file"] : path_;
      EXPECT_LE(chunk["offset"].get<uint64_t>() + chunk["length"].get<uint64_t>(), fs::file_size(file))
          << name;
    }
  }
}

TEST_P(RealCheckpoint, IsInspectedAsText) {
  const Outcome outcome = spolia({"inspect", "--chunks", path_});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const auto& [name, tensor] : expected_["tensors"].items()) {
    expect_contains(outcome.out, "  " + name + "\n");
  }
  for (const auto& [name, value] : expected_["values"].items()) {
    expect_contains(outcome.out, "\n" + name + " = ");
  }
  expect_contains(outcome.out, std::to_string(expected_["tensors"].size()) + " tensors");
}

TEST_P(RealCheckpoint, DigestsAreThoseOfPyTorch) {
  EXPECT_EQ(json_of({"digest", "--json", path_}), expected_["tensors"]);

  std::string text;
  for (const auto& [name, tensor] : expected_["tensors"].items()) {  // sorted by the bytes of the names
    std::string shape;
    for (const int64_t size : tensor["shape"]) shape += (shape.empty() ? "" : "x") + std::to_string(size);
    text += tensor["sha256"].get<std::string>() + "  " + tensor["dtype"].get<std::string>() + "  " +
            (shape.empty() ? "scalar" : shape) + "  " + name + "\n";
  }
  EXPECT_EQ(spolia({"digest", path_}).out, text);
}

TEST_P(RealCheckpoint, IsSound) {
  const Json verdict = json_of({"verify", "--json", path_});
  EXPECT_EQ(verdict["faults"], Json::array());
  EXPECT_EQ(verdict["tensors"], expected_["tensors"].size());
  EXPECT_EQ(verdict["values"], expected_["values"].size());

  const Outcome outcome = spolia({"verify", path_});
  EXPECT_EQ(outcome.exit_code, 0);
  expect_contains(outcome.out, " 0 faults");
  EXPECT_EQ(spolia({"verify", "--quiet", path_}).out, "");
}

TEST_P(RealCheckpoint, SurvivesEveryVerbUntouched) {
  const TempFolder temp;
  const auto before = snapshot(path_);
  Json expected = expected_["tensors"];
  std::vector<std::string> arguments = {"convert",  path_,   temp.path() / "out", "--to", "safetensors",
                                        "--memory", "16MiB", "--max-shard-size",  "100KB"};
  for (const auto& [name, tensor] : expected_["tensors"].items()) {
    if (!info(*dtype_from_name(tensor["dtype"].get<std::string>())).safetensors.empty()) continue;
    arguments.insert(arguments.end(), {"--drop", name});
    expected.erase(name);
  }
  const Outcome outcome = spolia(arguments);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(json_of({"digest", "--json", temp.path() / "out"}), expected);
  for (const char* verb : {"inspect", "digest", "verify"}) spolia({verb, path_});
  EXPECT_EQ(snapshot(path_), before);
}

INSTANTIATE_TEST_SUITE_P(ByPyTorch, RealCheckpoint, testing::ValuesIn(all_cases()), [](const auto& param) {
  std::string name = param.param.parent_path().filename().string() + "_" + param.param.filename().string();
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

TEST(Source, IsReadWithoutTheRightToWrite) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source";
  copy_checkpoint(fsdp(), source);
  for (const auto& entry : fs::directory_iterator(source)) fs::permissions(entry, fs::perms(0444));
  fs::permissions(source, fs::perms(0555));
  for (const char* verb : {"inspect", "digest", "verify"}) {
    EXPECT_EQ(spolia({verb, source}, drop_privileges).exit_code, 0) << verb;
  }
  const fs::path out = temp.path() / "out";
  EXPECT_EQ(spolia({"convert", source, out, "--to", "safetensors"}, drop_privileges).exit_code, 0);
  fs::permissions(source, fs::perms(0755));
}

// ---- verify

TEST(Verify, NamesEachFault) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source";
  copy_checkpoint(fsdp(), source);
  const Json chunks = json_of({"inspect", "--json", "--chunks", source})["tensors"];
  const auto chunk_in = [&](const std::string& tensor, const std::string& file) {
    for (const Json& chunk : chunks[tensor]["chunk_list"]) {
      if (chunk["file"] == file) return chunk;
    }
    throw std::logic_error("no chunk of " + tensor + " in " + file);
  };

  const std::string flipped = "model.lm_head.weight", cut = "model.model.norm.weight",
                    lost = "model.model.layers.0.mlp.up_proj.weight";
  std::string bytes = read_file(source / "__1_0.distcp");
  const Json chunk = chunk_in(flipped, "__1_0.distcp");
  const size_t data = bytes.find("data/0", chunk["offset"].get<size_t>());  // the record that holds elements
  ASSERT_LT(data, chunk["offset"].get<size_t>() + chunk["length"].get<size_t>());
  bytes[(data + 6 + 63) / 64 * 64 + 100] ^= 1;
  write_file(source / "__1_0.distcp", bytes);
  fs::resize_file(source / "__2_0.distcp", chunk_in(cut, "__2_0.distcp")["offset"].get<size_t>() + 10);
  fs::remove(source / "__3_0.distcp");
  write_file(source / "__9_0.distcp", "of an earlier save by more ranks");

  const Outcome outcome = spolia({"verify", source});
  EXPECT_EQ(outcome.exit_code, 1);
  const std::vector<std::string> lines = lines_of(outcome.out);
  const auto is_named = [&](const std::string& tensor, const std::string& file, const std::string& reason) {
    return std::ranges::any_of(lines, [&](const std::string& line) {
      return line.starts_with("FAULT ") && line.find('"' + tensor + '"') != std::string::npos &&
             line.find(file) != std::string::npos && line.find(reason) != std::string::npos;
    });
  };
  EXPECT_TRUE(is_named(flipped, "__1_0.distcp", "CRC-32")) << outcome.out;
  EXPECT_TRUE(is_named(cut, "__2_0.distcp", "the file has only")) << outcome.out;
  EXPECT_TRUE(is_named(lost, "__3_0.distcp", "No such file")) << outcome.out;
  EXPECT_TRUE(std::ranges::any_of(lines, [](const std::string& line) {
    return line.find("__9_0.distcp") != std::string::npos && line.find("refers to") != std::string::npos;
  })) << outcome.out;

  const Outcome json = spolia({"verify", "--json", source});
  EXPECT_EQ(json.exit_code, 1);
  EXPECT_EQ(Json::parse(json.out)["faults"].size(), lines.size() - 1);
  // Every chunk that lay in the lost file is a fault of its own.
  size_t in_lost_file = 0;
  for (const Json& tensor : chunks) {
    in_lost_file += std::ranges::count(tensor["chunk_list"], "__3_0.distcp",
                                       [](const Json& c) { return c["file"].get<std::string>(); });
  }
  EXPECT_GT(in_lost_file, 50u);
  EXPECT_GT(lines.size(), in_lost_file + 2);

  // The other verbs refuse what they would have to use, and leave nothing.
  expect_refused(spolia({"digest", source}), {"distcp"});
  expect_refused(spolia({"convert", source, temp.path() / "out", "--to", "safetensors"}), {"distcp"});
  EXPECT_EQ(names_in(temp.path()), std::set<std::string>{"source"});
}

TEST(Verify, CannotJudgeWhatHasNoCatalog) {
  const TempFolder temp;
  const fs::path source = temp.path() / "source";
  copy_checkpoint(fsdp(), source);
  fs::resize_file(source / ".metadata", 300);
  expect_refused(spolia({"verify", source}), {".metadata", "interrupted"});
  fs::remove(source / ".metadata");
  expect_refused(spolia({"verify", source}), {"no .metadata", "interrupted"});

  const fs::path file = temp.path() / "short.safetensors";
  fs::copy_file(checkpoint("torch-2.14/safetensors-1") / "model.safetensors", file);
  fs::permissions(file, fs::perms(0644));
  fs::resize_file(file, fs::file_size(file) - 1);
  expect_refused(spolia({"verify", file}), {"short.safetensors"});
}

// ---- convert

class Convert : public testing::Test {
 protected:
  Outcome convert(const fs::path& source, std::vector<std::string> options = {},
                  const std::function<void()>& in_child = {}) const {
    options.insert(options.begin(), {"convert", source, out_, "--to", "safetensors"});
    return spolia(options, in_child);
  }
  Json digests() const { return json_of({"digest", "--json", out_}); }
  void expect_nothing_written() const { EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{}); }

  const TempFolder temp_;
  const fs::path out_ = temp_.path() / "out";
};

TEST_F(Convert, WritesFilesThatTheIndexDescribes) {
  const Outcome outcome = convert(fsdp(), {"--max-shard-size", "100KB", "--memory", "16MiB"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_contains(outcome.out, "85 tensors");
  expect_contains(outcome.out, "274 checksums right");
  expect_contains(outcome.err, "14 values left out");

  const Json index = Json::parse(read_file(out_ / "model.safetensors.index.json"));
  std::set<std::string> files = names_in(out_);
  files.erase("model.safetensors.index.json");
  ASSERT_GT(files.size(), 5u);
  int64_t total = 0;
  size_t number = 0, tensors = 0;
  for (const std::string& file : files) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", ++number, files.size());
    EXPECT_EQ(file, name);
    int64_t in_file = 0;
    const Json header = safetensors_header(out_ / file);
    for (const auto& [tensor, entry] : header.items()) {
      if (tensor == "__metadata__") continue;
      EXPECT_EQ(index["weight_map"].at(tensor), file);
      in_file += entry["data_offsets"][1].get<int64_t>() - entry["data_offsets"][0].get<int64_t>();
      ++tensors;
    }
    EXPECT_LE(in_file, 100'000);
    total += in_file;
  }
  EXPECT_EQ(index["weight_map"].size(), tensors);
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(digests(), expected_tensors("torch-2.14/fsdp2-4"));
}

TEST_F(Convert, GivesATensorLargerThanAFileOneOfItsOwn) {
  EXPECT_EQ(convert(fsdp(), {"--select", "model.lm_head.*", "--select", "model.model.norm.weight",
                             "--max-shard-size", "1KiB"})
                .exit_code,
            0);
  EXPECT_EQ(names_in(out_),
            (std::set<std::string>{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                   "model.safetensors.index.json"}));
}

TEST_F(Convert, SelectsAndRenames) {
  EXPECT_EQ(convert(fsdp(), {"--root", "model", "--select", "model.*", "--drop", "*norm*", "--drop",
                             "*.seen_tokens", "--strip-prefix", "model.", "--add-prefix", "new/"})
                .exit_code,
            0);
  const Json all = expected_tensors("torch-2.14/fsdp2-4");
  Json expected = Json::object();
  for (const auto& [name, tensor] : all.items()) {
    if (!name.starts_with("model.") || name.find("norm") != std::string::npos ||
        name.ends_with(".seen_tokens"))
      continue;
    const std::string below = name.substr(6);
    expected["new/" + (below.starts_with("model.") ? below.substr(6) : below)] = tensor;
  }
  EXPECT_EQ(digests(), expected);
}

TEST_F(Convert, TellsOfLeftOutValuesBelowTheRootOnly) {
  EXPECT_EQ(convert(fsdp(), {"--root", "model"}).err, "");
  fs::remove_all(out_);
  const Outcome outcome = convert(fsdp(), {"--root", "optimizer", "--json"});
  const Json left_out = Json::parse(outcome.out)["left_out"];
  EXPECT_EQ(left_out.size(), 12u);
  for (const std::string name : left_out) EXPECT_TRUE(name.starts_with("param_groups.")) << name;
}

TEST_F(Convert, CastsFloatsOnly) {
  const std::vector<uint32_t> floats = {
      0x3f800000,  // 1
      0x3f808000,  // halfway between two: to the even one, below
      0x3f818000,  // halfway: to the even one, above
      0x3f808001,  // just above halfway
      0x7f7fffff,  // the largest: to infinity
      0xff800000,  // -infinity
      0x80000000,  // -0
      0x00000001,  // the smallest
  };
  const std::vector<uint16_t> expected = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x7f80, 0xff80, 0x8000, 0x0000};
  const fs::path source = temp_.path() / "source.safetensors";
  const Dims shape = {8};
  const std::vector<SafetensorsSpec> specs = {{"floats", DType::kFloat32, shape},
                                              {"numbers", DType::kInt32, shape}};
  std::string bytes = lay_out_safetensors(specs).header;
  const std::string numbers(reinterpret_cast<const char*>(floats.data()), floats.size() * sizeof floats[0]);
  write_file(source, bytes + numbers + numbers);

  EXPECT_EQ(convert(source, {"--dtype", "bfloat16"}).exit_code, 0);
  Sha256 rounded, same;
  rounded.update(std::as_bytes(std::span(expected)));
  same.update(bytes_of(numbers));
  EXPECT_EQ(digests(),
            (Json{{"floats", {{"dtype", "bfloat16"}, {"shape", {8}}, {"sha256", rounded.finish_hex()}}},
                  {"numbers", {{"dtype", "int32"}, {"shape", {8}}, {"sha256", same.finish_hex()}}}}));
}

TEST_F(Convert, RefusesDtypesThatSafetensorsLacks) {
  expect_refused(convert(checkpoint("torch-2.14/dtypes-1")), {"complex128", "drop"});
  expect_nothing_written();
  EXPECT_EQ(convert(checkpoint("torch-2.14/dtypes-1"), {"--drop", "complex128"}).exit_code, 0);
}

TEST_F(Convert, DryRunWritesNothing) {
  const Outcome text = convert(fsdp(), {"--dry-run", "--add-prefix", "new."});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  expect_contains(text.out, "new.model.lm_head.weight <- model.lm_head.weight (4 chunks)");
  const Outcome json = convert(fsdp(), {"--dry-run", "--json"});
  const Json plan = Json::parse(json.out);
  EXPECT_EQ(plan["tensors"].size(), 85u);
  EXPECT_EQ(plan["bytes_written"], 794'396);
  EXPECT_EQ(plan["left_out"].size(), 14u);
  expect_nothing_written();
}

TEST_F(Convert, ReportsAsJson) {
  const Json report = Json::parse(convert(fsdp(), {"--json"}).out);
  EXPECT_EQ(report["tensors"], 85);
  EXPECT_EQ(report["bytes_written"], 794'396);
  EXPECT_EQ(report["checksums_checked"], 274);
  EXPECT_EQ(report["files"], Json{"model.safetensors"});
}

TEST_F(Convert, QuietSaysNothing) {
  const Outcome outcome = convert(fsdp(), {"--quiet"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out + outcome.err, "");
}

TEST_F(Convert, RefusesDestinationsItMustNotUse) {
  fs::create_directory(out_);
  expect_refused(convert(fsdp()), {"exists already"});
  EXPECT_EQ(names_in(out_), std::set<std::string>{});
  fs::remove(out_);
  fs::create_symlink("nowhere", out_);
  expect_refused(convert(fsdp()), {"exists already"});
  fs::remove(out_);

  const fs::path copy = temp_.path() / "copy";
  copy_checkpoint(fsdp(), copy);
  const std::set<std::string> before = names_in(copy);
  for (const fs::path& inside : {copy / "out", copy, temp_.path() / "x/../copy/out"}) {
    EXPECT_EQ(spolia({"convert", copy, inside, "--to", "safetensors"}).exit_code, 2) << inside;
  }
  expect_refused(spolia({"convert", copy, copy / "out", "--to", "safetensors"}), {"inside the source"});
  EXPECT_EQ(names_in(copy), before);

  expect_refused(spolia({"convert", copy, temp_.path() / "none/out", "--to", "safetensors"}),
                 {"there is no folder"});
}

TEST_F(Convert, RefusesAParentItMayNotWriteTo) {
  const fs::path parent = temp_.path() / "parent";
  fs::create_directory(parent);
  fs::permissions(parent, fs::perms(0555));
  const fs::path source = checkpoint("torch-2.14/nested-1");
  expect_refused(spolia({"convert", source, parent / "out", "--to", "safetensors"}, drop_privileges),
                 {"parent/out", "Permission denied"});
  EXPECT_EQ(names_in(parent), std::set<std::string>{});
}

TEST_F(Convert, RefusesOptionsThatMatchNothing) {
  for (const char* option : {"--select", "--drop", "--root", "--strip-prefix"}) {
    expect_refused(convert(fsdp(), {option, "mistyped"}), {option, "mistyped"});
  }
  expect_refused(convert(fsdp(), {"--drop", "*"}), {"nothing would be left"});
  expect_nothing_written();
}

// ---- names and numbers of tensors

/// Whether a terminal shows every byte as text.
bool is_harmless(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte < 0x20 && byte != '\n') || byte == 0x7f) return false;
    if (byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0) return false;
  }
  return true;
}

TEST_F(Convert, KeepsStrangeNamesAndPrintsThemSafely) {
  const std::vector<std::string> names = {"a/b/../../c",
                                          "ключ 模型 🙂",
                                          "red \x1b[31m\nline",
                                          "\u009b31m",
                                          "quo\"ted\\",
                                          std::string(4096, 'L'),
                                          " spaces around ",
                                          "bidi \u202e name",
                                          "%s{}",
                                          std::string("nul\0nul", 7)};
  std::vector<TestTensor> tensors;
  for (size_t i = 0; i < names.size(); ++i) {
    tensors.push_back({names[i], DType::kFloat32, {2, 3}, static_cast<char>('a' + i)});
  }
  const fs::path source = temp_.path() / "source.safetensors";
  write_file(source, safetensors_bytes(tensors));
  EXPECT_EQ(convert(source).exit_code, 0);
  const Json expected = json_of({"digest", "--json", source});
  EXPECT_EQ(expected.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    Sha256 hash;
    hash.update(bytes_of(std::string(24, static_cast<char>('a' + i))));
    EXPECT_EQ(expected.at(names[i])["sha256"], hash.finish_hex());
  }
  EXPECT_EQ(digests(), expected);

  const std::vector<std::vector<std::string>> verbs = {
      {"inspect", source},
      {"inspect", "--chunks", source},
      {"inspect", "--json", source},
      {"digest", source},
      {"verify", source},
      {"convert", source, temp_.path() / "none", "--to", "safetensors", "--dry-run"},
      {"convert", source, temp_.path() / "none", "--to", "safetensors", "--drop", names[2] + "?"}};
  for (const auto& arguments : verbs) {
    const Outcome outcome = spolia(arguments);
    EXPECT_TRUE(is_harmless(outcome.out)) << arguments[0];
    EXPECT_TRUE(is_harmless(outcome.err)) << arguments[0];
  }
  EXPECT_EQ(lines_of(spolia({"digest", source}).out).size(), names.size());
}

TEST_F(Convert, TakesManyTinyTensors) {
  constexpr size_t kCount = 20'000;
  std::vector<TestTensor> tensors;
  for (size_t i = 0; i < kCount; ++i) {
    tensors.push_back({"tensor." + std::to_string(i), DType::kInt8, {3}, static_cast<char>(i % 251)});
  }
  const fs::path source = temp_.path() / "source.safetensors";
  write_file(source, safetensors_bytes(tensors));
  EXPECT_EQ(json_of({"inspect", "--json", source})["tensors"].size(), kCount);
  EXPECT_EQ(lines_of(spolia({"digest", source}).out).size(), kCount);
  EXPECT_EQ(spolia({"verify", source}).exit_code, 0);
  EXPECT_EQ(convert(source, {"--max-shard-size", "10KB"}).exit_code, 0);
  EXPECT_EQ(names_in(out_).size(), 8u);  // 6 of 9,999 bytes, the rest, the index
  EXPECT_EQ(spolia({"digest", out_}).out, spolia({"digest", source}).out);
}

// ---- wrong use, wrong paths

TEST(Usage, EveryVerbExplainsItself) {
  const Outcome all = spolia({"--help"});
  EXPECT_EQ(all.exit_code, 0);
  for (const char* verb : {"inspect", "digest", "verify", "convert"}) {
    expect_contains(all.out, verb);
    const Outcome outcome = spolia({verb, "--help"});
    EXPECT_EQ(outcome.exit_code, 0);
    expect_contains(outcome.out, std::string("Usage: spolia ") + verb);
  }
  for (const char* option :
       {"--to",     "--memory",    "--max-shard-size", "--root",       "--select",
        "--drop",   "--dtype",     "--strip-prefix",   "--add-prefix", "--dry-run",
        "--json",   "--quiet",     "--layout",         "--overwrite",  "--non-atomic",
        "--verify", "--no-verify", "--no-sync",        "--threads",    "docs/layouts.md"}) {
    expect_contains(spolia({"convert", "--help"}).out, option);
  }
  const Outcome version = spolia({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(version.out.starts_with("spolia "));
}

TEST(Usage, WrongUseIsExplainedOnStderr) {
  struct Case {
    std::vector<std::string> arguments;
    std::string explanation;
  };
  const std::string source = fsdp(), safetensors = "safetensors";
  const std::vector<Case> cases = {
      {{}, "subcommand"},
      {{"bogus"}, ""},
      {{"inspect"}, "PATH is required"},
      {{"digest"}, "PATH is required"},
      {{"verify"}, "PATH is required"},
      {{"inspect", source, "more"}, "more"},
      {{"inspect", source, "--bogus"}, "--bogus"},
      {{"convert", source}, "DST is required"},
      {{"convert", source, "/nowhere/out"}, "--to is required"},
      {{"convert", source, "/nowhere/out", "--to", "floppy"}, "floppy"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--memory", "much"}, "--memory: \"much\""},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--memory", "-1"}, "--memory: \"-1\""},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--memory", "15MiB"}, "16.0 MiB or more"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--max-shard-size", "x"}, "--max-shard-size"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--max-shard-size", "0"}, "must be positive"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--dtype", "float33"}, "float33"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--dtype", "int32"}, "int32"},
      {{"convert", source, "/nowhere/out", "--to", safetensors, "--threads", "0"}, "--threads"},
      {{"digest", source, "--memory", "99999999999999999999"}, "--memory"},
      {{"digest", source, "--memory", "1MiB"}, "16.0 MiB or more"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = spolia(c.arguments);
    SCOPED_TRACE(testing::PrintToString(c.arguments));
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err, "");
    expect_contains(outcome.err, c.explanation);
  }
}

TEST(Usage, EveryWrongPathIsRefusedInOneLine) {
  const TempFolder temp;
  const auto path = [&](const char* name) { return temp.path() / name; };
  fs::create_directory(path("empty"));
  fs::create_directory(path("junk"));
  write_file(path("junk/readme.md"), "hello");
  write_file(path("junk/numbers.bin"), "12345");
  fs::create_directory(path("notes"));
  write_file(path("notes/readme.md"), "hello");
  fs::create_directory(path("parent"));
  copy_checkpoint(checkpoint("torch-2.14/nested-1"), path("parent/step_10"));
  write_file(path("text"), "a text");
  write_file(path("nothing"), "");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_symlink("loop", path("loop"));

  const std::map<fs::path, std::string> cases = {
      {path("missing"), "there is no such file or folder"},
      {"", "there is no such file or folder"},
      {path("empty"), "is no checkpoint"},
      {path("notes"), "is no checkpoint"},
      {path("junk"), "numbers.bin"},
      {path("parent"), "step_10"},
      {path("text"), "neither safetensors nor what torch.save writes"},
      {path("nothing"), "neither safetensors nor what torch.save writes"},
      {path("fifo"), "not a regular file"},
      {"/dev/null", "not a regular file"},
      {path("loop"), ""},
  };
  for (const auto& [wrong, reason] : cases) {
    SCOPED_TRACE(wrong);
    for (const char* verb : {"inspect", "digest", "verify"}) expect_refused(spolia({verb, wrong}), {reason});
    expect_refused(spolia({"convert", wrong, path("out"), "--to", "safetensors"}), {reason});
  }
  EXPECT_FALSE(fs::exists(path("out")));
}

// ---- streams

TEST(Streams, WhatCannotBePrintedIsAFailure) {
  const TempFolder temp;
  const auto full = [] { ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO); };
  const auto closed = [] { ::close(STDOUT_FILENO); };
  const fs::path source = checkpoint("torch-2.14/nested-1");
  const std::vector<std::vector<std::string>> verbs = {
      {"inspect", source},
      {"digest", source},
      {"digest", "--json", source},
      {"verify", source},
      {"convert", source, temp.path() / "none", "--to", "safetensors", "--dry-run", "--quiet"}};
  for (const auto& arguments : verbs) {
    expect_refused(spolia(arguments, full), {"standard output"});
    expect_refused(spolia(arguments, closed), {"standard output"});
  }
}

TEST(Streams, NobodyNeedListenToErrors) {
  const auto full = [] { ::dup2(::open("/dev/full", O_WRONLY), STDERR_FILENO); };
  const auto closed = [] { ::close(STDERR_FILENO); };
  EXPECT_EQ(spolia({"inspect", "/nowhere"}, full).exit_code, 2);
  EXPECT_EQ(spolia({"inspect", "/nowhere"}, closed).exit_code, 2);
}

TEST(Streams, ClosedOnesDoNotLeakIntoFiles) {
  const TempFolder temp;
  const fs::path out = temp.path() / "out";
  const auto close_all = [] {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(stream);
  };
  // It prints a summary and, on stderr, the values left out; neither may go where tensors go.
  EXPECT_EQ(spolia({"convert", fsdp(), out, "--to", "safetensors"}, close_all).exit_code, 2);
  EXPECT_EQ(json_of({"digest", "--json", out}), expected_tensors("torch-2.14/fsdp2-4"));
}

}  // namespace
}  // namespace spolia
