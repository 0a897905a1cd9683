// Stores: bytes in named files. One interface, so that tests can put memory and faults in a disk's place.
//
// All operations are synchronous and thread-safe; an InputFile may be read, and disjoint ranges of an
// OutputFile written, from several threads at once. Failures are IoError or NotFoundError with the path and
// the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace spolia {

class InputFile {
 public:
  virtual ~InputFile() = default;
  virtual const std::filesystem::path& path() const = 0;
  /// The size when the file was opened.
  virtual int64_t size() const = 0;
  /// Fills `out` from `offset`. CorruptError where the range is not inside the file, or the file shrank
  /// since.
  virtual void read(int64_t offset, std::span<std::byte> out) const = 0;
};

class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual const std::filesystem::path& path() const = 0;
  virtual void write(int64_t offset, std::span<const std::byte> bytes) = 0;
  /// Writes `length` bytes of `from`, which start at `from_offset` there, at `to_offset`. Between files of
  /// one file system the kernel copies them, or makes both files share them; else they are read and written
  /// in pieces, through a buffer of 1 MiB. CorruptError where the range is not inside `from`, or that shrank
  /// since it was opened.
  virtual void copy_from(const InputFile& from, int64_t from_offset, int64_t to_offset, int64_t length);
  /// Hints that this range is final: starts writing it back to the disk without waiting.
  virtual void start_writeback(int64_t offset, int64_t length) = 0;
  /// Returns once everything written is durable.
  virtual void sync() = 0;
  /// Hints that what was synced should leave the system's cache, so that reading it reads the disk.
  virtual void drop_cached() = 0;
  /// Closes the file, and reports what the system has to say: a network file system may tell of a full disk
  /// only here. Nothing becomes durable. Later writes and syncs fail. The destructor closes too, without
  /// a report.
  virtual void close() = 0;
};

struct FolderEntry {
  std::string name;
  bool is_folder = false;
  int64_t size = 0;
};

class Store {
 public:
  virtual ~Store() = default;

  /// Opens a regular file for reading; a pipe, device or folder is refused.
  virtual std::unique_ptr<InputFile> open(const std::filesystem::path& path) const = 0;
  /// The same for `relative` below `folder`, a name that a stranger wrote: CorruptError where it is absolute,
  /// has a `..`, or a symbolic link on the way leads out of `folder`. Hugging Face's cache, whose snapshots
  /// link to ../../blobs, counts as one folder.
  virtual std::unique_ptr<InputFile> open_inside(const std::filesystem::path& folder,
                                                 const std::string& relative) const = 0;
  /// Creates a file that must not exist yet.
  virtual std::unique_ptr<OutputFile> create(const std::filesystem::path& path) = 0;

  virtual bool exists(const std::filesystem::path& path) const = 0;
  virtual bool is_folder(const std::filesystem::path& path) const = 0;
  /// Whether `path` itself is a symbolic link. is_folder() and list() tell of what links lead to.
  virtual bool is_link(const std::filesystem::path& path) const = 0;
  /// What lies directly in a folder, sorted by name.
  virtual std::vector<FolderEntry> list(const std::filesystem::path& folder) const = 0;

  /// Creates a folder that must not exist yet; its parent must.
  virtual void create_folder(const std::filesystem::path& folder) = 0;
  /// Renames a file or folder onto a name that must be free, in one step.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Renames a file onto a name; a file that has the name goes, in the same step: whoever looks finds the one
  /// or the other.
  virtual void replace(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Swaps what two names name, files or folders, in one step: nobody ever finds one of the names free.
  /// UnsupportedError where the file system cannot do that.
  virtual void exchange(const std::filesystem::path& a, const std::filesystem::path& b) = 0;
  /// Makes the names in a folder durable.
  virtual void sync_folder(const std::filesystem::path& folder) = 0;
  /// Removes a file, or a folder with all that is in it; does not follow links. Nothing happens where there
  /// is none.
  virtual void remove_all(const std::filesystem::path& path) = 0;
};

/// The file system of this machine.
std::shared_ptr<Store> posix_store();

}  // namespace spolia
