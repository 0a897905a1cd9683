#include "spolia/assemble/assembler.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <latch>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/assemble/testing_devices.h"
#include "spolia/assemble/testing_streams.h"
#include "spolia/base/error.h"
#include "spolia/comm/world.h"
#include "spolia/layout/test_random.h"
#include "spolia/mapping/syntax.h"
#include "spolia/mapping/testing_arrays.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

std::vector<int64_t> shuffled(int64_t count) {
  std::vector<int64_t> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  for (int64_t i = count; i > 1; --i)
    std::swap(ranks[static_cast<size_t>(i - 1)], ranks[static_cast<size_t>(pick(0, i))]);
  return ranks;
}

Formation random_formation(int64_t ranks) {
  Formation formation;
  formation.one_group = pick(0, 2) == 0;
  if (formation.one_group) return formation;
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= ranks; ++d) {
    if (ranks % d == 0) divisors.push_back(d);
  }
  const int64_t rows = divisors[static_cast<size_t>(pick(0, std::ssize(divisors)))];
  const std::vector<int64_t> order = shuffled(ranks);
  formation.rows.resize(static_cast<size_t>(rows));
  for (int64_t i = 0; i < ranks; ++i)
    formation.rows[static_cast<size_t>(i % rows)].push_back(order[static_cast<size_t>(i)]);
  return formation;
}

WantedTensor random_tensor(const std::string& name, int64_t ranks, bool large) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kFloat64,
                               DType::kComplex128};
  WantedTensor tensor{.name = name, .dtype = kDTypes[pick(0, 5)]};
  const int64_t dims = pick(0, 4);
  for (int64_t d = 0; d < dims; ++d) tensor.shape.push_back(pick(0, 20) == 0 ? 0 : pick(1, 14));
  if (large && dims > 0) tensor.shape[0] = pick(1000, 4000);
  // A part of the ranks holds it, in a line or a grid.
  std::vector<int64_t> order = shuffled(ranks);
  order.resize(static_cast<size_t>(pick(1, ranks + 1)));
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= std::ssize(order); ++d) {
    if (std::ssize(order) % d == 0) divisors.push_back(d);
  }
  const int64_t first = divisors[static_cast<size_t>(pick(0, std::ssize(divisors)))];
  const Dims sizes = {first, std::ssize(order) / first};
  if (pick(0, 5) == 0 || dims == 0) {  // whole on these
    std::ranges::sort(order);
    tensor.on_ranks = order;
    return tensor;
  }
  std::vector<std::string> placements;
  bool ragged = false;
  for (int64_t size : sizes) {
    switch (ragged ? 0 : pick(0, 5)) {
      case 0:
        placements.emplace_back("replicate");
        break;
      case 1:
        placements.push_back(fmt::format("strided({}, {})", pick(0, dims), pick(1, 4)));
        break;
      case 2:
        if (placements.empty() || placements[0] == "replicate") {
          std::vector<int64_t> units;
          for (int64_t i = 0; i < size; ++i) units.push_back(pick(0, 4));
          if (std::ranges::max(units) == 0) units[0] = 1;
          const int64_t sum = std::accumulate(units.begin(), units.end(), int64_t{0});
          if (tensor.shape[0] > 0) tensor.shape[0] = (tensor.shape[0] + sum - 1) / sum * sum;
          placements.push_back(fmt::format("ragged([0], [{}])", fmt::join(units, ", ")));
          ragged = true;
          break;
        }
        [[fallthrough]];
      default:
        placements.push_back(fmt::format("shard({})", pick(0, dims)));
    }
  }
  tensor.layout = layout_of(fmt::format("[{}] over {}x{} on [{}]", fmt::join(placements, ", "), sizes[0],
                                        sizes[1], fmt::join(order, ", ")));
  return tensor;
}

/// What the ranks of a test do with the stream.
enum class Behaviour { kReadsAll, kIsSlow, kStops, kLeaves, kThrows, kThrowsPast };

struct Case {
  int ranks = 1;
  Stage stage;
  Formation formation;
  std::vector<WantedTensor> tensors;
  std::vector<AssemblerOptions> options;  // of each rank
  Behaviour behaviour = Behaviour::kReadsAll;
  int64_t who = 0, when = 0;  // which rank stops, and after how many items
};

int64_t largest_room(const std::vector<WantedTensor>& tensors) {
  int64_t largest = 0;
  for (const WantedTensor& tensor : tensors) {
    largest = std::max(largest, (byte_size(tensor.dtype, tensor.shape) + 63) / 64 * 64);
  }
  return largest;
}

