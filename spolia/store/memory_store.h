// A store that lives in memory, and forgets in a crash what was not made durable. For tests.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>

#include "spolia/store/store.h"

namespace spolia {

/// Behaves as posix_store() does, without links and permissions. Paths are absolute or relative to the root,
/// which is there from the start; a `..` takes away the name before it. Thread-safe; one lock for everything.
///
/// What is durable: a file's bytes as they were at its last sync(), none if there was none; a folder's names
/// as they were at its last sync_folder(). A rename or an exchange is a change to the names of both folders.
class MemoryStore : public Store {
 public:
  MemoryStore();

  /// What a crash does to names that were not synced. A real one may do either.
  enum class UnsyncedNames {
    kLost,  // each folder is as it was at its last sync_folder()
    kKept,  // names are as they were at the crash; only the bytes of files are lost
  };
  /// Drops what is not durable. Files that were open then are cut off: what is done with them changes
  /// nothing.
  void crash(UnsyncedNames names = UnsyncedNames::kLost);

  /// From now on it is a file system that cannot exchange two names.
  void forbid_exchange();

  std::unique_ptr<InputFile> open(const std::filesystem::path& path) const override;
  std::unique_ptr<InputFile> open_inside(const std::filesystem::path& folder,
                                         const std::string& relative) const override;
  std::unique_ptr<OutputFile> create(const std::filesystem::path& path) override;
  bool exists(const std::filesystem::path& path) const override;
  bool is_folder(const std::filesystem::path& path) const override;
  bool is_link(const std::filesystem::path&) const override { return false; }
  std::vector<FolderEntry> list(const std::filesystem::path& folder) const override;
  void create_folder(const std::filesystem::path& folder) override;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  void replace(const std::filesystem::path& from, const std::filesystem::path& to) override;
  void exchange(const std::filesystem::path& a, const std::filesystem::path& b) override;
  void sync_folder(const std::filesystem::path& folder) override;
  void remove_all(const std::filesystem::path& path) override;

 private:
  struct Node;
  class Input;
  class Output;

  // All of these want the lock to be held; `what` begins the message of their errors.
  std::shared_ptr<Node> find(const std::filesystem::path& path, int& error_number) const;
  std::shared_ptr<Node> get(const std::filesystem::path& path, std::string_view what) const;
  Node& get_folder(const std::filesystem::path& path, std::string_view what) const;
  void add(const std::filesystem::path& path, std::shared_ptr<Node> node, std::string_view what);

  std::shared_ptr<std::mutex> mutex_;  // shared with the files that are open
  std::shared_ptr<Node> root_;
  bool can_exchange_ = true;
};

}  // namespace spolia
