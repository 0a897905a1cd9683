// What every store must do, run on each of them, and that they agree.
#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/threads.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

enum class Kind { kPosix, kMemory, kFault };

class StoreConformance : public testing::TestWithParam<Kind> {
 protected:
  StoreConformance() {
    if (GetParam() == Kind::kPosix) {
      store_ = posix_store();
      root_ = temp_.path();
      return;
    }
    store_ = std::make_shared<MemoryStore>();
    if (GetParam() == Kind::kFault) store_ = std::make_shared<FaultStore>(store_);
    root_ = "/root";
    store_->create_folder(root_);
  }

  fs::path at(const std::string& name) const { return root_ / name; }

  TempFolder temp_;
  std::shared_ptr<Store> store_;
  fs::path root_;
};

std::string kind_name(const testing::TestParamInfo<Kind>& kind) {
  return kind.param == Kind::kPosix ? "Posix" : kind.param == Kind::kMemory ? "Memory" : "Fault";
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreConformance, testing::Values(Kind::kPosix, Kind::kMemory, Kind::kFault),
                         kind_name);

TEST_P(StoreConformance, WhatIsWrittenIsRead) {
  const auto out = store_->create(at("a"));
  EXPECT_EQ(out->path(), at("a"));
  out->write(6, bytes_of("world"));
  out->write(0, bytes_of("hello "));
  out->write(100, {});  // writes nothing, so the file does not grow
  out->start_writeback(0, 11);
  out->sync();
  const auto in = store_->open(at("a"));
  EXPECT_EQ(in->path(), at("a"));
  EXPECT_EQ(in->size(), 11);
  EXPECT_EQ(text_of(*in), "hello world");
  std::array<std::byte, 3> part;
  in->read(4, part);
  EXPECT_TRUE(std::ranges::equal(part, bytes_of("o w")));
  in->read(11, {});
}

TEST_P(StoreConformance, WritesMayLeaveHolesAndOverlap) {
  const auto out = store_->create(at("a"));
  out->write(4, bytes_of("xyz"));
  out->write(5, bytes_of("Y"));
  EXPECT_EQ(get(*store_, at("a")), std::string("\0\0\0\0xYz", 7));
}

TEST_P(StoreConformance, EmptyFile) {
  put(*store_, at("a"), "");
  EXPECT_EQ(get(*store_, at("a")), "");
}

