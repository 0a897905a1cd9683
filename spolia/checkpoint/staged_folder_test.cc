#include "spolia/checkpoint/staged_folder.h"

#include <cerrno>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

void write_whole(StagedFolder& folder) {
  const auto file = folder.create("data");
  file->write(0, bytes_of("content"));
  file->sync();
}

/// The folder's one file, or nothing where the folder is not there.
std::string content(const Store& store) {
  if (!store.exists("/out")) return "";
  const auto file = store.open("/out/data");
  std::string text(static_cast<size_t>(file->size()), ' ');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

TEST(StagedFolder, AppearsWhenPublished) {
  MemoryStore store;
  StagedFolder folder(store, "/out");
  write_whole(folder);
  EXPECT_FALSE(store.exists("/out"));
  folder.publish();
  EXPECT_EQ(content(store), "content");
  EXPECT_EQ(store.list("/").size(), 1u);
}

TEST(StagedFolder, LeavesNothingUnlessPublished) {
  MemoryStore store;
  {
    StagedFolder folder(store, "/out/");
    write_whole(folder);
  }
  EXPECT_TRUE(store.list("/").empty());
}

TEST(StagedFolder, RefusesATakenNameAndAMissingParent) {
  MemoryStore store;
  store.create_folder("/out");
  EXPECT_THROW(StagedFolder(store, "/out"), InvalidArgumentError);
  EXPECT_THROW(StagedFolder(store, "/out/"), InvalidArgumentError);
  EXPECT_THROW(StagedFolder(store, "/nowhere/out"), InvalidArgumentError);
}

TEST(StagedFolder, TakesNoOthersPlaceThatAppearedMeanwhile) {
  MemoryStore store;
  StagedFolder folder(store, "/out");
  write_whole(folder);
  store.create_folder("/out");
  EXPECT_THROW(folder.publish(), Error);
}

TEST(StagedFolder, TellsOfLeftovers) {
  MemoryStore store;
  store.create_folder("/out.partial-1");
  store.create_folder("/other.partial-1");
  const StagedFolder folder(store, "/out");
  EXPECT_EQ(folder.leftovers(), (std::vector<std::string>{"/out.partial-1"}));
}

/// Stops the publishing before each of its operations, by a failure and by a crash: the folder is whole or
/// not there.
TEST(StagedFolder, IsWholeOrAbsentWhereverItStops) {
  auto run = [](Store& store) {
    StagedFolder folder(store, "/out");
    write_whole(folder);
    folder.publish();
  };
  auto memory = std::make_shared<MemoryStore>();
  FaultStore counting(memory);
  run(counting);
  const int64_t operations = counting.count();
  ASSERT_GT(operations, 6);

  for (int64_t stop = 0; stop < operations; ++stop) {
    {
      auto disk = std::make_shared<MemoryStore>();
      FaultStore store(disk);
      store.fail(std::nullopt, stop, ENOSPC);
      EXPECT_THROW(run(store), Error) << stop;
      const std::string left = content(*disk);
      EXPECT_TRUE(left.empty() || left == "content") << stop;
    }
    for (auto names : {MemoryStore::UnsyncedNames::kLost, MemoryStore::UnsyncedNames::kKept}) {
      auto disk = std::make_shared<MemoryStore>();
      FaultStore store(disk);
      struct Stopped {};
      store.before(
          std::nullopt, stop, [] { throw Stopped(); }, FaultStore::Times::kFromThenOn);
      EXPECT_THROW(run(store), Stopped) << stop;
      disk->crash(names);
      const std::string left = content(*disk);
      EXPECT_TRUE(left.empty() || left == "content") << stop;
    }
  }

  run(*(memory = std::make_shared<MemoryStore>()));
  memory->crash(MemoryStore::UnsyncedNames::kLost);
  EXPECT_EQ(content(*memory), "content") << "what was published must survive";
}

TEST(StagedFolder, RefusesToLieInTheSource) {
  MemoryStore store;
  const auto here = std::filesystem::temp_directory_path();
  EXPECT_THROW(refuse_inside(*posix_store(), here, here / "out"), InvalidArgumentError);
  EXPECT_THROW(refuse_inside(*posix_store(), here, here), InvalidArgumentError);
  EXPECT_NO_THROW(refuse_inside(*posix_store(), here, here.parent_path() / "out"));
}

}  // namespace
}  // namespace spolia
