// Every checkpoint that PyTorch wrote, through chains of conversions and random layouts: every tensor keeps
// the digest that PyTorch computed, every value stays what it was.
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/testing_cases.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

/// Small random numbers, the same for the same seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t pick(int64_t begin, int64_t end) {
    return begin + static_cast<int64_t>(engine_() % static_cast<uint64_t>(end - begin));
  }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[static_cast<size_t>(pick(0, std::ssize(all)))];
  }

 private:
  std::mt19937_64 engine_;
};

Placement random_placement(Dice& dice, const Dims& shape, int64_t ranks) {
  const auto dim = [&] { return dice.pick(-std::ssize(shape), std::ssize(shape)); };
  switch (dice.pick(0, shape.empty() ? 1 : 6)) {
    case 1:
      return Shard{dim(), Split::kCeil};
    case 2:
      return Shard{dim(), Split::kBalanced};
    case 3:
      return StridedShard{dim(), dice.pick(1, 5), StridedSplit::kAligned};
    case 4:
      return StridedShard{dim(), dice.pick(1, 5), StridedSplit::kChunked};
    case 5: {  // a few ranks share the leading dims unevenly, some hold nothing
      RaggedShard ragged;
      int64_t flat = 1;
      for (int64_t d = 0; d < dice.pick(1, std::ssize(shape) + 1); ++d) {
        ragged.dims.push_back(d);
        flat *= shape[static_cast<size_t>(d)];
      }
      for (int64_t r = 0; r < ranks; ++r) ragged.units.push_back(dice.pick(0, 3));
      const int64_t sum = std::accumulate(ragged.units.begin(), ragged.units.end(), int64_t{0});
      if (sum > 0 && flat % sum == 0) return ragged;
      return Replicate{};
    }
    default:
      return Replicate{};
  }
}

/// A rule for each tensor, over a random mesh. Placements of several mesh dims may meet on one tensor dim.
LayoutRules random_rules(Dice& dice, const Catalog& catalog) {
  static const std::vector<Dims> meshes = {{1}, {2}, {3}, {5}, {2, 2}, {3, 2}, {2, 1, 3}};
  const Dims mesh_shape = dice.one_of(meshes);
  const DeviceMesh mesh(mesh_shape);
  std::vector<LayoutRule> rules;
  for (const TensorEntry& tensor : catalog.tensors) {
    std::vector<Placement> placements;
    const bool divided = info(tensor.dtype).bits % 8 != 0;  // finer than a byte: whole only
    bool ragged = false;
    for (int64_t ranks : mesh_shape) {
      Placement placement = divided ? Replicate{} : random_placement(dice, tensor.shape, ranks);
      // A ragged shard flattens dims, so that what comes before and after it would have to suit it.
      ragged = ragged || std::holds_alternative<RaggedShard>(placement);
      placements.push_back(std::move(placement));
    }
    if (ragged) {
      for (size_t m = 0; m < placements.size(); ++m) {
        const bool keep = std::holds_alternative<RaggedShard>(placements[m]) && ragged;
        if (keep) ragged = false;
        if (!keep) placements[m] = Replicate{};
      }
    }
    std::string pattern = tensor.name;
    for (char& c : pattern) c = c == '*' ? '?' : c;
    rules.push_back({std::move(pattern), std::move(placements), std::nullopt, {}, "rule of " + tensor.name});
  }
  return LayoutRules(mesh, std::move(rules));
}

using Digests = std::map<std::string, std::string>;

Digests digests_of(const Source& source) {
  Digests digests;
  const std::vector<std::string> hexes = digest_tensors(source, {.plan = {kLeastMemory, 2}});
  for (size_t t = 0; t < hexes.size(); ++t) digests[source.catalog().tensors[t].name] = hexes[t];
  return digests;
}

Digests expected_of(const fs::path& c) {
  Digests digests;
  const nlohmann::json expected = nlohmann::json::parse(std::ifstream(c / "expected.json"));
  for (const auto& [name, tensor] : expected["tensors"].items()) digests[name] = tensor["sha256"];
  return digests;
}

std::map<std::string, Value> values_of(const Source& source) {
  std::map<std::string, Value> values;
  for (size_t v = 0; v < source.catalog().values.size(); ++v) {
    values.emplace(source.catalog().values[v].name, source.value(v));
  }
  return values;
}

std::string faults_of(const Source& source) {
  std::string all;
  for (const std::string& fault : verify(source, {.threads = 2}).faults) all += fault + "\n";
  return all;
}

