// The files of a folder that is being written, open until all of them are written.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/store/store.h"

namespace spolia {

/// Used by one thread; the files it gives may be written by several. The store outlives it.
class OutputFolder {
 public:
  /// `path` is a folder that is there already.
  OutputFolder(Store& store, std::filesystem::path path) : store_(store), path_(std::move(path)) {}

  const std::filesystem::path& path() const { return path_; }

  /// A new file directly in the folder. It is open, and the reference good, until sync() or close().
  OutputFile& create(const std::string& name);

  /// Whether files stay in the system's cache once they are durable.
  enum class Cache { kKeep, kDrop };
  /// Makes the bytes of all files durable, on so many threads, and closes them. Where that fails, some may be
  /// durable; all stay open. The folder's own list of names is not synced.
  void sync(size_t threads, const CancelToken* cancel = nullptr, Cache cache = Cache::kKeep);
  /// Closes all files without waiting for the disk. Throws the first failure that the system reports.
  void close();

 private:
  Store& store_;
  std::filesystem::path path_;
  std::vector<std::unique_ptr<OutputFile>> files_;
};

}  // namespace spolia
