#include "spolia/format/open_files.h"

#include <atomic>
#include <string>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/threads.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

class OpenFilesTest : public testing::Test {
 protected:
  OpenFilesTest() {
    store_->create_folder("/c");
    catalog_.root = "/c";
    for (const char* name : {"a", "bb", "ccc"}) {
      store_->create(catalog_.root / name)->write(0, bytes_of(name));
      catalog_.files.push_back(name);
    }
  }

  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  Catalog catalog_;
};

TEST_F(OpenFilesTest, OpensAFileOnceAndKeepsIt) {
  OpenFiles files(store_);
  const InputFile& last = files.get(catalog_, 2);
  const InputFile& first = files.get(catalog_, 0);
  EXPECT_EQ(last.size(), 3);
  EXPECT_EQ(first.size(), 1);
  EXPECT_EQ(&files.get(catalog_, 2), &last);
  EXPECT_EQ(&files.get(catalog_, 0), &first);
}

TEST_F(OpenFilesTest, KeepsWhatItIsGiven) {
  OpenFiles files(store_);
  catalog_.files.push_back("not there");
  const InputFile& kept = files.keep(3, store_->open("/c/bb"));
  EXPECT_EQ(&files.get(catalog_, 3), &kept);
  EXPECT_EQ(&files.keep(3, store_->open("/c/a")), &kept);
}

TEST_F(OpenFilesTest, RefusesToLeaveTheFolder) {
  OpenFiles files(store_);
  store_->create("/outside")->write(0, bytes_of("x"));
  catalog_.files = {"../outside", "/outside", "missing"};
  EXPECT_THROW(files.get(catalog_, 0), CorruptError);
  EXPECT_THROW(files.get(catalog_, 1), CorruptError);
  EXPECT_THROW(files.get(catalog_, 2), NotFoundError);
}

TEST_F(OpenFilesTest, ManyThreadsGetTheSameFiles) {
  OpenFiles files(store_);
  std::atomic<int> wrong = 0;
  parallel_for(4, 300, [&](size_t, size_t item) {
    uint32_t index = static_cast<uint32_t>(item % 3);
    const InputFile& file = files.get(catalog_, index);
    if (file.size() != index + 1 || &file != &files.get(catalog_, index)) ++wrong;
  });
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace spolia
