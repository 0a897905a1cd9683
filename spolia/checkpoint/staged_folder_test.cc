// A folder is published whole or not at all, wherever a failure or a crash stops it, and takes an older one's
// place only where that is asked for and harmless.
#include "spolia/checkpoint/staged_folder.h"

#include <cerrno>
#include <functional>
#include <memory>
#include <set>

#include <gtest/gtest.h>

#include "spolia/base/text.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

using UnsyncedNames = MemoryStore::UnsyncedNames;

constexpr const char* kFirst = "model-1.safetensors";
constexpr const char* kSecond = "model-2.safetensors";

/// A checkpoint of two files that both hold `text`.
void fill(OutputFolder& files, const std::string& text) {
  for (const char* name : {kFirst, kSecond}) files.create(name).write(0, bytes_of(text));
}

/// Publishes such a checkpoint as /out.
void run(Store& store, const std::string& text, Existing existing = Existing::kRefuse, bool durable = true) {
  StagedFolder folder(store, "/out", existing);
  fill(folder.files(), text);
  folder.publish(durable);
}

std::set<std::string> names_in(const Store& store, const fs::path& folder) {
  std::set<std::string> names;
  for (const FolderEntry& entry : store.list(folder)) names.insert(entry.name);
  return names;
}

/// What its two files hold; "mixed" where they differ, are not two, or one is cut short.
std::string content(const Store& store, const fs::path& folder = "/out") {
  if (!store.exists(folder)) return "absent";
  if (names_in(store, folder) != std::set<std::string>{kFirst, kSecond}) return "mixed";
  const std::string first = get(store, folder / kFirst), second = get(store, folder / kSecond);
  return first == second ? first : "mixed";
}

const std::set<std::string> kOnlyOut = {"out"};

// ---- a free name ----

TEST(StagedFolder, AppearsWhenPublished) {
  MemoryStore store;
  StagedFolder folder(store, "/out");
  fill(folder.files(), "new");
  EXPECT_EQ(content(store, folder.path()), "new");
  EXPECT_FALSE(store.exists("/out"));
  folder.publish();
  EXPECT_EQ(content(store), "new");
  EXPECT_EQ(names_in(store, "/"), kOnlyOut);
  EXPECT_TRUE(folder.notes().empty());
  store.crash();
  EXPECT_EQ(content(store), "new");
}

TEST(StagedFolder, LeavesNothingUnlessPublished) {
  MemoryStore store;
  {
    StagedFolder folder(store, "/out/");
    fill(folder.files(), "new");
  }
  EXPECT_TRUE(store.list("/").empty());
}

TEST(StagedFolder, RefusesATakenNameAndAMissingParent) {
  MemoryStore store;
  store.create_folder("/out");
  put(store, "/file", "x");
  for (const char* taken : {"/out", "/out/", "/file"}) {
    expect_error(ErrorKind::kInvalidArgument, {"exists already", "or overwrite it"},
                 [&] { StagedFolder(store, taken); });
  }
  for (const char* orphan : {"/nowhere/out", "/file/out"}) {
    expect_error(ErrorKind::kInvalidArgument, {"there is no folder", "\"out\""},
                 [&] { StagedFolder(store, orphan); });
  }
}

TEST(StagedFolder, RefusesPathsThatEndInNoNameOfTheirOwn) {
  MemoryStore store;
  store.create_folder("/a");
  for (const auto existing : {Existing::kRefuse, Existing::kExchange, Existing::kReplaceInTwoSteps}) {
    for (const char* path : {"", "/", "//", ".", "./", "..", "../", "/a/.", "/a/..", "/a/../"}) {
      expect_error(ErrorKind::kInvalidArgument, {quote(path), "own name"},
                   [&] { StagedFolder(store, path, existing); });
    }
  }
  EXPECT_EQ(names_in(store, "/"), std::set<std::string>{"a"});
}

