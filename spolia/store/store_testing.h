// What the tests of stores share.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/store/store.h"

namespace spolia {

namespace fs = std::filesystem;

/// A folder of the real file system that goes away with its test.
class TempFolder {
 public:
  TempFolder() {
    std::string name = ::testing::TempDir() + "/spolia_store_XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw_system_error(errno, "cannot make " + name);
    path_ = fs::canonical(name);
  }
  TempFolder(const TempFolder&) = delete;
  ~TempFolder() { fs::remove_all(path_); }

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void put(Store& store, const fs::path& path, std::string_view text, bool sync = false) {
  const auto file = store.create(path);
  file->write(0, bytes_of(text));
  if (sync) file->sync();
}

inline std::string text_of(const InputFile& file) {
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

inline std::string get(const Store& store, const fs::path& path) { return text_of(*store.open(path)); }

/// The error that `action` throws.
inline Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("this should have thrown");
}

/// `action` throws an error of `kind` with all of `parts` in its message.
inline void expect_error(ErrorKind kind, const std::vector<std::string>& parts,
                         const std::function<void()>& action) {
  const Error error = error_of(action);
  EXPECT_EQ(name_of(error.kind()), name_of(kind)) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << " lacks " << part;
  }
}

/// Writes a folder of two files under a temporary name and publishes it as /done.
inline void publish(Store& store, bool sync_files, bool sync_folders) {
  store.create_folder("/tmp");
  put(store, "/tmp/one", "1", sync_files);
  put(store, "/tmp/two", "2", sync_files);
  if (sync_folders) store.sync_folder("/tmp");
  store.rename("/tmp", "/done");
  store.sync_folder("/");
}

}  // namespace spolia
