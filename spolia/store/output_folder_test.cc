// All files of a folder, synced or closed together, and what goes wrong then.
#include "spolia/store/output_folder.h"

#include <cerrno>
#include <memory>

#include <gtest/gtest.h>

#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

class OutputFolderTest : public testing::Test {
 protected:
  OutputFolderTest() {
    store_.create_folder("/out");
    for (const char* name : {"a", "b", "c"}) folder_.create(name).write(0, bytes_of(name));
    store_.sync_folder("/");
    store_.sync_folder("/out");
  }

  std::string after_a_crash() {
    memory_->crash();
    return get(*memory_, "/out/a") + get(*memory_, "/out/b") + get(*memory_, "/out/c");
  }

  std::shared_ptr<MemoryStore> memory_ = std::make_shared<MemoryStore>();
  FaultStore store_{memory_};
  OutputFolder folder_{store_, "/out"};
};

TEST_F(OutputFolderTest, SyncMakesAllFilesDurableAndClosesThem) {
  folder_.sync(2);
  EXPECT_EQ(store_.count(Operation::kSync), 3);
  EXPECT_EQ(store_.count(Operation::kClose), 3);
  EXPECT_EQ(store_.count(Operation::kDropCached), 0);
  folder_.sync(2);  // nothing is open any more
  EXPECT_EQ(store_.count(Operation::kSync), 3);
  EXPECT_EQ(after_a_crash(), "abc");
}

TEST_F(OutputFolderTest, SyncDropsWhatIsCachedWhereAsked) {
  folder_.sync(1, nullptr, OutputFolder::Cache::kDrop);
  EXPECT_EQ(store_.count(Operation::kDropCached), 3);
}

TEST_F(OutputFolderTest, CloseWaitsForNothing) {
  folder_.close();
  EXPECT_EQ(store_.count(Operation::kSync), 0);
  EXPECT_EQ(store_.count(Operation::kClose), 3);
  EXPECT_EQ(after_a_crash(), "");
}

TEST_F(OutputFolderTest, FailuresAreReported) {
  store_.fail(Operation::kSync, 1, EIO);
  expect_error(ErrorKind::kIo, {"Input/output error"}, [&] { folder_.sync(1); });
  store_.fail(Operation::kClose, 1, ENOSPC);
  expect_error(ErrorKind::kIo, {"No space left"}, [&] { folder_.close(); });
}

TEST_F(OutputFolderTest, ACancelledSyncStops) {
  CancelToken cancel;
  store_.before(Operation::kSync, 0, [&] { cancel.cancel(); });
  EXPECT_THROW(folder_.sync(1, &cancel), CancelledError);
  EXPECT_EQ(store_.count(Operation::kSync), 1);
}

}  // namespace
}  // namespace spolia