TEST(StagedFolder, SlashesAtTheEndAndRelativePathsMeanTheSameFolder) {
  MemoryStore store;  // whose relative paths start at its root
  for (const char* path : {"out", "./out", "out/", "out//", "out/../out"}) {
    StagedFolder folder(store, path, Existing::kExchange);
    fill(folder.files(), path);
    folder.publish();
    EXPECT_EQ(content(store), path);
    EXPECT_EQ(names_in(store, "/"), kOnlyOut);
  }
}

TEST(StagedFolder, TakesNoOthersPlaceThatAppearedMeanwhile) {
  MemoryStore store;
  {
    StagedFolder folder(store, "/out");
    fill(folder.files(), "new");
    run(store, "other");
    EXPECT_THROW(folder.publish(), IoError);
  }
  EXPECT_EQ(content(store), "other");
  EXPECT_EQ(names_in(store, "/"), kOnlyOut);
}

TEST(StagedFolder, TellsOfLeftovers) {
  MemoryStore store;
  for (const char* name :
       {"/out.partial-1", "/out.old-2", "/other.partial-1", "/out.partial", "/out.older"}) {
    store.create_folder(name);
  }
  const StagedFolder folder(store, "/out");
  ASSERT_EQ(folder.notes().size(), 2u);
  EXPECT_TRUE(folder.notes()[0].starts_with("\"/out.old-2\" is what \"/out\" was before"));
  EXPECT_TRUE(folder.notes()[1].starts_with("\"/out.partial-1\" is partial"));
}

TEST(StagedFolder, AvoidsNamesThatAreTaken) {
  MemoryStore store;
  StagedFolder first(store, "/out");
  StagedFolder second(store, "/out");
  EXPECT_NE(first.path(), second.path());
  EXPECT_TRUE(second.path().native().starts_with("/out.partial-"));
}

// ---- a name that is taken ----

class Replacing : public testing::TestWithParam<Existing> {
 protected:
  Replacing() { run(store_, "old"); }

  MemoryStore store_;
};

INSTANTIATE_TEST_SUITE_P(StagedFolder, Replacing,
                         testing::Values(Existing::kExchange, Existing::kReplaceInTwoSteps),
                         [](const testing::TestParamInfo<Existing>& existing) {
                           return existing.param == Existing::kExchange ? "Exchange" : "InTwoSteps";
                         });

TEST_P(Replacing, TakesThePlaceOfACheckpoint) {
  StagedFolder folder(store_, "/out", GetParam());
  fill(folder.files(), "new");
  EXPECT_EQ(content(store_), "old");
  folder.publish();
  EXPECT_EQ(content(store_), "new");
  EXPECT_EQ(names_in(store_, "/"), kOnlyOut);
  EXPECT_TRUE(folder.notes().empty());
  store_.crash();
  EXPECT_EQ(content(store_), "new");
}

TEST_P(Replacing, TakesThePlaceOfAnEmptyFolderAndOfNothing) {
  store_.remove_all("/out");
  run(store_, "into nothing", GetParam());
  EXPECT_EQ(content(store_), "into nothing");
  store_.remove_all("/out");
  store_.create_folder("/out");
  run(store_, "new", GetParam());
  EXPECT_EQ(content(store_), "new");
  EXPECT_EQ(names_in(store_, "/"), kOnlyOut);
}

TEST_P(Replacing, LeavesTheOldUnlessPublished) {
  {
    StagedFolder folder(store_, "/out", GetParam());
    fill(folder.files(), "new");
  }
  EXPECT_EQ(content(store_), "old");
  EXPECT_EQ(names_in(store_, "/"), kOnlyOut);
}

TEST_P(Replacing, ReplacesNothingThatIsMoreThanACheckpoint) {
  const auto refused = [&](const std::string& what) {
    const auto before = names_in(store_, "/");
    expect_error(ErrorKind::kInvalidArgument, {"\"/out\"", "not overwritten", what},
                 [&] { StagedFolder(store_, "/out", GetParam()); });
    EXPECT_EQ(names_in(store_, "/"), before);
  };
  for (const char* name : {"thesis.tex", ".bashrc", "best.pt", "config.json"}) {
    const fs::path other = fs::path("/out") / name;
    put(store_, other, "dear");
    refused(name);
    store_.remove_all(other);
  }
  store_.create_folder("/out/x.safetensors");
  refused("x.safetensors");
  store_.remove_all("/out");
  put(store_, "/out", "a file");
  refused("no folder");
}

