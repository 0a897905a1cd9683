// spolia convert --layout: which rank's file holds which part of a tensor, worked out by hand.
#include <algorithm>
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "spolia/format/safetensors/header.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

/// The tensors' parts in each rank's file: {"w": {"0": [[offsets..., sizes...], ...], "1": ...}}.
Json parts_by_rank(const fs::path& path) {
  const Json shown = json_of({"inspect", "--json", "--chunks", path});
  const size_t digits = shown["format"] == "dcp" ? std::strlen("__") : std::strlen("data-");
  Json parts = Json::object();
  for (const auto& [name, tensor] : shown["tensors"].items()) {
    std::map<int, std::vector<std::vector<int64_t>>> boxes;
    for (const Json& chunk : tensor["chunk_list"]) {
      std::vector<int64_t> box = chunk["offsets"];
      for (const int64_t size : chunk["sizes"]) box.push_back(size);
      boxes[std::stoi(chunk["file"].get<std::string>().substr(digits))].push_back(box);
    }
    for (auto& [rank, of_rank] : boxes) {
      std::ranges::sort(of_rank);
      parts[name][std::to_string(rank)] = of_rank;
    }
  }
  return parts;
}

class LayoutOption : public testing::Test {
 protected:
  LayoutOption() {
    // Each element is another number, so that no two parts can be mistaken for each other.
    const std::vector<std::string> names = {"balanced", "cut",    "few",     "plain",
                                            "ragged",   "scalar", "strided", "strided.chunked"};
    std::vector<SafetensorsSpec> specs;
    const Dims matrix = {7, 4}, pair = {2, 3}, scalar = {};
    for (const std::string& name : names) {
      specs.push_back({name, DType::kInt32, name == "few" ? pair : name == "scalar" ? scalar : matrix});
    }
    std::string bytes = lay_out_safetensors(specs).header;
    for (int32_t number = 0; number < 6 * 28 + 6 + 1; ++number) {
      bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
    }
    write_file(source_, bytes);
    expected_ = spolia({"digest", source_}).out;
  }

  Outcome convert(const std::string& format, const std::string& layout, const fs::path& out) const {
    return spolia({"convert", source_, out, "--to", format, "--layout", layout, "--no-sync"});
  }

  /// What lies where in a checkpoint of that layout, the tensors' contents being right.
  Json parts(const std::string& format, const std::string& layout) const {
    const TempFolder temp;
    const fs::path out = temp.path() / "out";
    const Outcome outcome = convert(format, layout, out);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    if (outcome.exit_code != 0) return {};
    EXPECT_EQ(spolia({"digest", out}).out, expected_);
    return parts_by_rank(out);
  }

  void expect_refused_everywhere(const std::string& layout, const std::vector<std::string>& reasons) const {
    for (const std::string format : {"dcp", "spolia"}) {
      SCOPED_TRACE(format);
      expect_refused(convert(format, layout, temp_.path() / "out"), reasons);
      EXPECT_FALSE(fs::exists(temp_.path() / "out"));
    }
  }

  const TempFolder temp_;
  const fs::path source_ = temp_.path() / "source.safetensors";
  std::string expected_;
};