/// What tensors are besides their bytes.
std::string properties_of(const Source& source) {
  std::string text;
  for (const TensorEntry& tensor : source.catalog().tensors) {
    text += fmt::format("{} {} {} {} {}", tensor.name, name_of(tensor.dtype), list_text(tensor.shape),
                        tensor.requires_grad, static_cast<int>(tensor.memory_format));
    if (tensor.path == KeyPath{tensor.name}) {  // says no more than no path
      text += '\n';
      continue;
    }
    for (const PathKey& key : tensor.path) {
      text += std::holds_alternative<int64_t>(key) ? fmt::format(" [{}]", std::get<int64_t>(key))
                                                   : fmt::format(" .{}", std::get<std::string>(key));
    }
    text += '\n';
  }
  return text;
}

/// Converts what lies at `from` and proves it.
class Chain {
 public:
  Chain(const fs::path& c, uint64_t seed)
      : dice_(seed), store_(std::make_shared<MemoryStore>()), expected_(expected_of(c)) {
    now_ = open_source(posix_store(), c / "checkpoint");
    values_ = values_of(*now_);
  }

  void to(TargetFormat format, bool layout) {
    const std::string name = fmt::format("/step{}", ++steps_);
    SCOPED_TRACE(fmt::format("{} to {}", name, static_cast<int>(format)));
    ConvertOptions options{.to = format};
    options.plan = {dice_.one_of(std::vector<int64_t>{kLeastMemory, 64 << 20, 1 << 30}),
                    static_cast<size_t>(dice_.pick(1, 9))};
    options.plan.largest_tile = dice_.one_of(std::vector<int64_t>{4096, 100'000, 4 << 20});
    options.max_shard_bytes = dice_.pick(1000, 300'000);
    if (layout) options.layout = random_rules(dice_, now_->catalog());
    if (format == TargetFormat::kSafetensors) drop_what_safetensors_lacks(options);
    const std::string properties = properties_of(*now_);
    const Report report = run_conversion(*now_, plan_conversion(*now_, options), *store_, name,
                                         {.read_back = dice_.pick(0, 2) == 0});
    now_ = open_source(store_, name);
    EXPECT_EQ(digests_of(*now_), expected_);
    EXPECT_EQ(faults_of(*now_), "");
    if (format == TargetFormat::kSafetensors) {
      EXPECT_EQ(report.left_out.size(), values_.size());
      values_.clear();
    } else {
      for (const std::string& left : report.left_out) {
        left_out_.insert(left);
        values_.erase(left);
      }
      EXPECT_EQ(properties_of(*now_), properties);
    }
    EXPECT_TRUE(values_of(*now_) == values_);
  }

  const std::set<std::string>& left_out() const { return left_out_; }
  Dice& dice() { return dice_; }

 private:
  void drop_what_safetensors_lacks(ConvertOptions& options) {
    for (const TensorEntry& tensor : now_->catalog().tensors) {
      if (!info(tensor.dtype).safetensors.empty()) continue;
      options.selection.drop.push_back(tensor.name);
      expected_.erase(tensor.name);
    }
  }

  Dice dice_;
  std::shared_ptr<MemoryStore> store_;
  Digests expected_;
  std::map<std::string, Value> values_;
  std::set<std::string> left_out_;
  std::unique_ptr<Source> now_;
  int steps_ = 0;
};

class ConversionChain : public testing::TestWithParam<fs::path> {};

TEST_P(ConversionChain, ThroughDcpAndSpolia) {
  Chain chain(GetParam(), std::hash<std::string>()(GetParam().filename().string()));
  chain.to(TargetFormat::kDcp, true);
  chain.to(TargetFormat::kSpolia, true);
  chain.to(TargetFormat::kDcp, false);
  EXPECT_TRUE(chain.left_out().empty()) << *chain.left_out().begin();
}

TEST_P(ConversionChain, ThroughSpoliaAndSafetensors) {
  Chain chain(GetParam(), 7 + std::hash<std::string>()(GetParam().filename().string()));
  chain.to(TargetFormat::kSpolia, true);
  chain.to(TargetFormat::kSafetensors, false);
  chain.to(TargetFormat::kDcp, true);
}

TEST_P(ConversionChain, SlowEveryTwoFormatsInTurn) {
  const std::vector<TargetFormat> formats = {TargetFormat::kSafetensors, TargetFormat::kDcp,
                                             TargetFormat::kSpolia};
  uint64_t seed = 1;
  for (TargetFormat first : formats) {
    for (TargetFormat second : formats) {
      for (int round = 0; round < 4; ++round) {
        SCOPED_TRACE(fmt::format("seed {}", seed));
        Chain chain(GetParam(), seed++);
        for (TargetFormat format : {first, second, chain.dice().one_of(formats)}) {
          chain.to(format, format != TargetFormat::kSafetensors && chain.dice().pick(0, 4) > 0);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ByPyTorch, ConversionChain, testing::ValuesIn(all_cases()), name_of_case);

}  // namespace
}  // namespace spolia
