#include "spolia/checkpoint/description.h"

#include <atomic>
#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/world.h"
#include "spolia/format/native/random_layout.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

std::shared_ptr<const Layout> layout(std::string_view text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

std::string random_name() {
  std::string name;
  for (int64_t length = pick(0, 8); length > 0; --length) name.push_back(static_cast<char>(pick(0, 256)));
  return name;
}

KeyPath random_path() {
  KeyPath path;
  for (int64_t left = pick(0, 4); left > 0; --left) {
    pick(0, 3) == 0 ? path.emplace_back(pick(-5, 1000)) : path.emplace_back(random_name());
  }
  return path;
}

uint64_t random_hash() {
  return static_cast<uint64_t>(pick(0, int64_t{1} << 62)) * 4 + static_cast<uint64_t>(pick(0, 4));
}

DescribedTensor random_tensor() {
  DescribedTensor tensor;
  tensor.name = random_name();
  tensor.path = random_path();
  tensor.shape = random_shape();
  do {
    tensor.dtype = static_cast<DType>(pick(0, static_cast<int64_t>(kDTypeCount)));
  } while (is_sub_byte(tensor.dtype));
  tensor.requires_grad = pick(0, 2) == 1;
  tensor.on_device = pick(0, 2) == 1;
  tensor.contents = random_hash();
  if (pick(0, 2) == 1) {
    tensor.layout = std::make_shared<const Layout>(random_layout(tensor.shape));
    return tensor;
  }
  for (int64_t size : tensor.shape) {
    tensor.box.offsets.push_back(pick(0, size + 1));
    tensor.box.sizes.push_back(pick(0, size - tensor.box.offsets.back() + 1));
  }
  return tensor;
}

Description random_description() {
  Description description;
  for (int64_t left = pick(0, 6); left > 0; --left) description.tensors.push_back(random_tensor());
  // Some share a layout.
  for (DescribedTensor& tensor : description.tensors) {
    if (pick(0, 3) == 0 && description.tensors[0].layout != nullptr) {
      tensor.layout = description.tensors[0].layout;
      tensor.box = {};
    }
  }
  for (int64_t left = pick(0, 6); left > 0; --left) {
    description.values.push_back({random_name(), random_path(), random_hash()});
  }
  return description;
}

TEST(Description, IsDecodedAsItWas) {
  EXPECT_TRUE(rc::check([] {
    const Description one = random_description(), other = random_description();
    const std::string bytes = encode(one);
    const Description decoded = decode_description(bytes);
    RC_ASSERT(decoded == one);
    RC_ASSERT(encode(decoded) == bytes);
    RC_ASSERT((encode(other) == bytes) == (other == one));
  }));
}

TEST(Description, HostileBytesAreRefused) {
  EXPECT_TRUE(rc::check([] {
    std::string bytes = encode(random_description());
    const auto decode = [](std::string_view hostile) {
      try {
        // What is taken for one can be used as one.
        const Description description = decode_description(hostile);
        RC_ASSERT(decode_description(encode(description)) == description);
      } catch (const CorruptError&) {
      }
    };
    for (size_t length = 0; length < bytes.size(); length += 7) {
      RC_ASSERT_THROWS_AS(decode_description(std::string_view(bytes).substr(0, length)), CorruptError);
    }
    for (int round = 0; round < 30; ++round) {
      std::string hostile = bytes;
      for (int64_t flips = pick(1, 4); flips > 0; --flips) {
        char& byte = hostile[static_cast<size_t>(pick(0, std::ssize(hostile)))];
        byte = static_cast<char>(pick(0, 3) == 0 ? pick(0, 256)
                                                 : static_cast<unsigned char>(byte) ^ (1u << pick(0, 8)));
      }
      decode(hostile);
    }
    std::string noise(static_cast<size_t>(pick(0, 200)), '\0');
    for (char& byte : noise) byte = static_cast<char>(pick(0, 6) == 0 ? pick(0, 256) : 0);
    decode(noise);
  }));
}

TEST(Description, LayoutsAndBoxesThatAreNoneAreCorrupt) {
  Description description;
  description.tensors.push_back(
      {"w", {}, DType::kInt8, {3}, false, false, layout("[shard(0)] over 2"), {}, 0});
  std::string bytes = encode(description);
  const auto refused = [](const std::string& hostile) {
    try {
      decode_description(hostile);
    } catch (const CorruptError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  std::string wrong = bytes;
  wrong.replace(wrong.find("shard"), 5, "chard");
  EXPECT_NE(refused(wrong).find("has no layout"), std::string::npos) << refused(wrong);
  // The number of the layout: before the last two numbers, which are the contents and the count of the
  // values.
  wrong = bytes;
  wrong[wrong.size() - 24] = 1;
  EXPECT_NE(refused(wrong).find("a layout that it did not send"), std::string::npos) << refused(wrong);
  description.tensors[0].layout = nullptr;
  description.tensors[0].box = Box{{2}, {2}};
  EXPECT_NE(refused(encode(description)).find("leaves its shape"), std::string::npos);
  description.tensors[0].box = Box{{0, 0}, {1, 1}};
  EXPECT_NE(refused(encode(description)).find("leaves its shape"), std::string::npos);
  description.tensors[0] = {"w", {}, DType::kInt8, {-3}, false, false, nullptr, Box{{0}, {0}}, 0};
  EXPECT_NE(refused(encode(description)).find("a size of -3"), std::string::npos);
}

WantedTensor tensor(std::string name, Dims shape, std::string_view how = "") {
  return {std::move(name), DType::kFloat32, std::move(shape), how.empty() ? nullptr : layout(how), {}, {}};
}

Description described(const std::vector<WantedTensor>& tensors, int64_t rank,
                      const DescribeOptions& options = {}) {
  RankState state(tensors, rank);
  state.fill();
  state.dict().add("step", Value(int64_t{5}));
  return describe(state.dict(), rank, options);
}

TEST(Description, OfTheSameStateIsTheSameOnEveryRank) {
  const std::vector<WantedTensor> tensors = {tensor("z", {6, 2}, "[shard(0)] over 3"), tensor("a", {2})};
  const Description first = described(tensors, 0, {.contents = true});
  for (int64_t rank = 1; rank < 3; ++rank) EXPECT_TRUE(described(tensors, rank, {.contents = true}) == first);
  EXPECT_EQ(first.tensors[0].name, "a");
  EXPECT_NE(first.tensors[0].contents, 0u);
  EXPECT_EQ(first.tensors[1].contents, 0u);  // shards differ
  EXPECT_NE(first.values[0].contents, 0u);
  EXPECT_EQ(described(tensors, 0).values[0].contents, 0u);
  // Strides do not change what a tensor holds; large ones are not hashed.
  const auto strided = described({tensor("first", {1}), tensor("a", {3, 2})}, 0, {.contents = true});
  const auto dense = described({tensor("a", {3, 2})}, 0, {.contents = true});
  EXPECT_EQ(strided.tensors[0].contents, dense.tensors[0].contents);
  EXPECT_EQ(described({tensor("a", {3, 2})}, 0, {.contents = true, .hashed_bytes = 23}).tensors[0].contents,
            0u);
}

TEST(Description, NamesTheTensorWhoseMemoryDoesNotSuit) {
  std::vector<std::byte> bytes(8);
  StateDict state;
  state.add("model.w", sharded_tensor(byte_view(std::span(bytes)), Dims{20}, layout("[shard(0)] over 2")));
  try {
    describe(state, 0, {});
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("tensor \"model.w\""), std::string::npos) << error.what();
  }
}

/// Ranks 0 and 3 are alike, and so are 1 and 2; only hashes and one of each go around.
TEST(Descriptions, EachDistinctOneIsSentOnce) {
  std::mutex mutex;
  std::map<int64_t, std::string> fingerprints;
  launch(4, [&](World& world) {
    const bool inner = world.rank() == 1 || world.rank() == 2;
    const std::vector<WantedTensor> tensors = {tensor(inner ? "b" : "a", {4})};
    const Description own = described(tensors, world.rank());
    const Descriptions all = exchange_descriptions(*world.all(), own);
    EXPECT_EQ(all.of_rank, (std::vector<uint32_t>{0, 1, 1, 0}));
    ASSERT_EQ(all.distinct.size(), 2u);
    EXPECT_TRUE(all.of(world.rank()) == own);
    EXPECT_EQ(all.distinct[0].tensors[0].name, "a");
    EXPECT_EQ(all.first_rank(1), 1);
    const std::lock_guard lock(mutex);
    fingerprints[world.rank()] = all.fingerprint;
  });
  for (int64_t rank = 1; rank < 4; ++rank) EXPECT_EQ(fingerprints[rank], fingerprints[0]);
}

TEST(Descriptions, TheFingerprintIsOfTheStructureAlone) {
  auto fingerprint = [](int64_t step, Dims shape, int64_t who) {
    std::string found;
    launch(2, [&](World& world) {
      RankState state({tensor("a", shape)}, world.rank());
      state.dict().add("step", Value(step));
      if (who == world.rank()) state.dict().add("mine", Value());
      const auto all =
          exchange_descriptions(*world.all(), describe(state.dict(), world.rank(), {.contents = true}));
      if (world.rank() == 0) found = all.fingerprint;
    });
    return found;
  };
  const std::string first = fingerprint(1, {3}, 9);
  EXPECT_EQ(fingerprint(2, {3}, 9), first);
  EXPECT_NE(fingerprint(1, {4}, 9), first);
  EXPECT_NE(fingerprint(1, {3}, 0), first);
  EXPECT_NE(fingerprint(1, {3}, 0), fingerprint(1, {3}, 1));
}

/// What 1 rank has and 1023 others have is joined from two descriptions.
TEST(Join, ListsEveryHolderOfABox) {
  Descriptions all;
  Description whole_one, none;
  whole_one.tensors.push_back(
      {"w", {std::string("w")}, DType::kInt8, {3}, false, false, nullptr, Box{{0}, {3}}, 0});
  all.distinct = {none, whole_one};
  for (int rank = 0; rank < 1024; ++rank) all.of_rank.push_back(rank % 2 == 1 ? 1 : 0);
  const JobState job = join(all, Purpose::kSave);
  ASSERT_EQ(job.shared.size(), 1u);
  ASSERT_EQ(job.shared[0].boxes.size(), 1u);
  EXPECT_EQ(job.shared[0].boxes[0].ranks.size(), 512u);
  EXPECT_EQ(job.shared[0].boxes[0].ranks.front(), 1);
}

TEST(Join, RefusesWhatRanksDisagreeAbout) {
  const auto refused = [](const std::vector<Description>& of_ranks, Purpose purpose) {
    Descriptions all;
    all.distinct = of_ranks;
    for (uint32_t rank = 0; rank < of_ranks.size(); ++rank) all.of_rank.push_back(rank);
    try {
      join(all, purpose);
    } catch (const Error& error) {
      return fmt::format("{}: {}", name_of(error.kind()), error.what());
    }
    return std::string("nothing was thrown");
  };
  const auto with = [](const DescribedTensor& tensor) {
    Description description;
    description.tensors.push_back(tensor);
    return description;
  };
  const DescribedTensor w{"w", {}, DType::kInt8, {4}, false, false, nullptr, Box{{0}, {4}}, 0};
  DescribedTensor other = w;
  other.contents = 3;
  DescribedTensor another = w;
  another.contents = 4;
  EXPECT_NE(refused({with(other), with(another)}, Purpose::kSave).find("mismatch"), std::string::npos);
  Description value;
  value.values.push_back({"w", {}, 0});
  EXPECT_NE(refused({with(w), value}, Purpose::kLoad).find("a tensor on rank 0 and a value on rank 1"),
            std::string::npos);
  DescribedTensor outside = w;
  outside.layout = layout("[shard(0)] over 3");
  outside.box = {};
  EXPECT_NE(refused({with(outside), with(outside)}, Purpose::kLoad)
                .find("speaks of rank 2, but the job has 2 ranks"),
            std::string::npos);
  DescribedTensor partial = w;
  partial.layout = layout("[partial(sum)] over 2");
  partial.box = {};
  EXPECT_NE(refused({with(partial), with(partial)}, Purpose::kSave).find("invalid argument"),
            std::string::npos)
      << refused({with(partial), with(partial)}, Purpose::kSave);
}

}  // namespace
}  // namespace spolia