TEST_F(LayoutOption, IsTextOrAFileOfTextOrJson) {
  const std::string text = R"(mesh = 3               # ranks 0, 1, 2
plain: [shard(0)]
balanced: [shard(0, balanced)]
cut: [shard(-1)]
few: [shard(0)]
scalar: [shard(0)]
strided: [strided(0, 2)]
strided.chunked: [strided(0, 2, chunked)]
"ragged": [ragged([0, 1], [3, 0, 11])]
)";
  // 28 elements in 14 units of two each: six for rank 0, a row and a half; none for rank 1.
  const Json expected = Json::parse(R"({
    "plain":    {"0": [[0, 0, 3, 4]], "1": [[3, 0, 3, 4]], "2": [[6, 0, 1, 4]]},
    "balanced": {"0": [[0, 0, 3, 4]], "1": [[3, 0, 2, 4]], "2": [[5, 0, 2, 4]]},
    "cut":      {"0": [[0, 0, 7, 2]], "1": [[0, 2, 7, 2]]},
    "few":      {"0": [[0, 0, 1, 3]], "1": [[1, 0, 1, 3]]},
    "strided":  {"0": [[0, 0, 2, 4], [4, 0, 2, 4]], "1": [[2, 0, 2, 4], [6, 0, 1, 4]]},
    "strided.chunked":
                {"0": [[0, 0, 2, 4], [4, 0, 1, 4]], "1": [[2, 0, 2, 4], [5, 0, 1, 4]], "2": [[6, 0, 1, 4]]},
    "ragged":   {"0": [[0, 0, 1, 4], [1, 0, 1, 2]], "2": [[1, 2, 1, 2], [2, 0, 5, 4]]}
  })");
  write_file(temp_.path() / "rules=final.txt", text);  // a name that could be rules
  write_file(temp_.path() / "rules.json", R"json(
    {"mesh": {"shape": [3]},
     "rules": [{"match": "plain", "placements": ["shard(0)"]},
               {"match": "balanced", "placements": ["shard(0, balanced)"]},
               {"match": "cut", "placements": ["shard(-1)"]},
               {"match": "few", "placements": ["shard(0)"]},
               {"match": "scalar", "placements": ["shard(0)"]},
               {"match": "strided", "placements": ["strided(0, 2)"]},
               {"match": "strided.chunked", "placements": ["strided(0, 2, chunked)"]},
               {"match": "ragged", "placements": ["ragged([0, 1], [3, 0, 11])"]}]})json");
  std::string one_line = text.substr(text.find('\n'));
  std::ranges::replace(one_line, '\n', ';');
  const std::vector<std::string> ways = {text, "mesh = 3" + one_line, temp_.path() / "rules=final.txt",
                                         temp_.path() / "rules.json", read_file(temp_.path() / "rules.json")};
  for (size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE(ways[i]);
    Json found = parts(i % 2 == 0 ? "dcp" : "spolia", ways[i]);
    // The scalar is whole in one file, which need not be that of rank 0.
    EXPECT_EQ(found["scalar"].size(), 1u);
    EXPECT_EQ(found["scalar"].begin().value(), Json::parse("[[]]"));
    found.erase("scalar");
    EXPECT_EQ(found, expected);
  }
}

TEST_F(LayoutOption, TwoMeshDims) {
  const std::string layout =
      "mesh = 2x2 (dp, tp); cut: [shard(0), shard(1)]; plain: [shard(0), shard(0)]; "
      "strided: [strided(0, 2, chunked), shard(0)]; few: [shard(0)] over (tp); balanced: [replicate, "
      "shard(1)]";
  const Json expected = Json::parse(R"({
    "cut":     {"0": [[0, 0, 4, 2]], "1": [[0, 2, 4, 2]], "2": [[4, 0, 3, 2]], "3": [[4, 2, 3, 2]]},
    "plain":   {"0": [[0, 0, 2, 4]], "1": [[2, 0, 2, 4]], "2": [[4, 0, 2, 4]], "3": [[6, 0, 1, 4]]},
    "strided": {"0": [[0, 0, 2, 4]], "1": [[4, 0, 2, 4]], "2": [[2, 0, 2, 4]], "3": [[6, 0, 1, 4]]}
  })");
  for (const std::string format : {"dcp", "spolia"}) {
    SCOPED_TRACE(format);
    const Json found = parts(format, layout);
    for (const auto& [name, of_ranks] : expected.items()) EXPECT_EQ(found[name], of_ranks) << name;

    // Replicas are written once: a half by one of the ranks that hold it.
    const auto is_half = [&](const std::string& name, int tp, const std::string& half) {
      const Json boxes = Json::parse(half);
      const Json& ranks = found[name];
      return ranks.value(std::to_string(tp), Json()) == boxes ||
             ranks.value(std::to_string(2 + tp), Json()) == boxes;
    };
    EXPECT_TRUE(is_half("few", 0, "[[0, 0, 1, 3]]") && is_half("few", 1, "[[1, 0, 1, 3]]")) << found["few"];
    EXPECT_TRUE(is_half("balanced", 0, "[[0, 0, 7, 2]]") && is_half("balanced", 1, "[[0, 2, 7, 2]]"))
        << found["balanced"];
    for (const std::string name : {"few", "balanced"}) EXPECT_EQ(found[name].size(), 2u) << found[name];
    // What no rule names is replicated over all.
    for (const std::string name : {"ragged", "strided.chunked"}) {
      EXPECT_EQ(found[name].size(), 1u) << found[name];
      EXPECT_EQ(found[name].begin().value(), Json::parse("[[0, 0, 7, 4]]"));
    }
  }
}

