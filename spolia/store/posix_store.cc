// The file system of this machine, through POSIX calls and, where Linux offers a stronger one, that.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <system_error>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/store/checks.h"
#include "spolia/store/file_descriptor.h"
#include "spolia/store/open_beneath.h"
#include "spolia/store/read_ahead.h"
#include "spolia/store/store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

// O_NONBLOCK so that a pipe nobody writes to is refused instead of waited for; O_NOCTTY so that a terminal
// does not become ours. Neither means anything for a regular file.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

[[noreturn]] void throw_errno(std::string_view action, const fs::path& path, int error_number = errno) {
  throw_system_error(error_number, fmt::format("cannot {} {}", action, quote(path.native())));
}

/// The path as the system takes it: up to its first NUL, so there must be none.
const char* system_name(const fs::path& path) {
  if (path.native().find('\0') == std::string::npos) return path.c_str();
  throw InvalidArgumentError("the path {} has a NUL byte in it", quote(path.native()));
}

/// The name itself: "link/" would mean the folder that the link leads to.
fs::path without_trailing_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

/// Calls `call` until no signal interrupts it.
template <class Call>
auto retry(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

class PosixInputFile : public InputFile {
 public:
  PosixInputFile(FileDescriptor file, fs::path path) : file_(std::move(file)), path_(std::move(path)) {
    struct stat status;
    if (::fstat(file_.get(), &status) != 0) throw_errno("look at", path_);
    if (!S_ISREG(status.st_mode)) {
      throw IoError("cannot read {}: it is not a regular file", quote(path_.native()));
    }
    size_ = status.st_size;
    // We mostly read files from front to back: have the kernel read further ahead. A hint that may fail.
    ::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }

  const fs::path& path() const override { return path_; }
  int64_t size() const override { return size_; }
  int descriptor() const { return file_.get(); }

  void read(int64_t offset, std::span<std::byte> out) const override {
    const int64_t length = std::ssize(out);
    check_read_range(path_, offset, length, size_);
    for (int64_t done = 0; done < length;) {
      const auto rest = out.subspan(static_cast<size_t>(done));
      const ssize_t count =
          retry([&] { return ::pread(file_.get(), rest.data(), rest.size(), offset + done); });
      if (count < 0) {
        throw_errno(fmt::format("read {} bytes at offset {} of", rest.size(), offset + done), path_);
      }
      if (count == 0) check_read_range(path_, offset, length, offset + done);  // it shrank: this throws
      done += count;
    }
  }

 private:
  FileDescriptor file_;
  fs::path path_;
  int64_t size_ = 0;
};

class PosixOutputFile : public OutputFile {
 public:
  PosixOutputFile(FileDescriptor file, fs::path path) : file_(std::move(file)), path_(std::move(path)) {}

  const fs::path& path() const override { return path_; }

  void write(int64_t offset, std::span<const std::byte> bytes) override {
    check_write_range(path_, offset, std::ssize(bytes));
    while (!bytes.empty()) {
      const ssize_t count = retry([&] { return ::pwrite(file_.get(), bytes.data(), bytes.size(), offset); });
      if (count <= 0) {  // 0 is no progress and no reason: do not try forever
        throw_errno(fmt::format("write {} bytes at offset {} of", bytes.size(), offset), path_,
                    count < 0 ? errno : EIO);
      }
      bytes = bytes.subspan(static_cast<size_t>(count));
      offset += count;
    }
  }

  void copy_from(const InputFile& from, int64_t from_offset, int64_t to_offset, int64_t length) override {
    check_read_range(from.path(), from_offset, length, from.size());
    check_write_range(path_, to_offset, length);
    const auto* source = dynamic_cast<const PosixInputFile*>(&from);
    const int64_t copied = source ? copy_in_kernel(*source, from_offset, to_offset, length) : 0;
    OutputFile::copy_from(from, from_offset + copied, to_offset + copied, length - copied);
  }

  void start_writeback(int64_t offset, int64_t length) override {
    // A hint, and one that leaves errors for sync() to find: whatever it returns is of no consequence.
    ::sync_file_range(file_.get(), offset, length, SYNC_FILE_RANGE_WRITE);
  }

  // fdatasync() makes durable the bytes and all that is needed to find them again, the size included; what
  // it leaves out are time stamps. After a failure the kernel may drop the pages it could not write, so a
  // second try proves nothing: such a file has to be written anew.
  void sync() override {
    if (retry([&] { return ::fdatasync(file_.get()); }) != 0) throw_errno("sync", path_);
  }

  void drop_cached() override { ::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_DONTNEED); }

  // Interrupted or failed, the descriptor is gone: it must not be closed again.
  void close() override {
    if (::close(file_.release()) != 0 && errno != EINTR) throw_errno("close", path_);
  }

 private:
  /// Copies as much as the kernel will; returns how many bytes that were. The rest is to be read and written:
  /// the files are of two file systems, or of one that cannot copy, or the source ended too soon.
  int64_t copy_in_kernel(const PosixInputFile& from, int64_t from_offset, int64_t to_offset,
                         int64_t length) const {
    for (int64_t done = 0; done < length;) {
      off_t source = from_offset + done, target = to_offset + done;
      const ssize_t count = retry([&] {
        return ::copy_file_range(from.descriptor(), &source, file_.get(), &target,
                                 static_cast<size_t>(length - done), 0);
      });
      if (count == 0 || (count < 0 && cannot_copy(errno))) return done;
      if (count < 0) {
        throw_errno(fmt::format("copy {} bytes at offset {} of {} to offset {} of", length - done,
                                from_offset + done, quote(from.path().native()), to_offset + done),
                    path_);
      }
      done += count;
    }
    return length;
  }

  /// Whether that is an answer of a kernel or file system that does not copy, rather than of a copy that
  /// failed. EPERM is what strict containers say.
  static bool cannot_copy(int reason) {
    return reason == EXDEV || reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP || reason == EPERM;
  }

  FileDescriptor file_;
  fs::path path_;
};

