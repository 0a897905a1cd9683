#include "spolia/checkpoint/open_together.h"

#include <atomic>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/testing_cases.h"
#include "spolia/comm/world.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/transcript.h"

namespace spolia {
namespace {

std::filesystem::path checkpoint_of(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("checkpoint")) return entry.path();
  }
  return {};
}

void expect_same(const Catalog& a, const Catalog& b) {
  EXPECT_EQ(a.format, b.format);
  EXPECT_EQ(a.root, b.root);
  EXPECT_EQ(a.files, b.files);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t t = 0; t < a.tensors.size(); ++t) {
    const TensorEntry &x = a.tensors[t], &y = b.tensors[t];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.path, y.path);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.requires_grad, y.requires_grad);
    EXPECT_EQ(x.boxes, y.boxes);
    EXPECT_EQ(x.extents, y.extents);
  }
  ASSERT_EQ(a.values.size(), b.values.size());
  for (size_t v = 0; v < a.values.size(); ++v) {
    EXPECT_EQ(a.values[v].name, b.values[v].name);
    EXPECT_EQ(a.values[v].path, b.values[v].path);
  }
}

class EveryCase : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(EveryCase, IsOpenedAlikeWithoutAskingTheStore) {
  const auto path = checkpoint_of(GetParam());
  const auto faults = std::make_shared<FaultStore>(posix_store());
  const auto transcript = std::make_shared<Transcript>();
  const auto first = open_source(recording_store(faults, transcript), path);
  transcript->close();
  const int64_t asked = faults->count();
  EXPECT_GT(asked, 0);
  const auto second = open_source(replaying_store(faults, Transcript::decode(transcript->encode())), path);
  EXPECT_EQ(faults->count(), asked);
  expect_same(first->catalog(), second->catalog());

  // Both read the same tensors, each for itself.
  const auto truth = digest_tensors(*open_source(posix_store(), path), {});
  EXPECT_EQ(digest_tensors(*first, {}), truth);
  EXPECT_EQ(digest_tensors(*second, {}), truth);
  for (size_t v = 0; v < first->catalog().values.size(); ++v) {
    EXPECT_EQ(first->value(v), second->value(v)) << first->catalog().values[v].name;
  }
}

INSTANTIATE_TEST_SUITE_P(OpenTogether, EveryCase, testing::ValuesIn(all_cases()), name_of_case);

TEST(OpenTogether, ReadsMetadataOnceForAllRanks) {
  const auto path = checkpoint_of(std::filesystem::path(SPOLIA_TEST_DATA) / "torch-2.14" / "fsdp2-4");
  const auto alone = std::make_shared<FaultStore>(posix_store());
  open_source(alone, path);
  const auto faults = std::make_shared<FaultStore>(posix_store());
  launch(4, [&](World& world) {
    const auto source = open_together(*world.all(), faults, path);
    EXPECT_GT(source->catalog().tensors.size(), 10u);
  });
  EXPECT_EQ(faults->count(), alone->count());
}

TEST(OpenTogether, WhatFailsOnTheFirstFailsOnAll) {
  const auto store = posix_store();
  std::atomic<int> threw{0};
  const std::filesystem::path missing = std::filesystem::path(SPOLIA_TEST_DATA) / "none";
  launch(3, [&](World& world) {
    try {
      open_together(*world.all(), store, missing);
    } catch (const NotFoundError&) {
      ++threw;
    }
    // Paths that differ are told so.
    try {
      open_together(*world.all(), store, missing / std::to_string(world.rank() / 2));
      ADD_FAILURE();
    } catch (const MismatchError& error) {
      EXPECT_NE(std::string(error.what()).find("the checkpoint to be opened"), std::string::npos)
          << error.what();
    }
    world.all()->barrier().wait();
  });
  EXPECT_EQ(threw, 3);
}

}  // namespace
}  // namespace spolia