Case random_case(int most_ranks = 12) {
  Case c;
  c.ranks = static_cast<int>(pick(1, most_ranks + 1));
  c.formation = random_formation(c.ranks);
  const int64_t tensors = pick(1, 12);
  for (int64_t t = 0; t < tensors; ++t) {
    c.tensors.push_back(random_tensor(fmt::format("t{:02}", t), c.ranks, pick(0, 6) == 0));
  }
  AssemblerOptions common;
  common.pieces = pick(0, 2) == 0;
  const int64_t least = common.pieces ? 2 * kLeastStaging : largest_room(c.tensors) + kLeastStaging;
  common.memory = pick(0, 2) == 0 ? least : pick(least, 4 * least);
  if (pick(0, 4) == 0) common.memory = int64_t{1} << 28;
  common.round_bytes =
      std::vector<int64_t>{100, 3000, 20000, int64_t{32} << 20}[static_cast<size_t>(pick(0, 4))];
  const bool all_alike = pick(0, 2) == 0;
  for (int64_t rank = 0; rank < c.ranks; ++rank) {
    AssemblerOptions& own = c.options.emplace_back(common);
    if (all_alike) continue;
    if (pick(0, 3) == 0) {
      own.names.emplace();
      for (const WantedTensor& tensor : c.tensors) {
        if (pick(0, 2) == 0) own.names->push_back(tensor.name);
      }
    } else if (pick(0, 2) == 0) {
      own.parts = pick(1, 5);
      own.part = pick(0, own.parts);
    }
  }
  c.behaviour = static_cast<Behaviour>(pick(0, 6));
  c.who = pick(0, c.ranks);
  c.when = pick(0, tensors + 1);
  return c;
}

/// The names that a rank wants, by the rule that the options state.
std::vector<std::string> wanted_names(const Case& c, size_t rank) {
  const AssemblerOptions& own = c.options[rank];
  if (own.names) return *own.names;
  std::vector<std::string> names;
  const int64_t count = std::ssize(c.tensors);
  int64_t next = 0;
  for (int64_t part = 0; part < own.parts; ++part) {
    const int64_t size = count / own.parts + (part < count % own.parts ? 1 : 0);
    for (int64_t i = 0; i < size; ++i, ++next) {
      if (part == own.part) names.push_back(c.tensors[static_cast<size_t>(next)].name);
    }
  }
  return names;
}

struct OwnFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Pulls as the case says, and checks every byte. The bytes that were handed out, by name.
std::map<std::string, int64_t> pull(const Case& c, World& world, Assembler& assembler,
                                    const std::map<std::string, std::vector<std::byte>>& expected) {
  std::map<std::string, int64_t> bytes;
  const bool odd = world.rank() == c.who;
  for (int64_t count = 0;; ++count) {
    if (odd && count == c.when) {
      if (c.behaviour == Behaviour::kStops) assembler.stop();
      if (c.behaviour == Behaviour::kLeaves) return bytes;
      if (c.behaviour == Behaviour::kThrows)
        assembler.fail(std::make_exception_ptr(OwnFailure("no more room")));
      if (c.behaviour == Behaviour::kThrowsPast) throw OwnFailure("no more room");
    }
    if (odd && c.behaviour == Behaviour::kIsSlow) std::this_thread::sleep_for(std::chrono::microseconds(300));
    const auto item = assembler.next();
    if (!item) return bytes;
    const std::vector<std::byte>& all = expected.at(std::string(item->name));
    // A piece is a run of the row-major order.
    int64_t first = 0;
    const Dims strides = row_major_strides(item->shape);
    for (size_t d = 0; d < strides.size(); ++d) first += item->box.offsets[d] * strides[d];
    first *= element_bytes(item->dtype);
    EXPECT_TRUE(item->memory.bytes() == 0 || item->memory.is_dense());
    EXPECT_LE(first + item->memory.bytes(), std::ssize(all));
    const std::vector<std::byte> got = host_bytes(item->memory);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin() + first))
        << item->name << " on rank " << world.rank();
    const Device device = c.options[static_cast<size_t>(world.rank())].device.value_or(world.all()->device());
    EXPECT_EQ(item->memory.device, device);
    EXPECT_EQ(bytes[std::string(item->name)], first);  // pieces come in order
    bytes[std::string(item->name)] += item->memory.bytes();
    EXPECT_EQ(item->last, bytes[std::string(item->name)] == std::ssize(all)) << item->name;
    EXPECT_EQ(item->whole, item->memory.bytes() == std::ssize(all));
    if (count % 3 == 0) {
      const Buffer kept = assembler.take();
      EXPECT_GE(kept.size(), item->memory.bytes());
      EXPECT_EQ(kept.data(), item->memory.data);
    }
  }
}

