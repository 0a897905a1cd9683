// What a load promises besides the bytes: what is checked, what is read, what is sent, what is reported.
#include "spolia/checkpoint/load.h"

#include <set>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/layout_text.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

std::shared_ptr<const Layout> layout(std::string_view text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

WantedTensor tensor(std::string name, Dims shape, std::string_view how = "") {
  return {std::move(name), DType::kFloat32, std::move(shape), how.empty() ? nullptr : layout(how), {}, {}};
}

/// "a" of 40 x 30, "b" of 7, the values "step" and "lr", from two ranks.
std::shared_ptr<MemoryStore> saved(const std::vector<WantedTensor>& tensors = {
                                       tensor("a", {40, 30}, "[shard(0)] over 2"), tensor("b", {7})}) {
  auto store = std::make_shared<MemoryStore>();
  launch(2, [&](World& world) {
    RankState state(tensors, world.rank());
    state.fill();
    state.dict().add("step", Value(int64_t{7}));
    state.dict().add("lr", Value(0.5));
    save(*world.all(), state.dict(), *store, "/saved");
  });
  return store;
}

/// Loads on ranks; `add` puts more into the state.
void load_on(int ranks, const std::vector<WantedTensor>& tensors, std::shared_ptr<const Store> store,
             const LoadOptions& options, const std::function<void(RankState&)>& before,
             const std::function<void(RankState&, const Report&)>& after) {
  launch(ranks, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    RankState state(tensors, world.rank());
    state.poison();
    if (before) before(state);
    const Report report = load(world, *source, state.dict(), options);
    if (after) after(state, report);
  });
}

/// What loading throws, on every rank, while nothing has been written.
std::string refused(ErrorKind kind, const std::vector<WantedTensor>& tensors,
                    std::shared_ptr<const Store> store, const LoadOptions& options = {},
                    const std::function<void(RankState&)>& before = {}) {
  std::string text;
  launch(2, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    RankState state(tensors, world.rank());
    state.poison();
    RankState untouched(tensors, world.rank());
    if (before) before(state);
    try {
      load(world, *source, state.dict(), options);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      if (world.rank() == 0) text = error.what();
    }
    state.expect_poisoned();
  });
  return text;
}

TEST(Load, ChecksEverythingBeforeItWrites) {
  const auto store = saved();
  const auto a = tensor("a", {40, 30}, "[shard(1)] over 2");
  EXPECT_NE(refused(ErrorKind::kNotFound, {a, tensor("c", {3})}, store)
                .find("lacks 1 of the keys to be loaded: \"c\""),
            std::string::npos);
  EXPECT_NE(refused(ErrorKind::kMismatch, {a, tensor("b", {8})}, store)
                .find("tensor \"b\" has the shape [7] in the checkpoint, and [8] here"),
            std::string::npos);
  WantedTensor half = tensor("b", {7});
  half.dtype = DType::kBFloat16;
  EXPECT_NE(refused(ErrorKind::kMismatch, {a, half}, store)
                .find("is float32 in the checkpoint, and bfloat16 here; ask for a cast"),
            std::string::npos);
  half.dtype = DType::kInt32;
  EXPECT_NE(refused(ErrorKind::kMismatch, {a, half}, store, {.cast = true}).find("and int32 here"),
            std::string::npos);
  EXPECT_NE(refused(ErrorKind::kMismatch, {a, tensor("step", {1})}, store)
                .find("is a value in the checkpoint, and a tensor here"),
            std::string::npos);
  EXPECT_NE(
      refused(ErrorKind::kMismatch, {a}, store, {}, [](RankState& state) { state.dict().add("b", Value()); })
          .find("is a tensor in the checkpoint, and a value here"),
      std::string::npos);
}

TEST(Load, KeepsWhatMayBeMissingAndReportsEveryKey) {
  const auto store = saved();
  const std::vector<WantedTensor> tensors = {tensor("a", {40, 30}, "[shard(1)] over 2"),
                                             tensor("more.step", {2}), tensor("c", {3})};
  EXPECT_NE(refused(ErrorKind::kNotFound, tensors, store, {.may_be_missing = {"*step"}}).find("\"c\""),
            std::string::npos);
  const auto before = [](RankState& state) { state.dict().add("lr", Value()); };
  load_on(2, tensors, store, {.partial = true, .may_be_missing = {"*step"}}, before,
          [](RankState& state, const Report& report) {
            EXPECT_EQ(report.used, (std::vector<std::string>{"a", "lr"}));
            EXPECT_EQ(report.kept, (std::vector<std::string>{"c", "more.step"}));
            EXPECT_EQ(report.missing, (std::vector<std::string>{"c"}));
            EXPECT_EQ(report.unexpected, (std::vector<std::string>{"b", "step"}));
            EXPECT_EQ(*state.dict().find("lr")->value(), Value(0.5));
          });
}

