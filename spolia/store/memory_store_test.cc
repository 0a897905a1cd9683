// What a crash leaves.
#include "spolia/store/memory_store.h"

#include <memory>

#include <gtest/gtest.h>

#include "spolia/store/fault_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

TEST(MemoryStore, ACrashKeepsWhatWasSyncedAndNothingElse) {
  MemoryStore store;
  const auto file = store.create("/synced");
  file->write(0, bytes_of("kept"));
  file->sync();
  file->write(0, bytes_of("lost and longer"));
  put(store, "/unsynced", "lost");
  store.create_folder("/folder");
  put(store, "/folder/file", "whole", true);
  store.sync_folder("/");
  put(store, "/late", "lost", true);
  const auto before = store.open("/synced");
  store.crash();
  EXPECT_EQ(get(store, "/synced"), "kept");
  EXPECT_EQ(get(store, "/unsynced"), "");
  EXPECT_TRUE(store.list("/folder").empty());  // its name was made durable, those in it were not
  EXPECT_FALSE(store.exists("/late"));
  file->write(0, bytes_of("from before the crash"));
  file->sync();
  EXPECT_EQ(get(store, "/synced"), "kept");
  store.crash();
  EXPECT_EQ(get(store, "/synced"), "kept");
}

TEST(MemoryStore, ACrashMayKeepNamesThatWereNotSynced) {
  MemoryStore store;
  put(store, "/a", "bytes", true);
  put(store, "/b", "bytes");
  store.crash(MemoryStore::UnsyncedNames::kKept);
  EXPECT_EQ(get(store, "/a"), "bytes");
  EXPECT_EQ(get(store, "/b"), "");
}

TEST(MemoryStore, RenamesAndRemovalsAreUndoneUntilTheFolderIsSynced) {
  MemoryStore store;
  put(store, "/a", "a", true);
  put(store, "/b", "b", true);
  store.sync_folder("/");
  store.rename("/a", "/c");
  store.remove_all("/b");
  store.crash();
  EXPECT_EQ(get(store, "/a"), "a");
  EXPECT_EQ(get(store, "/b"), "b");
  EXPECT_FALSE(store.exists("/c"));
  store.rename("/a", "/c");
  store.remove_all("/b");
  store.sync_folder("/");
  store.crash();
  EXPECT_EQ(get(store, "/c"), "a");
  EXPECT_EQ(store.list("/").size(), 1u);
}

TEST(MemoryStore, AnExchangeIsUndoneInEachFolderUntilThatIsSynced) {
  MemoryStore store;
  for (const char* folder : {"/a", "/b"}) store.create_folder(folder);
  put(store, "/a/x", "one", true);
  put(store, "/b/y", "two", true);
  for (const char* folder : {"/a", "/b", "/"}) store.sync_folder(folder);
  store.exchange("/a/x", "/b/y");
  EXPECT_EQ(get(store, "/a/x"), "two");
  store.sync_folder("/a");
  store.crash();
  EXPECT_EQ(get(store, "/a/x"), "two");
  EXPECT_EQ(get(store, "/b/y"), "two");  // and nothing has the other: two folders cannot be synced at once
  store.exchange("/a", "/b");
  store.crash(MemoryStore::UnsyncedNames::kKept);
  EXPECT_TRUE(store.exists("/a/y"));
}

TEST(MemoryStore, CanBeAFileSystemThatCannotExchange) {
  const auto memory = std::make_shared<MemoryStore>();
  FaultStore store(memory);
  put(store, "/a", "one");
  put(store, "/b", "two");
  memory->forbid_exchange();
  expect_error(ErrorKind::kUnsupported, {"/a", "/b", "one step"}, [&] { store.exchange("/a", "/b"); });
  EXPECT_EQ(get(store, "/a"), "one");
}

/// Whether /done is whole or absent after a crash before any operation of publish(), and whole after all.
bool survives_crashes(bool sync_files, bool sync_folders) {
  for (const auto names : {MemoryStore::UnsyncedNames::kLost, MemoryStore::UnsyncedNames::kKept}) {
    for (int64_t nth = 0;; ++nth) {
      const auto memory = std::make_shared<MemoryStore>();
      FaultStore store(memory);
      bool crashed = false;
      store.before(std::nullopt, nth, [&] {
        crashed = true;
        throw IoError("the machine went down");
      });
      try {
        publish(store, sync_files, sync_folders);
      } catch (const IoError&) {
      }
      memory->crash(names);
      if (!memory->exists("/done") && !crashed) return false;
      if (memory->exists("/done") && (memory->list("/done").size() != 2 || get(*memory, "/done/one") != "1" ||
                                      get(*memory, "/done/two") != "2")) {
        return false;
      }
      if (!crashed) break;
    }
  }
  return true;
}

TEST(MemoryStore, CrashesTellASafeProtocolFromUnsafeOnes) {
  EXPECT_TRUE(survives_crashes(true, true));
  EXPECT_FALSE(survives_crashes(false, true));
  EXPECT_FALSE(survives_crashes(true, false));
}

}  // namespace
}  // namespace spolia
