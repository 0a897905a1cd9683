// A store around another that counts what is asked of it, keeps a log, and fails or misbehaves on demand. For
// tests.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "spolia/store/store.h"

namespace spolia {

enum class Operation {
  kOpen,  // open() and open_inside()
  kRead,
  kCreate,
  kWrite,
  kCopy,
  kStartWriteback,
  kSync,
  kDropCached,
  kClose,
  kExists,
  kIsFolder,
  kIsLink,
  kList,
  kCreateFolder,
  kRename,
  kReplace,
  kExchange,
  kSyncFolder,
  kRemoveAll,
};

/// "open", "sync folder", ...
std::string_view name_of(Operation operation);

/// Thread-safe, as are the files opened through it, which may outlive it.
class FaultStore : public Store {
 public:
  explicit FaultStore(std::shared_ptr<Store> store);

  struct Event {
    Operation operation;
    std::filesystem::path path;
    std::filesystem::path target = {};  // of a rename, replacement, exchange or copy
    friend bool operator==(const Event&, const Event&) = default;
  };
  /// What was asked so far, in the order in which it began, failed or not.
  std::vector<Event> log() const;
  /// How often `operation` was asked so far; anything at all for none.
  int64_t count(std::optional<Operation> operation = std::nullopt) const;

  using Action = std::function<void()>;
  enum class Times { kOnce, kFromThenOn };
  /// Calls `action` before the `nth` `operation` from now (0 for the next; of any kind for
  /// none). Where it throws, the operation is not done. It may call this store.
  void before(std::optional<Operation> operation, int64_t nth, Action action, Times times = Times::kOnce);
  /// Fails that operation with the system's `error_number`, say ENOSPC.
  void fail(std::optional<Operation> operation, int64_t nth, int error_number, Times times = Times::kOnce);

  /// From now on the byte at `offset` of the file `path` reads with all its bits flipped.
  void flip(const std::filesystem::path& path, int64_t offset);
  /// From now on the file `path` reads as if it had shrunk to `size` bytes after it was opened.
  void shrink(const std::filesystem::path& path, int64_t size);

  std::unique_ptr<InputFile> open(const std::filesystem::path& path) const override;
  std::unique_ptr<InputFile> open_inside(const std::filesystem::path& folder,
                                         const std::string& relative) const override;
  std::unique_ptr<OutputFile> create(const std::filesystem::path& path) override;
  bool exists(const std::filesystem::path& path) const override;
  bool is_folder(const std::filesystem::path& path) const override;
  bool is_link(const std::filesystem::path& path) const override;
  std::vector<FolderEntry> list(const std::filesystem::path& folder) const override;
  void create_folder(const std::filesystem::path& folder) override;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  void replace(const std::filesystem::path& from, const std::filesystem::path& to) override;
  void exchange(const std::filesystem::path& a, const std::filesystem::path& b) override;
  void sync_folder(const std::filesystem::path& folder) override;
  void remove_all(const std::filesystem::path& path) override;

 private:
  class Faults;
  class Input;
  class Output;

  std::shared_ptr<Store> store_;
  std::shared_ptr<Faults> faults_;  // shared with the files that are open
};

}  // namespace spolia
