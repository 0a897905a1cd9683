// spolia stream: what ranks that hold shards are given whole is what the checkpoint holds.
#include <algorithm>

#include <gtest/gtest.h>

#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

std::vector<fs::path> all_checkpoints() {
  std::vector<fs::path> paths;
  for (const std::string version : {"torch-2.14", "torch-2.6"}) {
    for (const auto& c : fs::directory_iterator(fs::path(SPOLIA_TEST_DATA) / version)) {
      for (const auto& entry : fs::directory_iterator(c.path())) {
        if (entry.path().filename().string().starts_with("checkpoint")) paths.push_back(entry.path());
      }
    }
  }
  std::ranges::sort(paths);
  return paths;
}

TEST(StreamCommand, DigestsOfEveryCheckpointAreThoseOfDigest) {
  const std::vector<fs::path> paths = all_checkpoints();
  EXPECT_GE(paths.size(), 20);
  for (const fs::path& path : paths) {
    SCOPED_TRACE(path.string());
    const std::string expected = spolia({"digest", path}).out;
    EXPECT_FALSE(expected.empty());
    for (const std::vector<std::string>& how : std::vector<std::vector<std::string>>{
             {"--ranks", "1"}, {"--ranks", "3", "--memory", "128KiB"}, {"--mesh", "2x2"}}) {
      std::vector<std::string> arguments = {"stream", path, "--digest"};
      arguments.insert(arguments.end(), how.begin(), how.end());
      const Outcome outcome = spolia(arguments);
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_EQ(outcome.out, expected) << how[1];
    }
  }
}

