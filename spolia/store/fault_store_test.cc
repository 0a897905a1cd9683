// Faults come when they are asked for, and the log tells what happened.
#include "spolia/store/fault_store.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

class Faults : public testing::Test {
 protected:
  std::shared_ptr<MemoryStore> memory_ = std::make_shared<MemoryStore>();
  FaultStore store_{memory_};
};

TEST_F(Faults, CountsAndLogsInOrder) {
  publish(store_, true, true);
  using enum Operation;
  const std::vector<FaultStore::Event> expected = {
      {kCreateFolder, "/tmp"},    {kCreate, "/tmp/one"}, {kWrite, "/tmp/one"}, {kSync, "/tmp/one"},
      {kCreate, "/tmp/two"},      {kWrite, "/tmp/two"},  {kSync, "/tmp/two"},  {kSyncFolder, "/tmp"},
      {kRename, "/tmp", "/done"}, {kSyncFolder, "/"},
  };
  EXPECT_EQ(store_.log(), expected);
  EXPECT_EQ(store_.count(), 10);
  EXPECT_EQ(store_.count(kSyncFolder), 2);
  EXPECT_EQ(store_.count(kRead), 0);
}

TEST_F(Faults, EveryOperationCanFail) {
  put(*memory_, "/a", "text");
  const auto in = store_.open("/a");
  const auto out = store_.create("/b");
  std::array<std::byte, 1> byte;
  using enum Operation;
  const std::vector<std::pair<Operation, std::function<void()>>> operations = {
      {kOpen, [&] { store_.open("/a"); }},
      {kOpen, [&] { store_.open_inside("/", "a"); }},
      {kRead, [&] { in->read(0, byte); }},
      {kCreate, [&] { store_.create("/c"); }},
      {kWrite, [&] { out->write(0, byte); }},
      {kStartWriteback, [&] { out->start_writeback(0, 1); }},
      {kCopy, [&] { out->copy_from(*in, 0, 0, 4); }},
      {kSync, [&] { out->sync(); }},
      {kDropCached, [&] { out->drop_cached(); }},
      {kExists, [&] { store_.exists("/a"); }},
      {kIsFolder, [&] { store_.is_folder("/a"); }},
      {kIsLink, [&] { store_.is_link("/a"); }},
      {kList, [&] { store_.list("/"); }},
      {kCreateFolder, [&] { store_.create_folder("/f"); }},
      {kExchange, [&] { store_.exchange("/a", "/b"); }},
      {kRename, [&] { store_.rename("/a", "/r"); }},
      {kSyncFolder, [&] { store_.sync_folder("/"); }},
      {kRemoveAll, [&] { store_.remove_all("/a"); }},
      {kClose, [&] { out->close(); }},
  };
  for (const auto& [operation, run] : operations) {
    SCOPED_TRACE(name_of(operation));
    store_.fail(operation, 0, EIO);
    expect_error(ErrorKind::kIo, {"injected", "Input/output error"}, run);
  }
  EXPECT_EQ(memory_->list("/").size(), 2u);  // nothing was done
  for (const auto& [operation, run] : operations) EXPECT_NO_THROW(run()) << name_of(operation);
}

TEST_F(Faults, TheNthFailsOnceOrForGood) {
  const auto out = store_.create("/a");
  const auto write = [&](const char* text) { out->write(0, bytes_of(text)); };
  write("0");
  store_.fail(Operation::kWrite, 1, EINTR);
  write("1");
  EXPECT_THROW(write("2"), IoError);
  write("3");
  EXPECT_EQ(get(*memory_, "/a"), "3");
  store_.fail(Operation::kWrite, 1, ENOSPC, FaultStore::Times::kFromThenOn);
  write("4");
  for (int i = 0; i < 3; ++i) expect_error(ErrorKind::kIo, {"No space left"}, [&] { write("5"); });
  out->sync();  // another operation
  EXPECT_EQ(get(*memory_, "/a"), "4");
}

TEST_F(Faults, AnActionMayUseTheStore) {
  put(*memory_, "/a", "old");
  store_.before(Operation::kOpen, 0, [&] {
    store_.remove_all("/a");
    put(store_, "/a", "new");
  });
  EXPECT_EQ(get(store_, "/a"), "new");
}

TEST_F(Faults, CopiesAreOneOperationAndTakeDamageAlong) {
  put(store_, "/a", "abcdef");
  const auto in = store_.open("/a");
  const auto out = store_.create("/b");
  out->copy_from(*in, 1, 0, 3);
  EXPECT_EQ(store_.log().back(), (FaultStore::Event{Operation::kCopy, "/a", "/b"}));
  EXPECT_EQ(store_.count(Operation::kRead), 0);
  EXPECT_EQ(get(*memory_, "/b"), "bcd");
  store_.flip("/a", 1);
  out->copy_from(*in, 1, 0, 3);
  EXPECT_EQ(get(*memory_, "/b"), "\x9d\x63\x64");
  store_.shrink("/a", 3);
  expect_error(ErrorKind::kCorrupt, {"/a", "has 3 bytes"}, [&] { out->copy_from(*in, 1, 0, 3); });
}

TEST_F(Faults, FlippedBytesAndShrunkFiles) {
  put(store_, "/a", "abcdef");
  store_.flip("/a", 2);
  const auto in = store_.open("/a");
  EXPECT_EQ(text_of(*in),
            "ab\x9c"
            "def");
  std::array<std::byte, 2> out;
  in->read(3, out);
  EXPECT_TRUE(std::ranges::equal(out, bytes_of("de")));
  in->read(0, out);
  EXPECT_TRUE(std::ranges::equal(out, bytes_of("ab")));
  EXPECT_EQ(get(*memory_, "/a"), "abcdef");
  store_.shrink("/a", 4);
  EXPECT_EQ(in->size(), 6);
  in->read(2, out);
  expect_error(ErrorKind::kCorrupt, {"/a", "2 bytes at offset 3", "has 4 bytes"}, [&] { in->read(3, out); });
}

}  // namespace
}  // namespace spolia
