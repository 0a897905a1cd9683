#include "spolia/format/torch/torch_zip_writer.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "spolia/format/torch/dcp_metadata.h"
#include "spolia/format/torch/testing.h"
#include "spolia/format/torch/torch_archive.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// An archive without its serialization id: that and its two CRCs are zero.
std::string without_id(std::string archive) {
  auto blank = [&](size_t at, size_t length) { std::fill_n(archive.begin() + ptrdiff_t(at), length, '\0'); };
  const size_t directory = archive.rfind("PK\1\2");
  blank(directory + 16, 4);
  const size_t descriptor = archive.rfind("PK\7\10", directory);
  blank(descriptor - 40, 40);
  blank(descriptor + 4, 4);
  return archive;
}

/// The archive that is the item, made anew from its pickle and storage.
std::string written_anew(const std::string& item) {
  auto bytes = bytes_in_memory(to_bytes(item), "an item");
  TorchArchive archive(*bytes, std::ssize(item));
  const std::string pickle = text_of(archive.pickle());
  const ZipRecord* storage = archive.zip().find("archive/data/0");
  if (storage == nullptr) return write_torch_archive(pickle);
  const std::string data = text_of(archive.zip().read(*storage, storage->size));
  const ArchiveFrame frame = frame_torch_archive(pickle, std::ssize(data), crc32(0, bytes_of(data)));
  return frame.before + data + frame.after;
}

TEST(TorchZipWriter, BytesAreThoseOfPyTorch) {
  int items = 0;
  for (const char* fixture : {"dtypes-1", "nested-1", "muon-1", "uneven-5", "hsdp-2x2"}) {
    const auto folder = kData / "torch-2.14" / fixture / "checkpoint";
    const Catalog catalog = read_dcp_metadata(bytes_of(read_file(folder / ".metadata")), ".metadata");
    std::vector<std::string> files;
    for (const std::string& name : catalog.files) files.push_back(read_file(folder / name));
    auto check = [&](const std::string& name, const Extent& extent) {
      const std::string item =
          files[extent.file].substr(static_cast<size_t>(extent.offset), static_cast<size_t>(extent.length));
      EXPECT_EQ(without_id(written_anew(item)), without_id(item)) << fixture << ": " << name;
      ++items;
    };
    for (const TensorEntry& tensor : catalog.tensors) {
      for (const Extent& extent : tensor.extents) check(tensor.name, extent);
    }
    for (const ValueEntry& value : catalog.values) check(value.name, value.extent.value());
  }
  EXPECT_GT(items, 100);
}

TEST(TorchZipWriter, TheIdFollowsFromTheContents) {
  const ArchiveFrame frame = frame_torch_archive("pickle", 10, 1);
  EXPECT_EQ(frame_torch_archive("pickle", 10, 1).after, frame.after);
  EXPECT_NE(frame_torch_archive("pickle", 10, 2).after, frame.after);
  EXPECT_NE(write_torch_archive("a"), write_torch_archive("b"));
}

/// A frame around zeros that are nowhere.
class SparseArchive final : public ByteSource {
 public:
  SparseArchive(ArchiveFrame frame, int64_t length) : frame_(std::move(frame)), length_(length) {}