TEST(StreamCommand, SaysWhatItTook) {
  const Json told = json_of({"stream", fsdp(), "--ranks", "4", "--json"});
  EXPECT_EQ(told["sent"], told["least"]);
  EXPECT_GT(told["delivered"], told["sent"]);
  const Outcome plan = spolia({"stream", fsdp(), "--ranks", "4", "--dry-run"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  expect_contains(plan.out, "round 0");
  expect_contains(plan.out, "from 3 to all");
  expect_contains(spolia({"stream", fsdp(), "--ranks", "2"}).out, "delivered");
}

TEST(StreamCommand, MapsAndBack) {
  const TempFolder temp;
  const fs::path source = fs::path(SPOLIA_TEST_DATA) / "torch-2.14/safetensors-1";
  fs::path path;
  for (const auto& entry : fs::directory_iterator(source)) {
    if (entry.path().filename().string().starts_with("checkpoint")) path = entry.path();
  }
  // The first matrix turned, under another name; as convert does it.
  const Json tensors = json_of({"digest", "--json", path});
  std::string matrix;
  for (const auto& [name, tensor] : tensors.items()) {
    if (matrix.empty() && tensor["shape"].size() == 2) matrix = name;
  }
  ASSERT_FALSE(matrix.empty());
  const fs::path map = temp.path() / "map";
  write_file(map, "\"" + matrix + "\" -> turned, permute='[1, 0]'\n");
  ASSERT_EQ(spolia({"convert", path, temp.path() / "out", "--to", "safetensors", "--map", map, "--no-sync"})
                .exit_code,
            0);
  const std::string expected = spolia({"digest", temp.path() / "out"}).out;
  EXPECT_EQ(spolia({"stream", path, "--ranks", "3", "--map", map, "--digest"}).out, expected);
  EXPECT_EQ(
      spolia({"stream", temp.path() / "out", "--ranks", "3", "--map", map, "--reverse", "--digest"}).out,
      spolia({"digest", path}).out);
}

void expect_streamed_there_and_back(const std::string& family, const std::string& name,
                                    const std::string& root = "model") {
  SCOPED_TRACE(name);
  const fs::path source = checkpoint("torch-2.14/" + name);
  const TempFolder temp;
  const fs::path map = fs::path(SPOLIA_TEST_DATA) / "../../mappings" / family, fused = temp.path() / "fused";
  std::vector<std::string> mapped = {"--map", map};
  if (!root.empty()) mapped.insert(mapped.end(), {"--map-root", root});
  std::vector<std::string> convert = {"convert", source, fused, "--to", "dcp", "--no-sync"};
  convert.insert(convert.end(), mapped.begin(), mapped.end());
  ASSERT_EQ(spolia(convert).exit_code, 0);
  for (const std::vector<std::string>& how : std::vector<std::vector<std::string>>{
           {"--ranks", "3"}, {"--mesh", "2x3"}, {"--ranks", "5", "--memory", "128KiB"}}) {
    std::vector<std::string> options = mapped;
    options.insert(options.end(), how.begin(), how.end());
    options.push_back("--digest");
    std::vector<std::string> there = {"stream", source}, back = {"stream", fused, "--reverse"};
    there.insert(there.end(), options.begin(), options.end());
    back.insert(back.end(), options.begin(), options.end());
    const Outcome streamed = spolia(there), restored = spolia(back);
    EXPECT_EQ(streamed.exit_code, 0) << streamed.err;
    EXPECT_EQ(streamed.out, spolia({"digest", fused}).out);
    EXPECT_EQ(restored.out, spolia({"digest", source}).out) << restored.err;
  }
}

TEST(StreamCommand, ModelsOfPyTorchAreFusedOnTheirWayAndTakenApartAgain) {
  for (const std::string name : {"fsdp2-3", "fsdp2-4", "fsdp2-4-flat", "hsdp-2x2", "fsdp-tp-2x2", "muon-1"}) {
    expect_streamed_there_and_back("llama-like.map", name);
  }
  expect_streamed_there_and_back("llama-like.map", "rank-files-2", "");
  expect_streamed_there_and_back("moe.map", "moe-2");
}

TEST(StreamCommand, TakesWhatIsNewFromABase) {
  const TempFolder temp;
  const fs::path source = checkpoint("torch-2.14/hf-shards-3"), base = checkpoint("torch-2.14/fsdp2-4"),
                 map = temp.path() / "map";
  write_file(map, R"(model.layers.0.w^T -> turned
_ -> model.lm_head.weight
_ -> model.model.layers.$LAYER_ID.mlp.up_proj.weight
_ -> model.model.norm.weight, shape='[48]', dtype='float32'
_ -> model.model.seen_tokens
_ -> model.model.embed_tokens.weight, fill=2
model.norm.weight -> "base:norm"
)");
  const std::vector<std::string> mapped = {"--map", map, "--base", base};
  std::vector<std::string> convert = {"convert", source, temp.path() / "out", "--to", "spolia", "--no-sync"};
  convert.insert(convert.end(), mapped.begin(), mapped.end());
  ASSERT_EQ(spolia(convert).exit_code, 0);
  const std::string expected = spolia({"digest", temp.path() / "out"}).out;
  EXPECT_EQ(lines_of(expected).size(), 5u + 1 + 2 + 3);
  const Json of_base = expected_tensors("torch-2.14/fsdp2-4");
  expect_contains(expected, of_base["model.lm_head.weight"]["sha256"]);
  for (const std::vector<std::string>& how : std::vector<std::vector<std::string>>{
           {"--ranks", "1"}, {"--ranks", "3"}, {"--mesh", "2x2"}, {"--ranks", "5", "--memory", "128KiB"}}) {
    std::vector<std::string> stream = {"stream", source, "--digest"};
    for (const auto* more : {&mapped, &how}) stream.insert(stream.end(), more->begin(), more->end());
    const Outcome streamed = spolia(stream);
    EXPECT_EQ(streamed.exit_code, 0) << streamed.err;
    EXPECT_EQ(streamed.out, expected);
  }
  // A second base has nothing of it, and without one there are no values.
  expect_refused(spolia({"stream", source, "--ranks", "2", "--map", map}),
                 {"line 2", "\"model.lm_head.weight\"", "base"});
  write_file(map, "_ -> model.lm_head.weight\n");
  expect_refused(spolia({"stream", source, "--ranks", "2", "--map", map, "--base", source}),
                 {"line 1", "\"model.lm_head.weight\"", "base"});
  EXPECT_EQ(spolia({"stream", source, "--base", base}).exit_code, 2);  // without a mapping
}

TEST(StreamCommand, RefusesWhatMakesNoSense) {
  expect_refused(spolia({"stream", fsdp(), "--ranks", "3", "--mesh", "2x2"}), {"2x2", "4 ranks", "3"});
  expect_refused(spolia({"stream", fsdp(), "--mesh", "4"}), {"rows and columns"});
  expect_refused(spolia({"stream", fsdp(), "--ranks", "2", "--memory", "1KiB"}), {"131072"});
  expect_refused(spolia({"stream", "/nowhere", "--ranks", "2"}), {"/nowhere"});
}

}  // namespace
}  // namespace spolia