void run_case(const Case& c) {
  std::map<std::string, std::vector<std::byte>> expected;
  for (const WantedTensor& tensor : c.tensors) expected[tensor.name] = expected_bytes(tensor);
  std::mutex mutex;
  int64_t failed = 0;
  std::vector<StreamEnd> ends(static_cast<size_t>(c.ranks), StreamEnd::kNot);
  int64_t sent = 0, planned = 0;
  const auto on_rank = [&](World& world, const StateDict& dict) {
    const auto rank = static_cast<size_t>(world.rank());
    const Ensemble ensemble(world, c.formation);
    try {
      const auto assembler = ensemble.assembler(dict, c.options[rank]);
      const auto bytes = pull(c, world, *assembler, expected);
      const StreamReport report = assembler->report();
      EXPECT_LE(report.peak_bytes, c.options[rank].memory);
      EXPECT_LE(assembler->plan().peak(), c.options[rank].memory);
      std::lock_guard lock(mutex);
      ends[rank] = assembler->end();
      sent += report.sent;
      planned = assembler->plan().sent;
      EXPECT_LE(assembler->plan().least, planned);
      if (assembler->end() == StreamEnd::kEnded) {
        EXPECT_EQ(assembler->ended_by(), c.who);
      }
      if (assembler->end() == StreamEnd::kDone) {
        const std::vector<std::string> names = wanted_names(c, rank);
        EXPECT_EQ(bytes.size(), names.size());
        for (const std::string& name : names) {
          const auto at = bytes.find(name);
          ASSERT_NE(at, bytes.end()) << name;
          EXPECT_EQ(at->second, std::ssize(expected[name])) << name;
        }
      }
    } catch (const OwnFailure&) {
      EXPECT_EQ(world.rank(), c.who);
      std::lock_guard lock(mutex);
      ++failed;
    } catch (const Error& error) {
      const std::string told =
          c.behaviour == Behaviour::kThrows ? "no more room" : "an exception has ended its part";
      EXPECT_NE(std::string(error.what()).find(told), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", c.who)), std::string::npos)
          << error.what();
      std::lock_guard lock(mutex);
      ++failed;
    }
  };
  c.stage.launch(c.ranks, [&](World& world) {
    RankState state(c.tensors, world.rank());
    state.fill();
    c.stage.place(state.dict(), world.rank(), [&](StateDict& dict) { on_rank(world, dict); });
    state.expect_filled();
  });
  const bool fails = c.behaviour == Behaviour::kThrows || c.behaviour == Behaviour::kThrowsPast;
  if (fails) {
    // On all, unless the stream was over before.
    EXPECT_TRUE(failed == 0 || failed == c.ranks || failed == 1) << failed << " of " << c.ranks;
  } else {
    EXPECT_EQ(failed, 0);
    EXPECT_EQ(sent, planned);
  }
  if (c.behaviour == Behaviour::kReadsAll || c.behaviour == Behaviour::kIsSlow) {
    for (StreamEnd end : ends) EXPECT_EQ(end, StreamEnd::kDone);
  }
}

void check_case(const Case& c) {
  RC_LOG() << c.ranks << " ranks, " << c.formation.text() << ", " << c.stage.text() << ", behaviour "
           << static_cast<int>(c.behaviour) << " on " << c.who << " at " << c.when << ", memory "
           << c.options[0].memory << " rounds " << c.options[0].round_bytes << "\n";
  for (const WantedTensor& t : c.tensors) {
    RC_LOG() << t.name << " " << list_text(t.shape) << " "
             << (t.layout ? t.layout->text() : fmt::format("on {}", t.on_ranks)) << "\n";
  }
  run_case(c);
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(Assembler, StreamsWholeTensorsWhateverTheLayoutsGridsBudgetsAndConsumers, ()) {
  Case c = random_case();
  c.stage.packs = pick(0, 3) == 0;
  check_case(c);
}

/// Host and device state over threads and NCCL; each rank wants its items where it likes.
Case random_device_case() {
  Case c = random_case(6);
  c.stage.state = static_cast<Stage::State>(pick(0, 3));
  c.stage.nccl = pick(0, 3) > 0;
  for (size_t rank = 0; rank < c.options.size(); ++rank) {
    const int64_t where = pick(0, 3);
    if (where == 1) c.options[rank].device = Device{};
    if (where == 2) c.options[rank].device = device_of(static_cast<int64_t>(rank));
  }
  return c;
}

RC_GTEST_PROP(Assembler, StreamsFromAndToTheMemoryOfDevices, ()) { check_case(random_device_case()); }

/// A state of numbers: every element of a source holds one that all dtypes have.
class NumberedState {
 public:
  NumberedState(const std::vector<WantedTensor>& tensors, const Arrays& arrays, int64_t rank)
      : state_(tensors, rank) {
    for (StateDict::Entry& entry : state_.dict().entries()) {
      const LocalTensor& tensor = *entry.tensor();
      for (const LocalTensor::Piece& piece : tensor.pieces(rank)) {
        for_each_element(piece, tensor.shape, [&](int64_t at, std::byte* place) {
          const auto value = static_cast<double>(arrays.at(entry.name).values[static_cast<size_t>(at)]);
          cast(tensor.memory.dtype, place, DType::kFloat64, &value, 1);
        });
      }
    }
  }
  StateDict& dict() { return state_.dict(); }

 private:
  RankState state_;
};

std::vector<double> numbers_of(const StreamItem& item) {
  std::vector<double> numbers(static_cast<size_t>(numel(item.memory.shape)));
  cast(DType::kFloat64, numbers.data(), item.dtype, host_bytes(item.memory).data(), std::ssize(numbers));
  return numbers;
}

/// Sources for mappings, of random dtypes and layouts.
constexpr const char* kMappings[] = {
    "a -> b.renamed",
    "a -> first\na -> second, permute='[1, 0]'\na -> third, dtype='bfloat16'",
    "a^T -> t\nt, c -> joined, axis=0",
    "a, b -> s, axis=1\ns -> d0, d1, axis=0",
    "a -> x, y, z, axis=0\nx -> x.cast, dtype='float64'\ny^T -> y.turned",
    ("a -> wide, dtype='float64'\nb -> narrow, dtype='float16'\n_ -> new, shape='[5, 3]', dtype='bfloat16', "
     "fill=3"),
    "d -> d.turned, permute='[2, 0, 1]'\na -> _",
    "d -> flat, reshape='[3, 2, 20]'\nflat -> lower, upper, axis=0",
    "a -> tied.one\na -> tied.two\na -> tied.three, dtype='float16'",
    "a, b -> s, axis=0\ns -> back0, back1, back2, axis=1",
};

void check_mapping(int most_ranks, const Stage& stage) {
  Case c;
  c.stage = stage;
  c.ranks = static_cast<int>(pick(1, most_ranks + 1));
  c.formation = random_formation(c.ranks);
  const Dims shapes[] = {{6, 12}, {6, 12}, {4, 6}, {3, 2, 20}};
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64};
  const DType common = kDTypes[pick(0, 3)];
  std::vector<TensorDescription> described;
  for (size_t t = 0; t < 4; ++t) {
    WantedTensor tensor;
    do {  // a ragged one may change the shape
      tensor = random_tensor(std::string(1, "abcd"[t]), c.ranks, false);
      tensor.dtype = common;
      if (tensor.shape.size() != shapes[t].size()) continue;
      tensor.shape = shapes[t];
    } while (tensor.shape.size() != shapes[t].size() ||
             (tensor.layout && tensor.layout->text().find("ragged") != std::string::npos));
    c.tensors.push_back(tensor);
    described.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  Arrays arrays = numbered_arrays(described);
  for (auto& [name, array] : arrays) {
    for (int64_t& value : array.values) value %= 251;
  }
  const std::string text = kMappings[pick(0, std::ssize(kMappings))];
  const Mapping mapping = parse_mapping(text);
  const Arrays expected = evaluated(compile_mapping(mapping, {.source = described}), described, arrays);
  AssemblerOptions options;
  options.mapping = &mapping;
  options.memory = pick(2, 6) * kLeastStaging;
  options.round_bytes = pick(0, 2) == 0 ? 200 : int64_t{1} << 20;
  RC_LOG() << c.ranks << " ranks, " << c.formation.text() << "\n" << text << "\n";
  for (const WantedTensor& t : c.tensors) RC_LOG() << (t.layout ? t.layout->text() : "whole") << "\n";
  const auto on_rank = [&](World& world, const StateDict& dict) {
    const Ensemble ensemble(world, c.formation);
    const auto assembler = ensemble.assembler(dict, options);
    size_t items = 0;
    while (const auto item = assembler->next()) {
      ++items;
      const auto at = expected.find(std::string(item->name));
      ASSERT_NE(at, expected.end()) << item->name;
      EXPECT_EQ(item->dtype, at->second.dtype);
      EXPECT_EQ(item->shape, at->second.shape);
      std::vector<double> numbers(at->second.values.begin(), at->second.values.end());
      if (item->name == "new") std::ranges::fill(numbers, 3.0);
      EXPECT_EQ(numbers_of(*item), numbers) << item->name;
    }
    EXPECT_EQ(items, expected.size());
    EXPECT_LE(assembler->report().peak_bytes, options.memory);
  };
  c.stage.launch(c.ranks, [&](World& world) {
    NumberedState state(c.tensors, arrays, world.rank());
    c.stage.place(state.dict(), world.rank(), [&](StateDict& dict) { on_rank(world, dict); });
  });
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(Assembler, StreamsWhatAMappingMakes, ()) { check_mapping(8, {.packs = pick(0, 3) == 0}); }

RC_GTEST_PROP(Assembler, StreamsWhatAMappingMakesOnDevices, ()) {
  const auto state = static_cast<Stage::State>(pick(0, 3));
  check_mapping(4, {.state = state, .nccl = pick(0, 2) == 0});
}

TEST(Assembler, CastsOfALargeTensorTakeLittleMemoryBesideIt) {
  const std::vector<WantedTensor> tensors = {
      {"a", DType::kFloat32, {600, 70}, layout_of("[shard(1)] over 4"), {}, {}}};
  const std::vector<TensorDescription> described = {{"a", DType::kFloat32, {600, 70}}};
  Arrays arrays = numbered_arrays(described);
  for (int64_t& value : arrays["a"].values) value %= 251;
  const Mapping mapping =
      parse_mapping("a -> half, dtype='bfloat16'\na -> turned, permute='[1, 0]', dtype='float64'");
  const Arrays expected = evaluated(compile_mapping(mapping, {.source = described}), described, arrays);
  for (const Formation& formation : {Formation(), Formation{false, {{1, 0}, {2, 3}}}}) {
    launch(4, [&](World& world) {
      NumberedState state(tensors, arrays, world.rank());
      const Ensemble ensemble(world, formation);
      AssemblerOptions options;
      options.mapping = &mapping;
      options.memory = 600 * 70 * 8 + kLeastStaging;
      if (world.rank() == 3) options.names = {"half"};
      const auto assembler = ensemble.assembler(state.dict(), options);
      EXPECT_GT(assembler->plan().waves.size(), 10);
      size_t items = 0;
      while (const auto item = assembler->next()) {
        ++items;
        const std::vector<int64_t>& numbers = expected.at(std::string(item->name)).values;
        EXPECT_EQ(numbers_of(*item), std::vector<double>(numbers.begin(), numbers.end())) << item->name;
      }
      EXPECT_EQ(items, world.rank() == 3 ? 1 : 2);
      EXPECT_LE(assembler->report().peak_bytes, options.memory);
    });
  }
}

TEST(Assembler, TheNextRoundIsOnItsWayWhileThisOneIsUsed) {
  const std::vector<WantedTensor> tensors = {
      {"a", DType::kFloat32, {400}, layout_of("[shard(0)] over 2"), {}, {}},
      {"b", DType::kFloat32, {400}, layout_of("[shard(0)] over 2"), {}, {}},
      {"c", DType::kFloat32, {400}, layout_of("[shard(0)] over 2"), {}, {}}};
  launch(2, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    AssemblerOptions options;
    options.round_bytes = 1600;
    Assembler assembler(*world.all(), state.dict(), options);
    ASSERT_EQ(assembler.plan().rounds.size(), 3);
    EXPECT_TRUE(assembler.plan().rounds[0].ahead);
    EXPECT_TRUE(assembler.plan().rounds[1].ahead);
    // Where there is room for one alone, none is ahead.
    options.memory = 1664 + kLeastStaging;
    Assembler narrow(*world.all(), state.dict(), options);
    EXPECT_FALSE(narrow.plan().rounds[0].ahead);
    EXPECT_EQ(narrow.plan().arena[0], 1600);
    while (narrow.next()) {
    }
    EXPECT_EQ(narrow.end(), StreamEnd::kDone);
    while (assembler.next()) {
    }
    EXPECT_EQ(assembler.end(), StreamEnd::kDone);
  });
}

TEST(Assembler, SlowReadersOnTwelveRanksSlow) {
  // Every number of ranks, one group and grids, from the least memory to all of it.
  for (int ranks = 1; ranks <= 12; ++ranks) {
    const std::string on = " over " + std::to_string(ranks);
    Case c{.ranks = ranks,
           .tensors = {{"a", DType::kFloat32, {250, 40}, layout_of("[shard(0)]" + on), {}, {}},
                       {"b", DType::kBFloat16, {40, 110}, layout_of("[shard(1)]" + on), {}, {}},
                       {"c", DType::kInt64, {}, nullptr, {}, {}},
                       {"d", DType::kFloat64, {17, 3, 9}, layout_of("[strided(0, 2)]" + on), {}, {}}},
           .behaviour = Behaviour::kIsSlow};
    for (int rows = 0; rows <= ranks; ++rows) {
      if (rows > 0 && ranks % rows != 0) continue;
      c.formation = {};
      if (rows > 0) {
        c.formation = {false, std::vector<std::vector<int64_t>>(static_cast<size_t>(rows))};
        for (int64_t rank = 0; rank < ranks; ++rank)
          c.formation.rows[static_cast<size_t>(rank % rows)].push_back(ranks - 1 - rank);
      }
      for (const int64_t more : {0, 1000, 40'000, 1'000'000}) {
        for (const Behaviour behaviour : {Behaviour::kIsSlow, Behaviour::kStops, Behaviour::kLeaves,
                                          Behaviour::kThrows, Behaviour::kThrowsPast}) {
          c.behaviour = behaviour;
          c.who = ranks / 2;
          c.when = 1 + more % 3;
          AssemblerOptions options;
          options.memory = 40'000 + 64 + kLeastStaging + more;
          options.round_bytes = 9000;
          c.options.assign(static_cast<size_t>(ranks), options);
          run_case(c);
        }
      }
    }
  }
}

/// Pulls to the end on all ranks, with a fault that `arm` makes once all have their assemblers. Whatever was
/// handed out is right; where a rank fails, all do, in the words `told`, and the groups are as good as
/// before. Returns whether it failed.
bool pull_with_fault(const Stage& stage, const Formation& formation, const std::function<void()>& arm,
                     const std::vector<std::string>& told) {
  constexpr int kRanks = 4;
  std::vector<WantedTensor> tensors;
  for (int t = 0; t < 8; ++t) {
    const std::string name = fmt::format("t{}", t);
    tensors.push_back({name, DType::kFloat32, {80, 20 + t}, layout_of("[shard(0)] over 4"), {}, {}});
    tensors.push_back({name + ".b", DType::kBFloat16, {30, 40}, layout_of("[shard(1)] over 4"), {}, {}});
  }
  std::map<std::string, std::vector<std::byte>> expected;
  for (const WantedTensor& tensor : tensors) expected[tensor.name] = expected_bytes(tensor);
  std::atomic<int> failed{0};
  stage.launch(kRanks, [&](World& world) {
    RankState host(tensors, world.rank());
    host.fill();
    stage.place(host.dict(), world.rank(), [&](StateDict& dict) {
      const Ensemble ensemble(world, formation);
      AssemblerOptions options;
      options.round_bytes = 10'000;
      const auto assembler = ensemble.assembler(dict, options);
      EXPECT_GT(assembler->plan().rounds.size(), 5);
      world.all()->barrier().wait();
      if (world.rank() == 0) arm();
      world.all()->barrier().wait();
      try {
        while (const auto item = assembler->next()) {
          EXPECT_EQ(host_bytes(item->memory), expected.at(std::string(item->name))) << item->name;
        }
        EXPECT_EQ(assembler->end(), StreamEnd::kDone);
      } catch (const Error& error) {
        ++failed;
        EXPECT_EQ(error.kind(), ErrorKind::kIo) << error.what();
        for (const std::string& part : told)
          EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
        EXPECT_FALSE(assembler->next().has_value());
        EXPECT_EQ(assembler->end(), StreamEnd::kEnded);
      }
      FaultyCuda::reset();
      world.all()->barrier().wait();
      while (ensemble.assembler(dict, options)->next()) break;  // the groups still work
    });
  });
  EXPECT_TRUE(failed == 0 || failed == kRanks) << failed;
  return failed > 0;
}

TEST(Assembler, AFailureOfOneRankIsToldToAllBeforeWhatItSpoiledIsHandedOut) {
  const Formation formations[] = {{}, {false, {{0, 3}, {2, 1}}}};
  for (const Formation& formation : formations) {
    for (const bool packs : {false, true}) {
      const Stage stage{.state = Stage::State::kDevice, .packs = packs};
      int failures = 0;
      for (int nth = 1; nth < 400; nth += 1 + nth / 2) {
        failures += pull_with_fault(stage, formation, [&] { FaultyCuda::fail_copy(1, nth); },
                                    {"streaming: rank 1", "cuda:1"});
      }
      EXPECT_GE(failures, 5);
    }
  }
}

TEST(Assembler, MemoryThatThereIsNotIsToldToAll) {
  const Stage stage{.state = Stage::State::kHost, .nccl = true};
  int failures = 0;
  for (int nth = 1; nth < 40; nth += 1 + nth / 2) {
    failures += pull_with_fault(stage, {}, [&] { FaultyCuda::fail_allocation(2, nth, 2000); },
                                {"streaming: rank 2", "cuda:2"});
  }
  EXPECT_GE(failures, 3);
}

TEST(Assembler, ARankThatDiesHoldsNobodyUp) {
  const std::vector<WantedTensor> tensors = {
      {"a", DType::kFloat32, {400, 30}, layout_of("[shard(0)] over 3"), {}, {}},
      {"b", DType::kFloat32, {400, 30}, layout_of("[shard(1)] over 3"), {}, {}},
      {"c", DType::kFloat32, {400, 30}, nullptr, {}, {2}}};
  int64_t deaths = 0;
  for (bool dies = true; dies; deaths += 3) {
    const auto body = [&](World& world) {
      RankState state(tensors, world.rank());
      state.fill();
      AssemblerOptions options;
      options.round_bytes = 50'000;
      Assembler assembler(*world.all(), state.dict(), options);
      while (assembler.next()) {
      }
    };
    try {
      launch(3, body, {.decorate = on_rank(1, dying(deaths))});
      dies = false;  // there are no so many operations
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo) << error.what();
    }
  }
  EXPECT_GT(deaths, 20);
}

/// Pulls to the end on all ranks, which keep their errors to themselves: only broken groups tell the others.
/// What fails is on rank 1. Nobody waits for the time-out. `arm` is called on each rank once all have their
/// groups. Returns how many ranks failed.
int fail_in_silence(const Stage& stage, const Formation& formation, const Decorator& decorate,
                    const std::function<void(World&)>& arm) {
  constexpr int kRanks = 4;
  std::vector<WantedTensor> tensors;
  for (int t = 0; t < 4; ++t) {
    tensors.push_back(
        {fmt::format("t{}", t), DType::kFloat32, {400}, layout_of("[shard(0)] over 4"), {}, {}});
  }
  std::latch over(kRanks);  // a rank that leaves breaks its groups
  std::atomic<int> failed{0};
  const auto body = [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    const Ensemble ensemble(world, formation);
    AssemblerOptions options;
    options.round_bytes = 1600;
    arm(world);
    try {
      const auto assembler = ensemble.assembler(state.dict(), options);
      while (assembler->next()) {
      }
      EXPECT_EQ(assembler->end(), StreamEnd::kDone);
    } catch (const Error& error) {
      ++failed;
      const std::string told = error.what();
      EXPECT_NE(error.kind(), ErrorKind::kTimeout) << told;
      EXPECT_TRUE(world.rank() == 1 || told.find("rank 1") != std::string::npos) << told;
    }
    over.arrive_and_wait();
  };
  stage.launch(kRanks, body, {.timeout = std::chrono::minutes(1), .decorate = decorate});
  return failed;
}

TEST(Assembler, AGroupThatFailsOnOneRankHoldsNobodyUp) {
  const Formation grid{false, {{0, 3}, {2, 1}}};
  const auto of_size = [](size_t size) {
    return [size](const GroupBackend& backend) { return backend.ranks().size() == size; };
  };
  for (const auto& [formation, size] : {std::pair{Formation{}, size_t{4}}, std::pair{grid, size_t{2}}}) {
    int64_t operations = 0;
    for (bool fails = true; fails; operations += fails) {
      fails = fail_in_silence({}, formation, where(of_size(size), on_rank(1, dying(operations))),
                              [](World&) {}) > 0;
    }
    EXPECT_GT(operations, 20);
  }
}

TEST(Assembler, MemoryThatAGroupHasNotHoldsNobodyUp) {
  // Also the few bytes by which ranks tell each other how they are.
  const Formation formations[] = {{}, {false, {{0, 3}, {2, 1}}}};
  for (const Formation& formation : formations) {
    int failures = 0;
    for (int nth = 1, failed = 1; failed > 0; ++nth) {
      failed = fail_in_silence({.nccl = true}, formation, {}, [&](World& world) {
        world.all()->barrier().wait();
        if (world.rank() == 0) FaultyCuda::fail_allocation(1, nth, 1);
        world.all()->barrier().wait();
      });
      FaultyCuda::reset();
      failures += failed > 0;
    }
    EXPECT_GT(failures, 10);
  }
}

TEST(Assembler, WhatIsTakenIsHandedOverAndNoMoreCounted) {
  std::vector<WantedTensor> tensors;
  for (int t = 0; t < 12; ++t)
    tensors.push_back({fmt::format("t{:02}", t), DType::kFloat32, {250}, layout_of("[shard(0)] over 2")});
  launch(2, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    AssemblerOptions options;
    options.memory = 2 * 1024 + kLeastStaging;  // two tensors at once
    options.round_bytes = 1024;
    Assembler assembler(*world.all(), state.dict(), options);
    EXPECT_THROW(assembler.take(), InvalidArgumentError);
    std::vector<std::pair<std::string, Buffer>> kept;
    while (const auto item = assembler.next()) {
      kept.emplace_back(item->name, assembler.take());
      EXPECT_EQ(kept.back().second.data(), item->memory.data);
      EXPECT_THROW(assembler.take(), InvalidArgumentError);
    }
    EXPECT_THROW(assembler.take(), InvalidArgumentError);
    ASSERT_EQ(kept.size(), tensors.size());
    for (size_t t = 0; t < kept.size(); ++t) {
      EXPECT_EQ(kept[t].first, tensors[t].name);
      EXPECT_EQ(host_bytes({kept[t].second.data(), DType::kUInt8, {1000}, {1}}), expected_bytes(tensors[t]));
    }
    EXPECT_LE(assembler.report().peak_bytes, options.memory);
  });
}

TEST(Assembler, ThePeakIsWhatThePlanSaysAndNoMore) {
  const std::vector<WantedTensor> tensors = {
      {"a", DType::kFloat32, {1000, 60}, layout_of("[shard(1)] over 3"), {}, {}},
      {"b", DType::kFloat32, {1000, 60}, layout_of("[shard(0)] over 3"), {}, {}}};
  for (const Stage& stage : {Stage{}, Stage{.packs = true}, Stage{.state = Stage::State::kDevice},
                             Stage{.state = Stage::State::kBoth, .nccl = true}}) {
    stage.launch(3, [&](World& world) {
      RankState state(tensors, world.rank());
      state.fill();
      stage.place(state.dict(), world.rank(), [&](StateDict& dict) {
        AssemblerOptions options;
        options.memory = 2 * 240'000 + 128 + kLeastStaging;
        Assembler assembler(*world.all(), dict, options);
        while (assembler.next()) {
        }
        EXPECT_LE(assembler.report().peak_bytes, assembler.plan().peak());
        EXPECT_GE(assembler.report().peak_bytes, 240'000);
      });
    });
  }
}

TEST(Assembler, AFillThatADTypeHasNotIsRefused) {
  const Mapping wrong = parse_mapping("_ -> new, shape='[3]', dtype='int8', fill='0.5'");
  launch(2, [&](World& world) {
    RankState state({}, world.rank());
    AssemblerOptions options;
    options.mapping = &wrong;
    EXPECT_THROW(Assembler(*world.all(), state.dict(), options), UnsupportedError);
    world.all()->barrier().wait();
  });
}

// What is refused, on every rank, before anything is sent.

void expect_refused(int ranks, const std::vector<WantedTensor>& tensors, ErrorKind kind,
                    const std::vector<std::string>& parts,
                    const std::function<AssemblerOptions(int64_t rank)>& options,
                    const std::function<void(StateDict&, int64_t rank)>& change = {}) {
  launch(ranks, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    if (change) change(state.dict(), world.rank());
    try {
      Assembler assembler(*world.all(), state.dict(), options(world.rank()));
      ADD_FAILURE() << "rank " << world.rank() << " is not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      for (const std::string& part : parts)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    world.all()->barrier().wait();  // the group is as good as before
  });
}

std::vector<WantedTensor> two_tensors() {
  return {{"a", DType::kFloat32, {1000, 100}, layout_of("[shard(0)] over 3"), {}, {}},
          {"b", DType::kFloat32, {10}, nullptr, {}, {}}};
}

AssemblerOptions with(const std::function<void(AssemblerOptions&)>& change) {
  AssemblerOptions options;
  change(options);
  return options;
}

TEST(Assembler, StatesTheLeastMemoryAndThatDoes) {
  const auto asking = [](int64_t memory) {
    return [=](int64_t) { return with([&](AssemblerOptions& o) { o.memory = memory; }); };
  };
  const int64_t least = 400'000 + kLeastStaging;
  expect_refused(3, two_tensors(), ErrorKind::kUnsupported, {"\"a\"", std::to_string(least)},
                 asking(least - 1));
  Case c{.ranks = 3, .tensors = two_tensors()};
  for (int64_t rank = 0; rank < 3; ++rank) c.options.push_back(asking(least)(rank));
  run_case(c);
}

TEST(Assembler, NamesAPieceThatIsMissing) {
  std::vector<WantedTensor> tensors = two_tensors();
  tensors.push_back({"c",
                     DType::kInt8,
                     {9, 4},
                     nullptr,
                     {Box{{0, 0}, {3, 4}}, Box{{3, 0}, {2, 4}}, Box{{6, 0}, {3, 4}}},
                     {}});
  expect_refused(3, tensors, ErrorKind::kMismatch, {"\"c\"", "[5, 0] + [1, 4]"},
                 [](int64_t) { return AssemblerOptions(); });
}

TEST(Assembler, NamesATensorThatARankOfItsLayoutLacks) {
  expect_refused(
      3, two_tensors(), ErrorKind::kMismatch, {"\"a\"", "rank 1"}, [](int64_t) { return AssemblerOptions(); },
      [](StateDict& state, int64_t rank) {
        if (rank != 1) return;
        StateDict less;
        less.add(StateDict::Entry(*state.find("b")));
        state = less;
      });
}

TEST(Assembler, RefusesWhatCannotBeWanted) {
  const auto on_one = [](const std::function<void(AssemblerOptions&)>& change) {
    return [=](int64_t rank) { return rank == 2 ? with(change) : AssemblerOptions(); };
  };
  expect_refused(3, two_tensors(), ErrorKind::kNotFound, {"rank 2", "\"x\""}, on_one([](AssemblerOptions& o) {
                   o.names = {"a", "x"};
                 }));
  for (const auto& [part, parts] : {std::pair<int64_t, int64_t>{4, 4}, {-1, 4}, {0, 0}}) {
    expect_refused(3, two_tensors(), ErrorKind::kInvalidArgument, {"rank 2", std::to_string(part)},
                   on_one([part = part, parts = parts](AssemblerOptions& o) {
                     o.part = part;
                     o.parts = parts;
                   }));
  }
  expect_refused(3, two_tensors(), ErrorKind::kMismatch, {"rank 0", "rank 2"},
                 on_one([](AssemblerOptions& o) { o.memory += 1; }));
  expect_refused(3, two_tensors(), ErrorKind::kMismatch, {"rank 0", "rank 2"}, [](int64_t rank) {
    return with([rank](AssemblerOptions& o) {
      o.assign = [rank](const StreamGrid&, std::span<StreamOutput> outputs) {
        outputs[1].wanted_by = std::make_shared<const std::vector<size_t>>(1, rank == 2 ? 1 : 0);
      };
    });
  });
}

TEST(Assembler, RefusesMappingsThatDifferOrNameWhatIsNotThere) {
  const std::vector<WantedTensor> square = {
      {"a", DType::kFloat32, {12, 12}, nullptr, {}, {0}},
      {"b", DType::kFloat32, {12, 12}, layout_of("[shard(0)] over 3"), {}, {}}};
  constexpr const char* kFilled = "_ -> x, shape='[5]', dtype='float32', fill=";
  const std::pair<std::string, std::string> different[] = {
      {"a -> x", "a -> y"},
      {"a -> x", "b -> x"},
      {"a -> x", "a -> x, permute='[1, 0]'"},
      {"a -> x, y, axis=0\nx, y -> z, axis=0", "a -> x, y, axis=0\ny, x -> z, axis=0"},
      {kFilled + std::string("3"), kFilled + std::string("4")}};
  for (const auto& [some, others] : different) {
    const Mapping one = parse_mapping(some), other = parse_mapping(others);
    expect_refused(3, square, ErrorKind::kMismatch, {"mapping"}, [&](int64_t rank) {
      return with([&](AssemblerOptions& o) { o.mapping = rank == 1 ? &other : &one; });
    });
  }
  const Mapping wrong = parse_mapping("aa -> x");
  expect_refused(3, two_tensors(), ErrorKind::kInvalidArgument, {"line 1", "aa"},
                 [&](int64_t) { return with([&](AssemblerOptions& o) { o.mapping = &wrong; }); });
}

TEST(Assembler, TakesBothGroupsOfAGridOrNone) {
  launch(4, [&](World& world) {
    RankState state({}, world.rank());
    EXPECT_THROW(Assembler(world.all().get(), nullptr, state.dict()), InvalidArgumentError);
    EXPECT_THROW(Assembler(nullptr, world.all().get(), state.dict()), InvalidArgumentError);
    // All ranks in a row, and all in a column: no row meets a column in one rank.
    EXPECT_THROW(Assembler(world.all().get(), world.all().get(), state.dict()), InvalidArgumentError);
  });
}

TEST(Assembler, ARankThatHoldsNothingGetsEverything) {
  std::vector<WantedTensor> tensors = two_tensors();
  Case c{.ranks = 5, .tensors = tensors};
  c.tensors[1].on_ranks = {3};
  c.options.resize(5);
  run_case(c);
}

TEST(Assembler, SubByteTensorsAreStreamedWhole) {
  Case c{.ranks = 3, .tensors = {{"f4", DType::kFloat4E2M1FN, {3, 8}, nullptr, {}, {1}}}};
  c.options.resize(3);
  launch(3, [&](World& world) {
    RankState state(c.tensors, world.rank());
    if (world.rank() == 1) std::memset(state.dict().find("f4")->tensor()->memory.data, 0x5B, 12);
    Assembler assembler(*world.all(), state.dict());
    const auto item = assembler.next();
    ASSERT_TRUE(item.has_value());
    EXPECT_EQ(item->shape, Dims({3, 8}));
    EXPECT_EQ(item->memory.dtype, DType::kFloat4E2M1FN);
    const std::string bytes(reinterpret_cast<const char*>(item->memory.data), 12);
    EXPECT_EQ(bytes, std::string(12, '\x5B'));
    EXPECT_FALSE(assembler.next().has_value());
  });
}

}  // namespace
}  // namespace spolia