TEST(Load, CastsWhereThatIsAskedFor) {
  const auto store = saved();
  launch(2, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    std::vector<std::byte> narrow(14), wide(28), due(14);
    StateDict state;
    const int64_t shape[] = {7};
    state.add("b", plain_tensor(dense_view(narrow.data(), DType::kBFloat16, shape)));
    load(world, *source, state, {.cast = true});
    RankState reference({tensor("b", {7})}, world.rank());
    reference.fill();
    cast(DType::kBFloat16, due.data(), DType::kFloat32, reference.dict().find("b")->tensor()->memory.data, 7);
    EXPECT_EQ(narrow, due);
  });
}

TEST(Load, ReadsEachByteOnceInAll) {
  // 4 MiB, wanted whole by all of four ranks.
  const auto memory = saved({tensor("a", {1024, 1024}, "[shard(0)] over 2")});
  for (const auto& [mode, times] :
       {std::pair{ReadMode::kEachRank, 4}, {ReadMode::kOneReader, 1}, {ReadMode::kParts, 1}}) {
    const auto counted = std::make_shared<FaultStore>(memory);
    int64_t read = 0, sent = 0, busiest = 0;
    std::mutex mutex;
    load_on(4, {tensor("a", {1024, 1024}, "[replicate] over 4")}, counted, {.mode = mode}, {},
            [&](RankState& state, const Report& report) {
              state.expect_filled();
              const std::lock_guard lock(mutex);
              read += report.bytes_read;
              sent += report.bytes_sent;
              busiest = report.busiest_rank_bytes;
            });
    EXPECT_EQ(read, int64_t{times} << 22) << name_of(mode);
    EXPECT_EQ(sent, mode == ReadMode::kEachRank ? 0 : int64_t{1} << 22);
    if (mode == ReadMode::kParts) {
      EXPECT_LE(busiest, (int64_t{1} << 20) + (int64_t{1} << 16));
    }
    // Metadata is read once, and every data file opened once a rank at the most.
    std::map<std::filesystem::path, int> opened;
    for (const FaultStore::Event& event : counted->log()) {
      if (event.operation == Operation::kOpen) ++opened[event.path];
    }
    for (const auto& [path, count] : opened) {
      EXPECT_LE(count, path.extension() == ".json" ? 1 : 4) << path;
    }
  }
}

TEST(Load, SendsSmallPiecesTogether) {
  std::vector<WantedTensor> many, wanted;
  for (int i = 0; i < 40; ++i) many.push_back(tensor("t" + std::to_string(i), {50, i + 1}));
  const auto store = saved(many);
  for (const int64_t batch_bytes : {int64_t{0}, int64_t{1000}, int64_t{6} << 20}) {
    LoadOptions options{.mode = ReadMode::kOneReader};
    options.batches.batch_bytes = batch_bytes;
    load_on(3, many, store, options, {}, [&](RankState& state, const Report& report) {
      state.expect_filled();
      EXPECT_EQ(report.items_batched > 0, batch_bytes > 0);
    });
  }
}

TEST(Load, RanksMeetTheirBroadcastsInOneOrder) {
  const auto store = saved({tensor("a", {64, 64}), tensor("b", {64, 64}), tensor("c", {300})});
  OperationLog log;
  const std::vector<WantedTensor> wanted = {tensor("a", {64, 64}, "[replicate, shard(0)] over 2x2"),
                                            tensor("b", {64, 64}, "[shard(0), replicate] over 2x2"),
                                            tensor("c", {300}, "[replicate] over 4")};
  for (ReadMode mode : {ReadMode::kOneReader, ReadMode::kParts}) {
    launch(4,
           [&](World& world) {
             const auto source = open_together(*world.all(), store, "/saved");
             RankState state(wanted, world.rank());
             load(world, *source, state.dict(), {.mode = mode});
             state.expect_filled();
           },
           {.decorate = logging(log)});
  }
  // Of the groups that two ranks share, both have met the same operations in the same order.
  const auto shared = [&](int64_t rank, int64_t other) {
    std::vector<std::string> lines;
    for (const std::string& line : log.lines(rank)) {
      const std::string group = " " + line.substr(1, line.find(']') - 1) + ",";
      if (group.find(fmt::format(" {},", other)) != std::string::npos) lines.push_back(line);
    }
    return lines;
  };
  for (int64_t a = 0; a < 4; ++a) {
    EXPECT_GT(log.lines(a).size(), 20u);
    for (int64_t b = 0; b < a; ++b) EXPECT_EQ(shared(a, b), shared(b, a));
  }
}

