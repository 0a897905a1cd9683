// spolia diff, as a stranger runs it.
#include <fstream>

#include <gtest/gtest.h>

#include "spolia/format/safetensors/test_files.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

class DiffCommand : public testing::Test {
 protected:
  /// A safetensors file of these tensors.
  fs::path file(const std::string& name, const std::vector<TestTensor>& tensors) const {
    const fs::path path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << safetensors_bytes(tensors);
    return path;
  }

  const TempFolder folder_;
  // 'x' is 0x78: 120 as a byte.
  const fs::path a_ = file("a.safetensors", {{"b", DType::kUInt8, {2, 3}}, {"only.a", DType::kFloat32, {}}});
  const fs::path b_ =
      file("b.safetensors", {{"b", DType::kUInt8, {2, 3}, 'z'}, {"only.b", DType::kFloat32, {}}});
};

TEST_F(DiffCommand, EqualCheckpointsAreFine) {
  const Outcome outcome =
      spolia({"diff", checkpoint("torch-2.14/fsdp2-4"), checkpoint("torch-2.14/fsdp2-4")});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_contains(outcome.out, " 0 differ, 0 are close; ");
  EXPECT_EQ(spolia({"diff", a_, a_, "--quiet"}).out, "");
}

TEST_F(DiffCommand, TellsWhatDiffers) {
  const Outcome outcome = spolia({"diff", a_, b_});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  expect_contains(outcome.out, "tensor only in A  only.a\n");
  expect_contains(outcome.out, "tensor only in B  only.b\n");
  expect_contains(
      outcome.out,
      "tensor differs  b: 6 of 6 elements differ, first at [0, 0]: 120 and 122; apart by at most 2 "
      "(0.0164 relative), 2 on average\n");
  expect_contains(outcome.out, "1 tensors in both: 1 differ, 0 are close;");
}

TEST_F(DiffCommand, PrintsJson) {
  const Outcome outcome = spolia({"diff", a_, b_, "--json"});
  EXPECT_EQ(outcome.exit_code, 1);
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["equal"], false);
  EXPECT_EQ(json["only_in_a"], Json::parse(R"({"tensors": ["only.a"], "values": []})"));
  EXPECT_EQ(json["only_in_b"], Json::parse(R"({"tensors": ["only.b"], "values": []})"));
  const Json& tensor = json["tensors"]["b"];
  EXPECT_EQ(tensor["dtype"], Json::parse(R"(["uint8", "uint8"])"));
  EXPECT_EQ(tensor["shape"], Json::parse("[[2, 3], [2, 3]]"));
  EXPECT_EQ(tensor["elements"], 6);
  EXPECT_EQ(tensor["differing"], 6);
  EXPECT_EQ(tensor["first"], Json::parse(R"({"index": [0, 0], "a": "120", "b": "122"})"));
  EXPECT_EQ(tensor["max_absolute"], 2.0);
  EXPECT_EQ(json["tensors_compared"], 1);
}

TEST_F(DiffCommand, TakesTolerancesAndPatterns) {
  EXPECT_EQ(spolia({"diff", a_, b_, "--drop", "only.*", "--atol", "2"}).exit_code, 0);
  EXPECT_EQ(spolia({"diff", a_, b_, "--select", "b", "--rtol", "0.02"}).exit_code, 0);
  EXPECT_EQ(spolia({"diff", a_, b_, "--select", "b", "--rtol", "0.01"}).exit_code, 1);
}

TEST_F(DiffCommand, ComparesAcrossFormats) {
  const fs::path source = checkpoint("torch-2.14/fsdp-tp-2x2"), copy = folder_.path() / "copy";
  ASSERT_EQ(spolia({"convert", source, copy, "--to", "safetensors", "--quiet"}).exit_code, 0);
  const Outcome outcome =
      spolia({"diff", source, copy, "--no-values", "--threads", "2", "--memory", "32MiB"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
}

TEST_F(DiffCommand, WhatCannotBeReadIsAFailure) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"diff", a_},
           {"diff", a_, folder_.path() / "nothing"},
           {"diff", a_, b_, "--rtol", "-1"},
           {"diff", a_, b_, "--rtol", "x"},
           {"diff", a_, b_, "--select", "no such tensor"},
           {"diff", a_, b_, "--memory", "31MiB"},
       }) {
    EXPECT_EQ(spolia(arguments).exit_code, 2) << arguments.back();
  }
}

}  // namespace
}  // namespace spolia