TEST_F(LayoutOption, TheLastRuleHoldsAndRanksMayBeListed) {
  const std::string layout =
      "mesh = 2 (dp) on [4, 9]; *: [shard(0)]; strided*: [shard(1)]; few: [shard(0)] over 2 (ep) on [11, 12]";
  for (const std::string format : {"dcp", "spolia"}) {
    const Json found = parts(format, layout);
    EXPECT_EQ(found["plain"], Json::parse(R"({"4": [[0, 0, 4, 4]], "9": [[4, 0, 3, 4]]})"));
    EXPECT_EQ(found["strided"], Json::parse(R"({"4": [[0, 0, 7, 2]], "9": [[0, 2, 7, 2]]})"));
    EXPECT_EQ(found["few"], Json::parse(R"({"11": [[0, 0, 1, 3]], "12": [[1, 0, 1, 3]]})"));
  }
}

TEST_F(LayoutOption, ALayoutIsTurnedIntoAnother) {
  const fs::path rows = temp_.path() / "rows", columns = temp_.path() / "columns",
                 five = temp_.path() / "five";
  ASSERT_EQ(convert("dcp", "mesh = 3; *: [shard(0)]", rows).exit_code, 0);
  ASSERT_EQ(
      spolia({"convert", rows, columns, "--to", "spolia", "--layout", "mesh = 2; *: [shard(1)]"}).exit_code,
      0);
  ASSERT_EQ(
      spolia({"convert", columns, five, "--to", "dcp", "--layout", "mesh = 5; *: [shard(0)]"}).exit_code, 0);
  for (const fs::path& path : {rows, columns, five}) EXPECT_EQ(spolia({"digest", path}).out, expected_);
  EXPECT_EQ(parts_by_rank(columns)["few"], Json::parse(R"({"0": [[0, 0, 2, 2]], "1": [[0, 2, 2, 1]]})"));
}

TEST_F(LayoutOption, TakesRulesThatAreLongerThanAnyName) {
  std::string layout = "mesh = 2\n";
  for (int i = 0; i < 300; ++i) layout += "# a remark of a person who explains every rule at length\n";
  EXPECT_EQ(parts("dcp", layout + "*: [shard(0)]\n")["few"],
            Json::parse(R"({"0": [[0, 0, 1, 3]], "1": [[1, 0, 1, 3]]})"));
}

TEST_F(LayoutOption, NamesWhatIsWrongWithRules) {
  expect_refused_everywhere("mesh = 3\nplain: [shard(0)\n", {"line 2", "plain: [shard(0)"});
  expect_refused_everywhere("mesh = 3; plain: [shard(zero)]", {"line 1", "plain: [shard(zero)]"});
  expect_refused_everywhere("*: [shard(0)]", {"line 1", "mesh"});
  expect_refused_everywhere("mesh = 3x0", {"line 1"});
  expect_refused_everywhere("mesh = 2x2\nplain: [shard(0)]", {"line 2"});
  expect_refused_everywhere("mesh = 3\n\n# of old\nmodel.*: [shard(0)]",
                            {"line 4", "\"model.*\"", "no tensor"});
  expect_refused_everywhere("mesh = 3\nplain: [shard(2)]", {"line 2", "\"plain\"", "7x4", "dim 2"});
  expect_refused_everywhere("mesh = 3\nragged: [ragged([0], [1, 1, 3])]", {"line 2", "\"ragged\"", "7x4"});
  expect_refused_everywhere("mesh = 3\nplain: [partial]", {"line 2"});
  expect_refused_everywhere("", {"mesh"});
  expect_refused_everywhere(
      R"json({"mesh": "3", "rules": [{"match": "*", "placements": ["shard(0)"]}, {}]})json", {"rule 2"});
  expect_refused_everywhere(R"({"mesh": "3", "rules": [)", {"JSON"});
}

TEST_F(LayoutOption, NamesTheFileThatIsNone) {
  expect_refused_everywhere(temp_.path() / "rules.txt", {"rules.txt", "No such file"});
  expect_refused_everywhere("rules.json", {"\"rules.json\"", "No such file"});
  expect_refused_everywhere(temp_.path(), {temp_.path(), "not a regular file"});
  write_file(temp_.path() / "rules.txt", "mesh = 3\nplain: [shard(9)]\n");
  expect_refused_everywhere(temp_.path() / "rules.txt", {"line 2", "\"plain\""});
}

TEST_F(LayoutOption, SafetensorsHasNone) {
  for (const std::string layout : {"mesh = 3; *: [shard(0)]", "mesh = 3", ""}) {
    const Outcome outcome = convert("safetensors", layout, temp_.path() / "out");
    expect_refused(outcome, {});
    if (!layout.empty()) expect_contains(outcome.err, "whole tensors");
  }
  EXPECT_FALSE(fs::exists(temp_.path() / "out"));
}

}  // namespace
}  // namespace spolia