  int64_t size() override { return std::ssize(frame_.before) + length_ + std::ssize(frame_.after); }
  void read(int64_t offset, std::span<std::byte> out) override {
    ASSERT_LE(offset + std::ssize(out), size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = at(offset + static_cast<int64_t>(i));
  }
  std::string where() const override { return "a sparse archive"; }

 private:
  std::byte at(int64_t offset) const {
    const int64_t after = std::ssize(frame_.before) + length_;
    if (offset < std::ssize(frame_.before)) return std::byte(frame_.before[static_cast<size_t>(offset)]);
    return offset < after ? std::byte{0} : std::byte(frame_.after[static_cast<size_t>(offset - after)]);
  }

  ArchiveFrame frame_;
  int64_t length_;
};

constexpr int64_t kGiB4 = int64_t{1} << 32;

TEST(TorchZipWriter, ArchivesOfAnySizeAreSound) {
  const std::string pickle(500, 'p');
  for (int64_t length : {int64_t{0}, int64_t{1}, int64_t{4096}, kGiB4 - 3000, kGiB4 - 1500, kGiB4 - 1200,
                         kGiB4 - 700, kGiB4 - 2, kGiB4 - 1, kGiB4, 5 * (kGiB4 / 4), int64_t{1} << 42}) {
    SCOPED_TRACE(length);
    const uint32_t crc = length == 0 ? 0 : 0xABCD1234;
    const ArchiveFrame frame = frame_torch_archive(pickle, length, crc);
    EXPECT_EQ(frame.before.size() % 64, 0U);
    const ArchiveFrame other = frame_torch_archive(std::string(500, 'q'), length, 0);
    EXPECT_EQ(other.before.size(), frame.before.size());
    EXPECT_EQ(other.after.size(), frame.after.size());

    SparseArchive bytes(frame, length);
    TorchArchive archive(bytes, bytes.size());
    EXPECT_EQ(text_of(archive.pickle()), pickle);
    const ZipRecord& storage = archive.storage("0");
    EXPECT_EQ(storage.size, length);
    EXPECT_EQ(storage.crc32, length == 0 ? std::nullopt : std::optional(crc));
    EXPECT_EQ(archive.zip().data_start(storage), std::ssize(frame.before));
    for (const auto& [name, text] : {std::pair{"version", "3\n"},
                                     {"byteorder", "little"},
                                     {".format_version", "1"},
                                     {".storage_alignment", "64"}}) {
      const ZipRecord* record = archive.zip().find(std::string("archive/") + name);
      ASSERT_NE(record, nullptr) << name;
      EXPECT_EQ(text_of(archive.zip().read(*record, 100)), text);
      EXPECT_EQ(archive.zip().data_start(*record) % 64, 0);
    }
    EXPECT_EQ(archive.zip().records().size(), 7U);
    EXPECT_EQ(archive.zip().records().back().size, 40);
  }
}

TEST(TorchZipWriter, ACrcOf0SaysThatThereIsNone) {
  SparseArchive bytes(frame_torch_archive("p", 100, 0), 100);
  EXPECT_EQ(TorchArchive(bytes, bytes.size()).storage("0").crc32, std::nullopt);
}

/// As miniz writes them for PyTorch.
TEST(TorchZipWriter, Zip64Fields) {
  const int64_t length = 5 * (kGiB4 / 4);
  const ArchiveFrame frame = frame_torch_archive("p", length, 7);
  const std::string size = little(static_cast<uint64_t>(length));
  const size_t header = frame.before.rfind("PK\3\4");
  EXPECT_EQ(frame.before.substr(header + 30, 14), "archive/data/0");
  EXPECT_EQ(frame.before.substr(header + 44, 22),
            std::string("\1\0\20\0", 4) + size + std::string(8, '\0') + "FB");
  EXPECT_EQ(frame.after.substr(0, 24), "PK\7\10" + little(uint32_t{7}) + size + size);
  // Records beyond 4 GiB have their offset in the field, and sizes of 64 bits after their data.
  const uint64_t next = frame.before.size() + static_cast<uint64_t>(length) + 24;
  EXPECT_EQ(frame.after.substr(24, 4), "PK\3\4");
  EXPECT_EQ(frame.after.substr(24 + 30, 15 + 12),
            "archive/version" + std::string("\1\0\10\0", 4) + little(next));
  const size_t descriptor = frame.after.find("3\nPK\7\10");
  ASSERT_NE(descriptor, std::string::npos);
  EXPECT_EQ(frame.after.substr(descriptor + 10, 16), little(uint64_t{2}) + little(uint64_t{2}));
  // The directory says 4 GiB - 1, and the truth in its fields.
  const size_t central = frame.after.find("archive/data/0");
  EXPECT_EQ(frame.after.substr(central - 26, 8), std::string(8, '\xFF'));
  EXPECT_EQ(frame.after.substr(central + 14, 20), std::string("\1\0\20\0", 4) + size + size);
  const size_t version = frame.after.rfind("archive/version");
  EXPECT_EQ(frame.after.substr(version - 4, 4), std::string(4, '\xFF'));
  EXPECT_EQ(frame.after.substr(version + 15, 12), std::string("\1\0\10\0", 4) + little(next));
}

}  // namespace
}  // namespace spolia