TEST_P(Replacing, ReplacesEveryKindOfCheckpointThatIsAFolder) {
  const std::vector<std::vector<const char*>> kinds = {
      {".metadata", "__0_0.distcp", "__12_0.distcp"},
      {"__0.metadata", "__0_0.distcp"},
      {"model-00001-of-00001.safetensors", "model.safetensors.index.json"},
      {"pytorch_model.bin"},
      {"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"},
      {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"},
  };
  for (const auto& names : kinds) {
    store_.remove_all("/out");
    store_.create_folder("/out");
    for (const char* name : names) put(store_, fs::path("/out") / name, "old");
    run(store_, "new", GetParam());
    EXPECT_EQ(content(store_), "new") << names[0];
  }
}

TEST_P(Replacing, LooksAgainBeforeItReplaces) {
  {
    StagedFolder folder(store_, "/out", GetParam());
    fill(folder.files(), "new");
    put(store_, "/out/notes.txt", "dear");
    expect_error(ErrorKind::kInvalidArgument, {"notes.txt"}, [&] { folder.publish(); });
  }
  EXPECT_EQ(get(store_, "/out/notes.txt"), "dear");
  store_.remove_all("/out/notes.txt");
  EXPECT_EQ(names_in(store_, "/"), kOnlyOut);

  StagedFolder gone(store_, "/out", GetParam());
  fill(gone.files(), "new");
  store_.remove_all("/out");
  gone.publish();
  EXPECT_EQ(content(store_), "new");
}

TEST_P(Replacing, TellsWhereTheOldOneStayed) {
  const auto disk = std::make_shared<MemoryStore>();
  run(*disk, "old");
  FaultStore store(disk);
  StagedFolder folder(store, "/out", GetParam());
  fill(folder.files(), "new");
  store.fail(Operation::kRemoveAll, 0, EACCES);
  folder.publish();
  EXPECT_EQ(content(*disk), "new");
  ASSERT_EQ(folder.notes().size(), 1u);
  const auto names = names_in(*disk, "/");
  ASSERT_EQ(names.size(), 2u);
  EXPECT_NE(folder.notes()[0].find(*names.rbegin()), std::string::npos) << folder.notes()[0];
  EXPECT_NE(folder.notes()[0].find("Permission denied"), std::string::npos) << folder.notes()[0];
}

TEST(StagedFolder, RefusesBeforeAnyWorkWhatTheFileSystemCannotExchange) {
  MemoryStore store;
  store.forbid_exchange();
  run(store, "first", Existing::kExchange);  // nothing to exchange
  expect_error(ErrorKind::kUnsupported, {"\"/out\"", "one step", "two steps"},
               [&] { StagedFolder(store, "/out", Existing::kExchange); });
  EXPECT_EQ(names_in(store, "/"), kOnlyOut);
  EXPECT_EQ(content(store), "first");
  run(store, "second", Existing::kReplaceInTwoSteps);
  EXPECT_EQ(content(store), "second");
}

// ---- without waiting for the disk ----

TEST(StagedFolder, NothingIsSyncedUnlessItIsToBeDurable) {
  for (const auto existing : {Existing::kRefuse, Existing::kExchange, Existing::kReplaceInTwoSteps}) {
    const auto disk = std::make_shared<MemoryStore>();
    if (existing != Existing::kRefuse) run(*disk, "old");
    FaultStore store(disk);
    run(store, "new", existing, false);
    EXPECT_EQ(store.count(Operation::kSync) + store.count(Operation::kSyncFolder), 0);
    EXPECT_EQ(store.count(Operation::kClose), 2);
    EXPECT_EQ(content(*disk), "new");
    EXPECT_EQ(names_in(*disk, "/"), kOnlyOut);
  }
}

TEST(StagedFolder, AFullDiskThatShowsWhenAFileIsClosedIsSeen) {
  const auto disk = std::make_shared<MemoryStore>();
  FaultStore store(disk);
  store.fail(Operation::kClose, 1, ENOSPC);
  expect_error(ErrorKind::kIo, {"No space left"}, [&] { run(store, "new", Existing::kRefuse, false); });
  EXPECT_TRUE(disk->list("/").empty());
}

// ---- stopped anywhere ----

/// A disk whose /out holds the checkpoint "old", durably; nothing for an empty `before`.
std::shared_ptr<MemoryStore> disk_with(const std::string& before) {
  auto disk = std::make_shared<MemoryStore>();
  if (!before.empty()) run(*disk, before);
  return disk;
}

struct Case {
  const char* name;
  std::string before;
  Existing existing;
  bool durable = true;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Stopped : public testing::TestWithParam<Case> {
 protected:
  void run_case(Store& store) const { run(store, "new", GetParam().existing, GetParam().durable); }

  int64_t operations() const {
    FaultStore store(disk_with(GetParam().before));
    run_case(store);
    return store.count();
  }

  std::string before() const { return GetParam().before.empty() ? "absent" : GetParam().before; }
};

const Case kDurableCases[] = {{"Fresh", "", Existing::kRefuse},
                              {"Exchanged", "old", Existing::kExchange},
                              {"InTwoSteps", "old", Existing::kReplaceInTwoSteps}};
const Case kUnsyncedCases[] = {{"FreshUnsynced", "", Existing::kRefuse, false},
                               {"ExchangedUnsynced", "old", Existing::kExchange, false},
                               {"InTwoStepsUnsynced", "old", Existing::kReplaceInTwoSteps, false}};

std::string name_of_case(const testing::TestParamInfo<Case>& c) { return c.param.name; }

class Crashed : public Stopped {};  // what is not synced promises nothing after a crash

INSTANTIATE_TEST_SUITE_P(Durable, Stopped, testing::ValuesIn(kDurableCases), name_of_case);
INSTANTIATE_TEST_SUITE_P(Unsynced, Stopped, testing::ValuesIn(kUnsyncedCases), name_of_case);
INSTANTIATE_TEST_SUITE_P(Durable, Crashed, testing::ValuesIn(kDurableCases), name_of_case);

TEST_P(Stopped, AFailureAnywhereLeavesAllAsItWas) {
  for (int64_t stop = 0; stop < operations(); ++stop) {
    for (const int error_number : {ENOSPC, EIO}) {
      const auto disk = disk_with(GetParam().before);
      FaultStore store(disk);
      store.fail(std::nullopt, stop, error_number);
      try {
        run_case(store);
        // The one thing that may fail without a word here, and with a note to the caller.
        EXPECT_EQ(store.log().back().operation, Operation::kRemoveAll) << stop;
        EXPECT_EQ(content(*disk), "new") << stop;
      } catch (const IoError&) {
        EXPECT_EQ(content(*disk), before()) << stop;
        EXPECT_EQ(names_in(*disk, "/"), GetParam().before.empty() ? std::set<std::string>() : kOnlyOut)
            << stop;
      }
    }
  }
}

TEST_P(Stopped, ADiskThatFailsForGoodLosesNothing) {
  for (int64_t stop = 0; stop < operations(); ++stop) {
    const auto disk = disk_with(GetParam().before);
    FaultStore store(disk);
    store.fail(std::nullopt, stop, EIO, FaultStore::Times::kFromThenOn);
    try {
      run_case(store);
    } catch (const IoError&) {
    }
    std::set<std::string> whole;
    for (const std::string& name : names_in(*disk, "/")) {
      EXPECT_TRUE(name == "out" || name.starts_with("out.partial-") || name.starts_with("out.old-")) << name;
      whole.insert(content(*disk, "/" + name));
    }
    if (disk->exists("/out")) {
      EXPECT_TRUE(content(*disk) == before() || content(*disk) == "new") << stop;
    } else if (!GetParam().before.empty()) {
      EXPECT_TRUE(whole.contains("old")) << stop;
    }
  }
}

TEST_P(Crashed, ACrashAnywhereLeavesTheOldOrTheNewWhole) {
  struct Crash {};
  for (int64_t stop = 0; stop < operations(); ++stop) {
    for (const auto unsynced : {UnsyncedNames::kLost, UnsyncedNames::kKept}) {
      const auto disk = disk_with(GetParam().before);
      FaultStore store(disk);
      store.before(
          std::nullopt, stop, [] { throw Crash(); }, FaultStore::Times::kFromThenOn);
      EXPECT_THROW(run_case(store), Crash) << stop;
      disk->crash(unsynced);

      const std::string left = content(*disk);
      std::set<std::string> others = names_in(*disk, "/");
      others.erase("out");
      bool old_is_aside = false;
      for (const std::string& name : others) {
        const bool is_old = name.starts_with("out.old-");
        EXPECT_TRUE(is_old || name.starts_with("out.partial-")) << name;
        old_is_aside |= is_old && content(*disk, "/" + name) == "old";
      }
      const bool in_between = GetParam().existing == Existing::kReplaceInTwoSteps && left == "absent";
      EXPECT_TRUE(left == before() || left == "new" || (in_between && old_is_aside)) << stop << ": " << left;
    }
  }
}

// ---- on a real file system ----

TEST(StagedFolder, ReplacesOnTheRealFileSystem) {
  const TempFolder temp;
  const auto store = posix_store();
  for (const auto existing : {Existing::kRefuse, Existing::kExchange, Existing::kReplaceInTwoSteps}) {
    StagedFolder folder(*store, temp.path() / "out", existing);
    fill(folder.files(), std::to_string(static_cast<int>(existing)));
    folder.files().sync(2);
    folder.publish();
    EXPECT_EQ(content(*store, temp.path() / "out"), std::to_string(static_cast<int>(existing)));
    EXPECT_EQ(names_in(*store, temp.path()), kOnlyOut);
  }
}

TEST(StagedFolder, RefusesToReplaceALink) {
  const TempFolder temp;
  const auto store = posix_store();
  store->create_folder(temp.path() / "step-7");
  fs::create_symlink("step-7", temp.path() / "latest");
  fs::create_symlink("nothing", temp.path() / "dangling");
  for (const auto existing : {Existing::kExchange, Existing::kReplaceInTwoSteps}) {
    for (const char* name : {"latest", "latest/", "dangling"}) {
      expect_error(ErrorKind::kInvalidArgument, {"is a symbolic link"},
                   [&] { StagedFolder(*store, temp.path() / name, existing); });
    }
  }
  EXPECT_EQ(store->list(temp.path()).size(), 3u);
  StagedFolder through(*store, temp.path() / "latest/out");  // links on the way are followed
  fill(through.files(), "new");
  through.publish();
  EXPECT_EQ(content(*store, temp.path() / "step-7/out"), "new");
}

TEST(StagedFolder, ASourceIsNeitherWrittenIntoNorReplaced) {
  const TempFolder temp;
  const auto store = posix_store();
  const fs::path folder = temp.path() / "in", file = folder / "model.safetensors";
  store->create_folder(folder);
  put(*store, file, "x");
  fs::create_symlink("in", temp.path() / "link");
  const auto refused = [&](const fs::path& source, const fs::path& destination) {
    expect_error(ErrorKind::kInvalidArgument, {"only read"},
                 [&] { refuse_inside(*store, source, destination); });
  };
  refused(folder, folder);
  refused(folder, folder / "out");
  refused(folder, folder / "out/");
  refused(folder, folder / "../in/out");
  refused(folder, temp.path() / "link");
  refused(temp.path() / "link", folder / "out");
  refused(file, folder);
  refused(file, temp.path() / "link");
  refused(folder, temp.path());
  EXPECT_NO_THROW(refuse_inside(*store, folder, temp.path() / "out"));
  EXPECT_NO_THROW(refuse_inside(*store, folder, temp.path() / "in-2"));
  EXPECT_NO_THROW(refuse_inside(*store, file, folder / "out"));
  EXPECT_NO_THROW(refuse_inside(*store, temp.path() / "nothing", temp.path() / "nothing/out"));
}

}  // namespace
}  // namespace spolia