TEST(Load, TakesGroupsThatAreThereAndKeepsThoseItMakes) {
  const auto store = saved({tensor("a", {64, 64})});
  const std::vector<WantedTensor> wanted = {tensor("a", {64, 64}, "[replicate, shard(0)] over 2x2")};
  launch(4, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    GroupRegistry registry(world);
    std::vector<std::shared_ptr<Group>> groups = {world.create(std::vector<int64_t>{0, 2})};
    RankState state(wanted, world.rank());
    Report report = load(world, *source, state.dict(),
                         {.mode = ReadMode::kOneReader, .groups = groups, .registry = &registry});
    EXPECT_EQ(report.groups_reused, world.rank() % 2 == 0 ? 1 : 0);
    EXPECT_EQ(report.groups_made, world.rank() % 2 == 0 ? 0 : 1);
    state.poison();
    report = load(world, *source, state.dict(),
                  {.mode = ReadMode::kOneReader, .groups = groups, .registry = &registry});
    state.expect_filled();
    EXPECT_EQ(report.groups_reused, 1);
  });
}

TEST(Load, AFailureWhileReadingIsEverybodysAndNamesTheRank) {
  const auto memory = saved({tensor("a", {512, 512}, "[shard(0)] over 2")});
  for (ReadMode mode : {ReadMode::kEachRank, ReadMode::kOneReader, ReadMode::kParts}) {
    int threw = 0;
    std::mutex mutex;
    launch(3, [&](World& world) {
      const auto source = open_together(*world.all(), memory, "/saved");
      auto faults = std::make_shared<FaultStore>(memory);
      const auto broken = open_source(faults, "/saved");
      if (world.rank() == 1) faults->fail(Operation::kRead, 0, EIO, FaultStore::Times::kFromThenOn);
      RankState state({tensor("a", {512, 512}, "[replicate] over 3")}, world.rank());
      bool reads = true;
      try {
        load(world, world.rank() == 1 ? *broken : *source, state.dict(), {.mode = mode});
        reads = false;
      } catch (const IoError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("unspecified"), std::string::npos) << text;
        EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
        const std::lock_guard lock(mutex);
        ++threw;
      }
      // The ranks can go on.
      world.all()->barrier().wait();
      load(world, *source, state.dict(), {.mode = mode});
      state.expect_filled();
      EXPECT_TRUE(reads || mode == ReadMode::kOneReader);  // another rank may have been the reader
    });
    EXPECT_TRUE(threw == 3 || threw == 0) << threw;
  }
}

TEST(Load, ADamagedCheckpointIsNotLoaded) {
  const auto memory = saved({tensor("a", {512, 512}, "[shard(0)] over 2")});
  const auto faults = std::make_shared<FaultStore>(memory);
  faults->flip("/saved/data-00001.safetensors", 4000);
  EXPECT_THROW(load_on(3, {tensor("a", {512, 512})}, faults, {}, {}, {}), CorruptError);
}

TEST(Load, FillsAStateOfItsOwnFromTheCatalog) {
  const auto store = saved();
  launch(3, [&](World& world) {
    const auto source = open_together(*world.all(), store, "/saved");
    OwnedState all = state_for(source->catalog());
    load(world, *source, all.state);
    RankState reference({tensor("a", {40, 30}), tensor("b", {7})}, world.rank());
    reference.fill();
    for (const char* name : {"a", "b"}) {
      const View found = all.state.find(name)->tensor()->memory;
      const View due = reference.dict().find(name)->tensor()->memory;
      const auto due_rows = due.shape.size() == 2 ? due.shape[0] : 1;
      const int64_t row = found.bytes() / due_rows;
      for (int64_t r = 0; r < due_rows; ++r) {
        EXPECT_EQ(std::memcmp(found.data + r * row, due.data + r * due.strides[0], static_cast<size_t>(row)),
                  0);
      }
    }
    EXPECT_EQ(*all.state.find("step")->value(), Value(int64_t{7}));
  });
}

TEST(Load, ChoosesTheCheapestMode) {
  const ReadCosts costs{
      .busiest_each = 100, .busiest_whole = 50, .busiest_parts = 25, .sent = 100, .broadcasts = 10};
  // Reading is free, or sending is.
  EXPECT_EQ(cheapest_mode({.read_bytes = 1e12, .sent_bytes = 1, .send_seconds = 1}, costs, 4),
            ReadMode::kEachRank);
  EXPECT_EQ(cheapest_mode({.read_bytes = 1, .sent_bytes = 1e12, .send_seconds = 0}, costs, 4),
            ReadMode::kParts);
  ReadCosts even = costs;
  even.busiest_parts = even.busiest_whole;
  EXPECT_EQ(cheapest_mode({.read_bytes = 1, .sent_bytes = 1e12, .send_seconds = 0}, even, 4),
            ReadMode::kOneReader);
}

}  // namespace
}  // namespace spolia
