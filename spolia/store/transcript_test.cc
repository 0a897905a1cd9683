#include "spolia/store/transcript.h"

#include <cerrno>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/store/fault_store.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

std::shared_ptr<MemoryStore> filled_store() {
  const auto store = std::make_shared<MemoryStore>();
  store->create_folder("/a");
  store->create_folder("/a/folder");
  put(*store, "/a/one", "the first");
  put(*store, "/a/two", "");
  return store;
}

/// What somebody asks who opens something, and what comes of it, as text.
std::string ask(const Store& store) {
  std::string said;
  auto note = [&](const std::function<std::string()>& question) {
    try {
      said += question() + "\n";
    } catch (const Error& error) {
      said += fmt::format("{}: {}\n", name_of(error.kind()), error.what());
    }
  };
  const auto flag = [](bool value) { return std::string(value ? "yes" : "no"); };
  for (const char* path : {"/a", "/a/one", "/b"}) {
    note([&] { return flag(store.exists(path)); });
    note([&] { return flag(store.is_folder(path)); });
    note([&] { return flag(store.is_link(path)); });
    note([&] {
      std::string text;
      for (const FolderEntry& entry : store.list(path)) {
        text += fmt::format("{} {} {}, ", entry.name, entry.is_folder, entry.size);
      }
      return text;
    });
    note([&] { return text_of(*store.open(path)); });
  }
  note([&] { return text_of(*store.open_inside("/a", "two")); });
  note([&] { return text_of(*store.open_inside("/a", "../b")); });
  note([&] {
    const auto file = store.open("/a/one");
    std::string part(5, '\0');
    file->read(4, std::as_writable_bytes(std::span(part)));
    return part + file->path().string() + std::to_string(file->size());
  });
  note([&] {
    std::string part(5, '\0');
    store.open("/a/one")->read(5, std::as_writable_bytes(std::span(part)));
    return part;
  });
  return said;
}

TEST(Transcript, AnswersTheSameWithoutAskingAgain) {
  const auto store = filled_store();
  const auto faults = std::make_shared<FaultStore>(store);
  const auto transcript = std::make_shared<Transcript>();
  const std::string truth = ask(*store);
  EXPECT_EQ(ask(*recording_store(faults, transcript)), truth);
  EXPECT_GT(faults->count(), 15);

  const int64_t before = faults->count();
  EXPECT_EQ(ask(*replaying_store(faults, Transcript::decode(transcript->encode()))), truth);
  EXPECT_EQ(faults->count(), before);
}

TEST(Transcript, ErrorsAreReplayedWithKindAndText) {
  const auto faults = std::make_shared<FaultStore>(filled_store());
  faults->fail(Operation::kRead, 0, EIO, FaultStore::Times::kFromThenOn);
  faults->fail(Operation::kList, 0, EACCES, FaultStore::Times::kFromThenOn);
  const auto transcript = std::make_shared<Transcript>();
  const std::string truth = ask(*faults);
  EXPECT_NE(truth.find("I/O"), std::string::npos) << truth;
  EXPECT_EQ(ask(*recording_store(faults, transcript)), truth);
  EXPECT_EQ(ask(*replaying_store(std::make_shared<MemoryStore>(), transcript)), truth);
}

TEST(Transcript, TheRestIsAskedOfTheStore) {
  const auto store = filled_store();
  const auto faults = std::make_shared<FaultStore>(store);
  const auto transcript = std::make_shared<Transcript>();
  {
    const auto recording = recording_store(store, transcript);
    const auto file = recording->open("/a/one");
    std::string part(3, '\0');
    file->read(0, std::as_writable_bytes(std::span(part)));
    transcript->close();
    EXPECT_TRUE(transcript->is_closed());
    EXPECT_EQ(text_of(*file), "the first");  // is not kept
    EXPECT_TRUE(recording->exists("/a/two"));
  }
  const auto replaying = replaying_store(faults, Transcript::decode(transcript->encode()));
  const auto file = replaying->open("/a/one");
  std::string part(3, '\0');
  file->read(0, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, "the");
  EXPECT_EQ(faults->count(), 0);
  for (int again = 0; again < 2; ++again) EXPECT_EQ(text_of(*file), "the first");
  EXPECT_EQ(faults->count(Operation::kOpen), 1);
  EXPECT_EQ(faults->count(Operation::kRead), 2);
  EXPECT_TRUE(replaying->exists("/a/two"));
  EXPECT_EQ(faults->count(Operation::kExists), 1);
}

TEST(Transcript, AFileThatIsAnotherOneHereIsRefused) {
  const auto transcript = std::make_shared<Transcript>();
  recording_store(filled_store(), transcript)->open("/a/one");
  const auto other = std::make_shared<MemoryStore>();
  other->create_folder("/a");
  put(*other, "/a/one", "another");
  const Error error = error_of([&] { text_of(*replaying_store(other, transcript)->open("/a/one")); });
  EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
  EXPECT_NE(std::string(error.what()).find("has 7 bytes here, and 9 on the rank that opened it first"),
            std::string::npos)
      << error.what();
}

TEST(Transcript, OnlyReads) {
  const auto transcript = std::make_shared<Transcript>();
  for (const auto& made :
       {recording_store(filled_store(), transcript), replaying_store(filled_store(), transcript)}) {
    const auto store = std::const_pointer_cast<Store>(made);
    const std::function<void()> changes[] = {
        [&] { store->create("/x"); },         [&] { store->create_folder("/x"); },
        [&] { store->rename("/a", "/x"); },   [&] { store->replace("/a/one", "/x"); },
        [&] { store->exchange("/a", "/x"); }, [&] { store->sync_folder("/a"); },
        [&] { store->remove_all("/a"); }};
    for (const auto& change : changes) EXPECT_EQ(error_of(change).kind(), ErrorKind::kUnsupported);
  }
}

TEST(Transcript, BytesThatAreNoneAreRefused) {
  const auto transcript = std::make_shared<Transcript>();
  ask(*recording_store(filled_store(), transcript));
  const std::string bytes = transcript->encode();
  EXPECT_EQ(Transcript::decode("")->find("exists /a"), nullptr);
  EXPECT_THROW(Transcript::decode(bytes.substr(0, bytes.size() - 1)), CorruptError);
  const auto use = [](std::string_view wrong) {
    try {
      const auto store = replaying_store(filled_store(), Transcript::decode(wrong));
      store->exists("/a");
      store->list("/a");
      std::string part(5, '\0');
      store->open("/a/one")->read(4, std::as_writable_bytes(std::span(part)));
    } catch (const Error&) {
    }
  };
  for (size_t length = 0; length < bytes.size(); ++length) use(std::string_view(bytes).substr(0, length));
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (const unsigned bit : {0u, 5u, 7u}) {
      std::string wrong = bytes;
      wrong[at] = static_cast<char>(static_cast<unsigned char>(wrong[at]) ^ (1u << bit));
      use(wrong);
    }
  }
}

}  // namespace
}  // namespace spolia
