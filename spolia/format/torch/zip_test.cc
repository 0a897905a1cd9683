#include "spolia/format/torch/zip.h"

#include <string>

#include <gtest/gtest.h>
#include <zlib.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing.h"

namespace spolia {
namespace {

using testing::kind_thrown;
using testing::little;
using testing::make_zip;
using testing::MemoryFile;
using testing::TestRecord;

/// A deflate stream of one stored block.
std::string stored_deflate(const std::string& text) {
  auto length = static_cast<uint16_t>(text.size());
  return '\1' + little(length) + little(static_cast<uint16_t>(~length)) + text;
}

uint32_t crc_of(std::string_view text) { return crc32(0, bytes_of(text)); }

const std::vector<TestRecord> kRecords{{.name = "a/data.pkl", .data = "some pickle"},
                                       {.name = "a/empty", .data = ""},
                                       {.name = "a/packed",
                                        .data = stored_deflate("deflated"),
                                        .method = 8,
                                        .size = 8,
                                        .crc = crc_of("deflated")}};

/// Opens the archive and reads every record: their contents by name.
std::vector<std::pair<std::string, std::string>> read_all_records(const std::string& archive) {
  MemoryFile file(archive);
  auto bytes = open_bytes(file, 0, file.size(), Codec::kNone);
  Zip zip(*bytes);
  std::vector<std::pair<std::string, std::string>> contents;
  for (const ZipRecord& record : zip.records()) {
    EXPECT_EQ(zip.find(record.name), &record);
    auto data = zip.read(record, 1 << 20);
    contents.emplace_back(record.name, std::string(reinterpret_cast<const char*>(data.data()), data.size()));
  }
  return contents;
}

const std::vector<std::pair<std::string, std::string>> kContents{
    {"a/data.pkl", "some pickle"}, {"a/empty", ""}, {"a/packed", "deflated"}};

std::optional<ErrorKind> kind_of(const std::string& archive, const std::vector<std::string>& words = {}) {
  return kind_thrown([&] { read_all_records(archive); }, words);
}

/// `archive` with the bytes at `at` replaced.
std::string patched(std::string archive, size_t at, const std::string& bytes) {
  return archive.replace(at, bytes.size(), bytes);
}

// The places of the parts of make_zip(kRecords).
size_t directory_of(const std::string& archive) { return archive.find("PK\1\2"); }
size_t end_of(const std::string& archive) { return archive.rfind("PK\5\6"); }

TEST(Zip, ReadsStoredAndDeflatedRecords) {
  for (bool zip64 : {false, true}) {
    EXPECT_EQ(read_all_records(make_zip(kRecords, zip64)), kContents);
    EXPECT_TRUE(read_all_records(make_zip({}, zip64)).empty());
  }
}

TEST(Zip, CommentsAndJunkMayFollow) {
  std::string archive = make_zip(kRecords);
  EXPECT_EQ(read_all_records(archive + std::string(16, '\0')), kContents);
  EXPECT_EQ(read_all_records(archive + std::string(0xFFFF, 'x')), kContents);
  EXPECT_EQ(kind_of(archive + std::string(0x10000, 'x')), ErrorKind::kCorrupt);
  std::string commented = patched(archive, archive.size() - 2, little<uint16_t>(5)) + "hello";
  EXPECT_EQ(read_all_records(commented), kContents);
}

TEST(Zip, NothingMayComeBefore) {
  for (bool zip64 : {false, true}) {
    EXPECT_EQ(kind_of("x" + make_zip(kRecords, zip64)), ErrorKind::kCorrupt);
  }
}

TEST(Zip, EveryTruncationIsAnError) {
  for (bool zip64 : {false, true}) {
    std::string archive = make_zip(kRecords, zip64);
    for (size_t length = 0; length < archive.size(); ++length) {
      EXPECT_EQ(kind_of(archive.substr(0, length)), ErrorKind::kCorrupt) << length;
    }
  }
}

// The names and contents of stored records are held by the directory and their CRCs: whatever byte changes,
// what is read without an error is either right or under another name.
TEST(Zip, EveryDamagedByteIsAnErrorOrHarmless) {
  for (bool zip64 : {false, true}) {
    const std::string archive = make_zip(kRecords, zip64);
    for (size_t i = 0; i < archive.size(); ++i) {
      for (int flip : {0x01, 0x08, 0x80, 0xFF}) {
        std::string damaged = archive;
        damaged[i] = static_cast<char>(damaged[i] ^ flip);
        try {
          auto contents = read_all_records(damaged);
          if (contents.empty()) continue;  // counts of 0 are refused or leave bytes; see below
          ASSERT_EQ(contents.size(), kContents.size());
          for (size_t r = 0; r < contents.size(); ++r)
            EXPECT_EQ(contents[r].second, kContents[r].second) << i;
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("/memory"), std::string::npos) << error.what();
        }
      }
    }
  }
}

TEST(Zip, DirectoryMustBeWhatTheEndSays) {
  std::string archive = make_zip(kRecords);
  size_t end = end_of(archive);
  for (uint16_t count : std::initializer_list<uint16_t>{0, 1, 2, 4, 0xFFFF}) {
    EXPECT_EQ(kind_of(patched(archive, end + 10, little(count))), ErrorKind::kCorrupt) << count;
  }
  EXPECT_EQ(kind_of(patched(archive, end + 12, little<uint32_t>(0xFFFFFFFF))), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(patched(archive, end + 16, little<uint32_t>(0xFFFFFFFF))), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(patched(archive, end + 4, little<uint16_t>(1))), ErrorKind::kUnsupported);  // disks
  std::string archive64 = make_zip(kRecords, true);
  size_t end64 = archive64.rfind("PK\6\6");
  for (size_t field : {4, 32, 40, 48}) {
    for (uint64_t value : {uint64_t{0}, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{1} << 63}) {
      EXPECT_EQ(kind_of(patched(archive64, end64 + field, little(value))), ErrorKind::kCorrupt)
          << field << value;
    }
  }
  size_t locator = archive64.rfind("PK\6\7");
  for (uint64_t value : {uint64_t{0}, uint64_t{1} << 40, ~uint64_t{0}}) {
    EXPECT_EQ(kind_of(patched(archive64, locator + 8, little(value))), ErrorKind::kCorrupt) << value;
  }
  EXPECT_EQ(kind_of(patched(archive64, locator + 16, little<uint32_t>(2))), ErrorKind::kUnsupported);
}

TEST(Zip, DuplicateNamesAndOverlapsAreCorrupt) {
  EXPECT_EQ(kind_of(make_zip({{.name = "x", .data = "1"}, {.name = "x", .data = "2"}}), {"\"x\"", "twice"}),
            ErrorKind::kCorrupt);
  std::string archive = make_zip(kRecords);
  size_t directory = directory_of(archive);
  size_t second = archive.find("PK\1\2", directory + 1);
  size_t third = archive.find("PK\1\2", second + 1);
  // The second record where the first is; in the middle of it; in the directory; outside of the file.
  for (uint32_t offset : {0u, 20u, static_cast<uint32_t>(directory), 0xFFFFFFFEu}) {
    EXPECT_EQ(kind_of(patched(archive, second + 42, little(offset))), ErrorKind::kCorrupt) << offset;
  }
  // A last record that reaches into the directory.
  EXPECT_EQ(kind_of(patched(archive, third + 20, little<uint32_t>(14))), ErrorKind::kCorrupt);
}

TEST(Zip, WhatIsNotReadIsSaidByName) {
  std::string archive = make_zip(kRecords);
  size_t directory = directory_of(archive);
  EXPECT_EQ(kind_of(patched(archive, directory + 8, little<uint16_t>(1)), {"data.pkl", "encrypted"}),
            ErrorKind::kUnsupported);
  EXPECT_EQ(kind_of(patched(archive, directory + 10, little<uint16_t>(12)), {"data.pkl", "12"}),
            ErrorKind::kUnsupported);
}

TEST(Zip, LocalHeadersMustAgree) {
  std::string archive = make_zip(kRecords);
  EXPECT_EQ(kind_of(patched(archive, 0, "XX")), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(patched(archive, 6, little<uint16_t>(1))), ErrorKind::kCorrupt);        // encrypted
  EXPECT_EQ(kind_of(patched(archive, 8, little<uint16_t>(8))), ErrorKind::kCorrupt);        // method
  EXPECT_EQ(kind_of(patched(archive, 18, little<uint32_t>(3))), ErrorKind::kCorrupt);       // size
  EXPECT_EQ(kind_of(patched(archive, 26, little<uint16_t>(3))), ErrorKind::kCorrupt);       // name's length
  EXPECT_EQ(kind_of(patched(archive, 28, little<uint16_t>(0xFFFF))), ErrorKind::kCorrupt);  // extra field
  EXPECT_EQ(kind_of(patched(archive, 30, "b")), ErrorKind::kCorrupt);                       // name
}

TEST(Zip, ChecksumsAreChecked) {
  std::vector<TestRecord> records{{.name = "x", .data = "payload", .crc = 1}};
  EXPECT_EQ(kind_of(make_zip(records), {"\"x\"", "CRC"}), ErrorKind::kCorrupt);
  records[0].crc = 0;  // not computed
  EXPECT_EQ(read_all_records(make_zip(records))[0].second, "payload");
  MemoryFile file(make_zip(records));
  auto bytes = open_bytes(file, 0, file.size(), Codec::kNone);
  EXPECT_FALSE(Zip(*bytes).records()[0].crc32.has_value());
}

TEST(Zip, BombsAreRefused) {
  // More than deflate can hold.
  EXPECT_EQ(kind_of(make_zip({{.name = "x", .data = stored_deflate("1"), .method = 8, .size = 1'000'000}})),
            ErrorKind::kCorrupt);
  // Less, or more, than was said.
  for (int64_t size : {0, 7, 9, 1000}) {
    TestRecord record{.name = "x", .data = stored_deflate("deflated"), .method = 8, .size = size, .crc = 0};
    EXPECT_EQ(kind_of(make_zip({record})), ErrorKind::kCorrupt) << size;
  }
  // More than the caller takes.
  MemoryFile file(make_zip({{.name = "x", .data = "payload"}}));
  auto bytes = open_bytes(file, 0, file.size(), Codec::kNone);
  Zip zip(*bytes);
  EXPECT_EQ(kind_thrown([&] { zip.read(zip.records()[0], 6); }, {"\"x\""}), ErrorKind::kUnsupported);
  EXPECT_EQ(zip.read(zip.records()[0], 7).size(), 7u);
}

TEST(Zip, TruncatedPyTorchItemsAreCorrupt) {
  std::string file = testing::read_file(std::filesystem::path(SPOLIA_TEST_DATA) /
                                        "torch-2.14/torch-save-1/checkpoint/state.pt");
  ASSERT_GT(read_all_records(file).size(), 100u);
  for (size_t length = 0; length < file.size(); length += 997) {
    EXPECT_EQ(kind_of(file.substr(0, length)), ErrorKind::kCorrupt) << length;
  }
}

}  // namespace
}  // namespace spolia