/// How far links in `folder`, a real path, may lead: no further than itself, except in Hugging Face's cache,
/// where the files of REPOSITORY/snapshots/REVISION/ are links into REPOSITORY/blobs/.
fs::path boundary_of(const fs::path& folder) {
  for (fs::path parent = folder.parent_path(); parent.has_relative_path(); parent = parent.parent_path()) {
    if (parent.filename() != "snapshots") continue;
    std::error_code ignored;
    if (fs::is_directory(parent.parent_path() / "blobs", ignored)) return parent.parent_path();
  }
  return folder;
}

/// The status of what is at `path` itself (a link, if it is one), or where links lead; false for nothing.
bool look(const fs::path& path, bool follow, struct stat& status) {
  if (::fstatat(AT_FDCWD, system_name(path), &status, follow ? 0 : AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw_errno("look at", path);
}

/// Whether one of two paths that are there lies inside what the other names.
bool is_nested(const fs::path& a, const fs::path& b) {
  std::error_code error;
  const fs::path real_a = fs::canonical(a, error), real_b = fs::canonical(b, error);
  const auto [in_a, in_b] = std::mismatch(real_a.begin(), real_a.end(), real_b.begin(), real_b.end());
  return in_a == real_a.end() || in_b == real_b.end();
}

class PosixStore : public Store {
 public:
  std::unique_ptr<InputFile> open(const fs::path& path) const override {
    FileDescriptor file(retry([&] { return ::open(system_name(path), kReadFlags); }));
    if (!file) throw_errno("open", path);
    return std::make_unique<PosixInputFile>(std::move(file), path);
  }

  std::unique_ptr<InputFile> open_inside(const fs::path& folder, const std::string& relative) const override {
    check_relative_name(folder, relative);
    std::error_code error;
    const fs::path real = fs::canonical(system_name(folder), error);
    if (error) throw_errno("open", folder, error.value());
    const fs::path boundary = boundary_of(real);
    const FileDescriptor root(::open(boundary.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!root) throw_errno("open", boundary);
    FileDescriptor file = open_beneath(root.get(), real.lexically_relative(boundary) / relative, kReadFlags);
    if (!file && errno == EXDEV) {
      throw CorruptError(
          "the file {} is a symbolic link, or lies behind one, that leads out of its folder {}",
          quote(relative), quote(folder.native()));
    }
    if (!file) throw_errno("open", folder / relative);
    return std::make_unique<PosixInputFile>(std::move(file), folder / relative);
  }

  std::unique_ptr<OutputFile> create(const fs::path& path) override {
    FileDescriptor file(
        retry([&] { return ::open(system_name(path), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }));
    if (!file) throw_errno("create", path);
    return std::make_unique<PosixOutputFile>(std::move(file), path);
  }

  // A link that leads nowhere exists too: its name is taken.
  bool exists(const fs::path& path) const override {
    struct stat status;
    return look(path, false, status);
  }

  bool is_folder(const fs::path& path) const override {
    struct stat status;
    return look(path, true, status) && S_ISDIR(status.st_mode);
  }

  bool is_link(const fs::path& path) const override {
    struct stat status;
    return look(without_trailing_slash(path), false, status) && S_ISLNK(status.st_mode);
  }

  std::vector<FolderEntry> list(const fs::path& folder) const override {
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(system_name(folder)), ::closedir);
    if (!stream) throw_errno("list", folder);
    std::vector<FolderEntry> entries;
    for (errno = 0; const dirent* found = ::readdir(stream.get()); errno = 0) {
      FolderEntry entry{.name = found->d_name};
      if (entry.name == "." || entry.name == "..") continue;
      // Through links, as in Hugging Face's cache. What cannot be looked at is listed all the same.
      struct stat status;
      if (::fstatat(::dirfd(stream.get()), found->d_name, &status, 0) == 0) {
        entry.is_folder = S_ISDIR(status.st_mode);
        entry.size = S_ISREG(status.st_mode) ? status.st_size : 0;
      }
      entries.push_back(std::move(entry));
    }
    if (errno != 0) throw_errno("list", folder);
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return entries;
  }

  void create_folder(const fs::path& folder) override {
    if (::mkdir(system_name(folder), 0777) != 0) throw_errno("create the folder", folder);
  }

  void rename(const fs::path& from, const fs::path& to) override {
    if (::renameat2(AT_FDCWD, system_name(from), AT_FDCWD, system_name(to), RENAME_NOREPLACE) == 0) return;
    int reason = errno;
    // Some file systems (NFS among them) have no RENAME_NOREPLACE. There we look first; a file, or an empty
    // folder, that another process puts at `to` between the look and the rename is lost.
    if (reason == EINVAL || reason == ENOSYS) {
      if (exists(to)) {
        reason = EEXIST;
      } else if (::rename(from.c_str(), to.c_str()) == 0) {
        return;
      } else {
        reason = errno;
      }
    }
    throw_errno(fmt::format("rename {} to", quote(from.native())), to, reason);
  }

  void replace(const fs::path& from, const fs::path& to) override {
    if (is_folder(from)) throw_errno(fmt::format("replace {} by", quote(to.native())), from, EISDIR);
    if (::rename(system_name(from), system_name(to)) == 0) return;
    throw_errno(fmt::format("rename {} to", quote(from.native())), to);
  }

  void exchange(const fs::path& a, const fs::path& b) override {
    if (::renameat2(AT_FDCWD, system_name(a), AT_FDCWD, system_name(b), RENAME_EXCHANGE) == 0) return;
    const int reason = errno;
    // EINVAL is also what a folder gets that is to take a place inside itself.
    if (reason == ENOSYS || reason == EOPNOTSUPP || (reason == EINVAL && !is_nested(a, b))) {
      throw_cannot_exchange(a, b);
    }
    throw_errno(fmt::format("exchange {} with", quote(a.native())), b, reason);
  }

  void sync_folder(const fs::path& folder) override {
    const FileDescriptor file(::open(system_name(folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!file) throw_errno("open", folder);
    // EINVAL: the file system cannot sync folders. Nothing else would make its names more durable.
    if (retry([&] { return ::fsync(file.get()); }) != 0 && errno != EINVAL) throw_errno("sync", folder);
  }

  void remove_all(const fs::path& path) override {
    const fs::path name = without_trailing_slash(path);
    if (!exists(name)) return;
    try {
      fs::remove_all(name);  // does not follow links, not even in a race
    } catch (const fs::filesystem_error& error) {
      throw_errno("remove", error.path1(), error.code().value());
    }
  }
};

}  // namespace

std::shared_ptr<Store> posix_store() { return std::make_shared<PosixStore>(); }

void read_ahead(const InputFile& file, int64_t offset, int64_t length) {
  if (const auto* here = dynamic_cast<const PosixInputFile*>(&file)) {
    ::posix_fadvise(here->descriptor(), offset, length, POSIX_FADV_WILLNEED);
  }
}

}  // namespace spolia
