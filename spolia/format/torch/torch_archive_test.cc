#include "spolia/format/torch/torch_archive.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"

namespace spolia {
namespace {

using testing::kind_thrown;
using testing::make_zip;
using testing::MemoryFile;

std::optional<ErrorKind> kind_of(const std::string& bytes, const std::vector<std::string>& words) {
  MemoryFile file(bytes);
  return kind_thrown(
      [&] {
        auto source = open_bytes(file, 0, file.size(), Codec::kNone);
        TorchArchive archive(*source, file.size());
        archive.pickle();
        archive.storage("0");
      },
      words);
}

TEST(TorchArchive, FindsRecordsUnderAnyRoot) {
  for (std::string root : {"archive", "state", "some name"}) {
    EXPECT_EQ(
        kind_of(make_zip({{.name = root + "/data.pkl", .data = "p"}, {.name = root + "/data/0", .data = ""}}),
                {}),
        std::nullopt);
  }
}

TEST(TorchArchive, OtherFilesAreRefusedByName) {
  using namespace std::string_literals;
  EXPECT_EQ(kind_of("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."s + std::string(600, 'x'),
                    {"1.6", "torch.save it again"}),
            ErrorKind::kUnsupported);
  EXPECT_EQ(kind_of(std::string(257, '\0') + "ustar" + std::string(600, '\0'), {"tar"}),
            ErrorKind::kUnsupported);
  EXPECT_EQ(kind_of("hello", {"not a torch.save archive"}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of("", {"not a torch.save archive"}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(make_zip({{.name = "mimetype", .data = "text"}}), {"data.pkl"}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(make_zip({{.name = "a/data.pkl", .data = "p"}, {.name = "a/constants.pkl", .data = "c"}}),
                    {"TorchScript"}),
            ErrorKind::kUnsupported);
  EXPECT_EQ(kind_of(make_zip({{.name = "a/data.pkl", .data = "p"}, {.name = "a/byteorder", .data = "big"}}),
                    {"little-endian"}),
            ErrorKind::kUnsupported);
  EXPECT_EQ(kind_of(make_zip({{.name = "a/data.pkl", .data = "p"}, {.name = "a/data/1", .data = ""}}),
                    {"a/data/0", "missing"}),
            ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace spolia