TEST_P(StoreConformance, ReadsOutsideTheFileAreCorrupt) {
  put(*store_, at("a"), "12345");
  const auto in = store_->open(at("a"));
  std::array<std::byte, 3> out;
  expect_error(ErrorKind::kCorrupt, {at("a"), "3 bytes at offset 3", "has 5 bytes"},
               [&] { in->read(3, out); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { in->read(-1, out); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { in->read(INT64_MAX, out); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { in->read(INT64_MIN, {}); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { in->read(6, {}); });
}

TEST_P(StoreConformance, WritesOutsideSixtyThreeBitsAreRefused) {
  const auto out = store_->create(at("a"));
  expect_error(ErrorKind::kInvalidArgument, {at("a")}, [&] { out->write(-1, bytes_of("x")); });
  expect_error(ErrorKind::kInvalidArgument, {at("a")}, [&] { out->write(INT64_MAX, bytes_of("x")); });
}

TEST_P(StoreConformance, CopiesRangesBetweenFiles) {
  put(*store_, at("a"), "0123456789");
  const auto in = store_->open(at("a"));
  const auto out = store_->create(at("b"));
  out->copy_from(*in, 2, 3, 5);
  out->copy_from(*in, 9, 0, 1);
  out->copy_from(*in, 10, 100, 0);  // copies nothing, so the file does not grow
  EXPECT_EQ(get(*store_, at("b")), std::string("9\0\00023456", 8));
  MemoryStore elsewhere;
  put(elsewhere, "/c", "abc");
  out->copy_from(*elsewhere.open("/c"), 1, 1, 2);
  EXPECT_EQ(get(*store_, at("b")), "9bc23456");
}

TEST_P(StoreConformance, CopiesMoreThanAPiece) {
  std::string text(3'500'000, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 % 251);
  put(*store_, at("a"), text);
  store_->create(at("b"))->copy_from(*store_->open(at("a")), 1, 0, 3'499'999);
  EXPECT_TRUE(get(*store_, at("b")) == text.substr(1));
}

TEST_P(StoreConformance, CopiesOutsideTheFileAreRefused) {
  put(*store_, at("a"), "12345");
  const auto in = store_->open(at("a"));
  const auto out = store_->create(at("b"));
  expect_error(ErrorKind::kCorrupt, {at("a"), "3 bytes at offset 3", "has 5 bytes"},
               [&] { out->copy_from(*in, 3, 0, 3); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { out->copy_from(*in, -1, 0, 3); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { out->copy_from(*in, 0, 0, -1); });
  expect_error(ErrorKind::kCorrupt, {at("a")}, [&] { out->copy_from(*in, INT64_MAX, 0, 1); });
  expect_error(ErrorKind::kInvalidArgument, {at("b")}, [&] { out->copy_from(*in, 0, -1, 3); });
  expect_error(ErrorKind::kInvalidArgument, {at("b")}, [&] { out->copy_from(*in, 0, INT64_MAX, 1); });
  EXPECT_EQ(get(*store_, at("b")), "");
}

TEST_P(StoreConformance, AClosedFileTakesNothingMore) {
  const auto out = store_->create(at("a"));
  out->write(0, bytes_of("text"));
  out->drop_cached();  // a hint that can be given too early
  out->sync();
  out->drop_cached();
  out->close();
  EXPECT_EQ(get(*store_, at("a")), "text");
  expect_error(ErrorKind::kIo, {at("a"), "Bad file descriptor"}, [&] { out->write(0, bytes_of("more")); });
  expect_error(ErrorKind::kIo, {at("a"), "Bad file descriptor"}, [&] { out->sync(); });
  expect_error(ErrorKind::kIo, {at("a"), "Bad file descriptor"}, [&] { out->close(); });
  EXPECT_EQ(get(*store_, at("a")), "text");
}

TEST_P(StoreConformance, AFileStaysReadableAfterItIsRenamedOrRemoved) {
  put(*store_, at("a"), "still here");
  const auto in = store_->open(at("a"));
  store_->rename(at("a"), at("b"));
  EXPECT_EQ(text_of(*in), "still here");
  store_->remove_all(at("b"));
  EXPECT_EQ(text_of(*in), "still here");
}

TEST_P(StoreConformance, OpenRefusesWhatIsNoFile) {
  store_->create_folder(at("folder"));
  put(*store_, at("file"), "x");
  expect_error(ErrorKind::kNotFound, {at("nothing")}, [&] { store_->open(at("nothing")); });
  expect_error(ErrorKind::kIo, {at("folder")}, [&] { store_->open(at("folder")); });
  expect_error(ErrorKind::kIo, {at("file/x")}, [&] { store_->open(at("file/x")); });
}

TEST_P(StoreConformance, CreateWantsAFreeNameInAFolder) {
  put(*store_, at("a"), "old");
  store_->create_folder(at("folder"));
  expect_error(ErrorKind::kIo, {at("a"), "exists"}, [&] { store_->create(at("a")); });
  expect_error(ErrorKind::kIo, {at("folder"), "exists"}, [&] { store_->create(at("folder")); });
  expect_error(ErrorKind::kNotFound, {at("no/a")}, [&] { store_->create(at("no/a")); });
  expect_error(ErrorKind::kIo, {at("a/b")}, [&] { store_->create(at("a/b")); });
  EXPECT_EQ(get(*store_, at("a")), "old");
}

TEST_P(StoreConformance, CreateFolderWantsAFreeNameInAFolder) {
  store_->create_folder(at("a"));
  expect_error(ErrorKind::kIo, {at("a"), "exists"}, [&] { store_->create_folder(at("a")); });
  expect_error(ErrorKind::kNotFound, {at("b/c")}, [&] { store_->create_folder(at("b/c")); });
  EXPECT_TRUE(store_->is_folder(at("a")));
}

TEST_P(StoreConformance, ExistsAndIsFolder) {
  store_->create_folder(at("folder"));
  put(*store_, at("file"), "x");
  EXPECT_TRUE(store_->exists(at("folder")));
  EXPECT_TRUE(store_->exists(at("file")));
  EXPECT_FALSE(store_->exists(at("nothing")));
  EXPECT_FALSE(store_->exists(at("file/x")));
  EXPECT_TRUE(store_->is_folder(at("folder")));
  EXPECT_FALSE(store_->is_folder(at("file")));
  EXPECT_FALSE(store_->is_folder(at("nothing")));
  EXPECT_FALSE(store_->is_folder(at("file/x")));
}

TEST_P(StoreConformance, ListIsSortedByNameAndGoesOneLevelDeep) {
  for (const char* name : {"b", "a10", "Z", "a2", "\xc3\xa9"}) put(*store_, at(name), name);
  store_->create_folder(at("c"));
  put(*store_, at("c/deep"), "x");
  const auto entries = store_->list(root_);
  std::vector<std::string> names;
  for (const FolderEntry& entry : entries) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"Z", "a10", "a2", "b", "c", "\xc3\xa9"}));
  EXPECT_EQ(entries[1].size, 3);
  EXPECT_FALSE(entries[1].is_folder);
  EXPECT_TRUE(entries[4].is_folder);
  EXPECT_EQ(entries[4].size, 0);
  EXPECT_EQ(store_->list(at("c")).size(), 1u);
  expect_error(ErrorKind::kNotFound, {at("nothing")}, [&] { store_->list(at("nothing")); });
  expect_error(ErrorKind::kIo, {at("b")}, [&] { store_->list(at("b")); });
}

TEST_P(StoreConformance, RenameMovesFilesAndFolders) {
  store_->create_folder(at("a"));
  store_->create_folder(at("b"));
  put(*store_, at("a/x"), "text");
  store_->rename(at("a/x"), at("b/y"));
  EXPECT_FALSE(store_->exists(at("a/x")));
  EXPECT_EQ(get(*store_, at("b/y")), "text");
  store_->rename(at("b"), at("a/b"));
  EXPECT_FALSE(store_->exists(at("b")));
  EXPECT_EQ(get(*store_, at("a/b/y")), "text");
}

TEST_P(StoreConformance, RenameNeverReplaces) {
  put(*store_, at("file"), "one");
  put(*store_, at("other"), "two");
  store_->create_folder(at("folder"));
  store_->create_folder(at("empty"));
  for (const char* to : {"other", "empty", "file"}) {
    expect_error(ErrorKind::kIo, {at("file"), "exists"}, [&] { store_->rename(at("file"), at(to)); });
  }
  expect_error(ErrorKind::kIo, {at("empty"), "exists"}, [&] { store_->rename(at("folder"), at("empty")); });
  expect_error(ErrorKind::kIo, {at("folder")}, [&] { store_->rename(at("folder"), at("folder/x")); });
  expect_error(ErrorKind::kNotFound, {at("no")}, [&] { store_->rename(at("no"), at("new")); });
  expect_error(ErrorKind::kNotFound, {at("no/x")}, [&] { store_->rename(at("file"), at("no/x")); });
  EXPECT_EQ(get(*store_, at("file")), "one");
  EXPECT_EQ(get(*store_, at("other")), "two");
}

TEST_P(StoreConformance, ReplaceTakesAFilesPlaceInOneStep) {
  put(*store_, at("new"), "new");
  put(*store_, at("old"), "old");
  store_->create_folder(at("folder"));
  store_->replace(at("new"), at("old"));
  EXPECT_EQ(get(*store_, at("old")), "new");
  EXPECT_FALSE(store_->exists(at("new")));
  store_->replace(at("old"), at("free"));
  EXPECT_EQ(get(*store_, at("free")), "new");
  expect_error(ErrorKind::kNotFound, {at("no")}, [&] { store_->replace(at("no"), at("free")); });
  expect_error(ErrorKind::kIo, {at("folder")}, [&] { store_->replace(at("folder"), at("free")); });
  expect_error(ErrorKind::kIo, {at("folder")}, [&] { store_->replace(at("free"), at("folder")); });
  expect_error(ErrorKind::kIo, {at("folder")}, [&] { store_->replace(at("folder"), at("folder/no/free")); });
  EXPECT_EQ(get(*store_, at("free")), "new");
}

TEST_P(StoreConformance, ExchangeSwapsWhateverTwoNamesName) {
  for (const char* folder : {"a", "b", "b/empty"}) store_->create_folder(at(folder));
  put(*store_, at("a/x"), "one");
  put(*store_, at("b/y"), "two");
  const auto in = store_->open(at("a/x"));
  store_->exchange(at("a"), at("b"));
  EXPECT_EQ(get(*store_, at("b/x")), "one");
  EXPECT_EQ(get(*store_, at("a/y")), "two");
  store_->exchange(at("b/x"), at("a/y"));
  EXPECT_EQ(get(*store_, at("b/x")), "two");
  EXPECT_EQ(get(*store_, at("a/y")), "one");
  store_->exchange(at("b/x"), at("a/empty"));
  EXPECT_TRUE(store_->is_folder(at("b/x")));
  EXPECT_EQ(get(*store_, at("a/empty")), "two");
  store_->exchange(at("a"), at("a"));
  EXPECT_EQ(store_->list(at("a")).size(), 2u);
  EXPECT_EQ(text_of(*in), "one");
}

TEST_P(StoreConformance, ExchangeWantsTwoNamesOfWhichNoneLiesInTheOther) {
  store_->create_folder(at("a"));
  put(*store_, at("a/x"), "text");
  put(*store_, at("b"), "other");
  expect_error(ErrorKind::kNotFound, {at("no"), at("b")}, [&] { store_->exchange(at("no"), at("b")); });
  expect_error(ErrorKind::kNotFound, {at("no")}, [&] { store_->exchange(at("b"), at("no")); });
  expect_error(ErrorKind::kIo, {at("b/x")}, [&] { store_->exchange(at("a"), at("b/x")); });
  expect_error(ErrorKind::kIo, {at("a"), at("a/x")}, [&] { store_->exchange(at("a"), at("a/x")); });
  expect_error(ErrorKind::kIo, {at("a"), at("a/x")}, [&] { store_->exchange(at("a/x"), at("a")); });
  EXPECT_EQ(get(*store_, at("a/x")), "text");
  EXPECT_EQ(get(*store_, at("b")), "other");
}

TEST_P(StoreConformance, NothingOfOursIsALink) {
  put(*store_, at("file"), "x");
  for (const char* name : {"file", "", "no", "file/x"}) EXPECT_FALSE(store_->is_link(at(name)));
}

TEST_P(StoreConformance, SyncFolder) {
  put(*store_, at("file"), "x");
  store_->sync_folder(root_);
  expect_error(ErrorKind::kNotFound, {at("no")}, [&] { store_->sync_folder(at("no")); });
  expect_error(ErrorKind::kIo, {at("file")}, [&] { store_->sync_folder(at("file")); });
}

TEST_P(StoreConformance, RemoveAll) {
  store_->create_folder(at("a"));
  store_->create_folder(at("a/b"));
  put(*store_, at("a/b/c"), "x");
  put(*store_, at("d"), "x");
  store_->remove_all(at("d"));
  store_->remove_all(at("a/"));
  store_->remove_all(at("a"));  // nothing there, nothing done
  store_->remove_all(at("a/b/c"));
  put(*store_, at("file"), "x");
  store_->remove_all(at("file/x"));
  EXPECT_TRUE(store_->exists(at("file")));
  store_->remove_all(at("file"));
  EXPECT_TRUE(store_->list(root_).empty());
}

TEST_P(StoreConformance, OpenInsideFindsFilesBelowTheFolder) {
  store_->create_folder(at("a"));
  put(*store_, at("a/..b"), "text");
  for (const fs::path& folder : {root_, at(""), at("a/..")}) {
    const auto file = store_->open_inside(folder, "a/..b");
    EXPECT_EQ(text_of(*file), "text");
    EXPECT_EQ(file->path(), folder / "a/..b");
  }
  expect_error(ErrorKind::kNotFound, {at("a/x")}, [&] { store_->open_inside(root_, "a/x"); });
  expect_error(ErrorKind::kNotFound, {at("no")}, [&] { store_->open_inside(at("no"), "x"); });
  expect_error(ErrorKind::kIo, {at("a")}, [&] { store_->open_inside(root_, "a"); });
  expect_error(ErrorKind::kIo, {at("a/..b")}, [&] { store_->open_inside(at("a/..b"), "."); });
  expect_error(ErrorKind::kIo, {root_}, [&] { store_->open_inside(root_, "."); });
}

TEST_P(StoreConformance, OpenInsideRefusesNamesThatLeadOut) {
  store_->create_folder(at("a"));
  put(*store_, at("x"), "secret");
  const auto refused = [&](const std::string& name, const std::string& reason) {
    expect_error(ErrorKind::kCorrupt, {at("a"), reason}, [&] { store_->open_inside(at("a"), name); });
  };
  refused("", "empty");
  refused(at("x"), "leads out of its folder");
  refused("/", "leads out of its folder");
  refused("..", "leads out of its folder");
  refused("../x", "leads out of its folder");
  refused("b/../../x", "leads out of its folder");
  refused("b/..", "leads out of its folder");
  refused(std::string("x\0y", 3), "NUL");
  refused("../\x1b[2J", "\"../\\x1b[2J\"");
}

TEST_P(StoreConformance, DisjointRangesWrittenAndReadByManyThreads) {
  constexpr size_t kBlock = 64 * 1024 + 7, kBlocks = 48;
  const auto block_bytes = [](size_t block) {
    std::vector<std::byte> bytes(kBlock);
    for (size_t i = 0; i < kBlock; ++i) bytes[i] = static_cast<std::byte>((block * 31 + i * 7) >> 2);
    return bytes;
  };
  const auto out = store_->create(at("big"));
  parallel_for(4, kBlocks, [&](size_t, size_t block) {
    const auto bytes =
        block_bytes(kBlocks - 1 - block);  // from the end, so that the file has holes for a while
    const int64_t offset = static_cast<int64_t>((kBlocks - 1 - block) * kBlock);
    out->write(offset, bytes);
    out->start_writeback(offset, kBlock);
  });
  out->sync();
  const auto in = store_->open(at("big"));
  ASSERT_EQ(in->size(), static_cast<int64_t>(kBlock * kBlocks));
  std::atomic<int> wrong = 0;
  parallel_for(4, kBlocks, [&](size_t, size_t block) {
    std::vector<std::byte> bytes(kBlock);
    in->read(static_cast<int64_t>(block * kBlock), bytes);
    wrong += bytes != block_bytes(block);
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(StoreConformance, OfManyThreadsOneGetsTheName) {
  for (size_t i = 0; i < 8; ++i) put(*store_, at("from" + std::to_string(i)), std::to_string(i));
  std::atomic<int> created = 0, renamed = 0;
  parallel_for(4, 8, [&](size_t, size_t i) {
    try {
      store_->create(at("created"));
      ++created;
    } catch (const IoError&) {
    }
    try {
      store_->rename(at("from" + std::to_string(i)), at("renamed"));
      ++renamed;
    } catch (const IoError&) {
    }
  });
  EXPECT_EQ(created, 1);
  EXPECT_EQ(renamed, 1);
  EXPECT_EQ(store_->list(root_).size(), 9u);
}

// ---- the stores against each other ----

/// Does one random thing and tells all that can be seen of it.
std::string outcome_of(Store& store, const fs::path& root, int operation, const fs::path& a,
                       const fs::path& b) {
  try {
    switch (operation) {
      case 0:
        put(store, root / a, a.native());
        return "created";
      case 1:
        store.create_folder(root / a);
        return "folder created";
      case 2:
        store.rename(root / a, root / b);
        return "renamed";
      case 3:
        store.remove_all(root / a);
        return "removed";
      case 4:
        return get(store, root / a);
      case 5:
        return text_of(*store.open_inside(root / a, b));
      case 6:
        store.sync_folder(root / a);
        return "synced";
      case 7:
        return fmt::format("{} {} {}", store.exists(root / a), store.is_folder(root / a),
                           store.is_link(root / a));
      case 8:
        store.exchange(root / a, root / b);
        return "exchanged";
      case 9:
        store.replace(root / a, root / b);
        return "replaced";
      default: {
        std::string text;
        for (const auto& entry : store.list(root / a)) {
          text += fmt::format("{} {} {}\n", entry.name, entry.is_folder, entry.size);
        }
        return text;
      }
    }
  } catch (const Error& error) {
    return std::string(name_of(error.kind()));
  }
}

RC_GTEST_PROP(Stores, AgreeOnAnySequenceOfOperations, ()) {
  const TempFolder temp;
  const auto posix = posix_store();
  MemoryStore memory;
  const auto name = rc::gen::element<fs::path>("a", "b", "a/a", "a/b", "b/a", "a/b/a", "./a", ".");
  const auto length = *rc::gen::inRange(0, 40);
  for (int step = 0; step < length; ++step) {
    const int operation = *rc::gen::inRange(0, 11);
    const fs::path a = *name, b = *name;
    // The root itself stays: it is another folder in each store.
    if ((operation <= 3 || operation == 8 || operation == 9) && (a == "." || b == ".")) continue;
    RC_ASSERT(outcome_of(*posix, temp.path(), operation, a, b) == outcome_of(memory, "/", operation, a, b));
  }
}

}  // namespace
}  // namespace spolia
