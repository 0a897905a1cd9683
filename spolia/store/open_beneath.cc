#include "spolia/store/open_beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <optional>

namespace spolia {
namespace {

std::string proc_name(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

/// The absolute path, free of links, of an open file; nothing, and errno, where the system does not tell.
std::optional<std::string> real_path(int fd) {
  std::string path(PATH_MAX, '\0');
  const ssize_t length = ::readlink(proc_name(fd).c_str(), path.data(), path.size());
  if (length < 0) return std::nullopt;
  path.resize(static_cast<size_t>(length));
  return path;
}

}  // namespace

FileDescriptor open_beneath(int folder, const std::string& name, int flags) {
  open_how how{};
  how.flags = static_cast<unsigned>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  // EAGAIN: something was renamed somewhere while the kernel followed a `..` in a link, so it could not vouch
  // for the result.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const long fd = ::syscall(SYS_openat2, folder, name.c_str(), &how, sizeof how);
    if (fd >= 0) return FileDescriptor(static_cast<int>(fd));
    if (errno == ENOSYS || errno == EPERM) break;  // an old kernel, or a container's system call filter
    if (errno != EAGAIN && errno != EINTR) return FileDescriptor(-1);
  }
  return open_beneath_by_path(folder, name, flags);
}

FileDescriptor open_beneath_by_path(int folder, const std::string& name, int flags) {
  const FileDescriptor pinned(::openat(folder, name.c_str(), O_PATH | O_CLOEXEC));
  if (!pinned) return FileDescriptor(-1);
  std::optional<std::string> boundary = real_path(folder);
  const std::optional<std::string> target = real_path(pinned.get());
  if (!boundary || !target) return FileDescriptor(-1);
  if (!boundary->ends_with('/')) *boundary += '/';
  if (!target->starts_with(*boundary)) {
    errno = EXDEV;
    return FileDescriptor(-1);
  }
  return FileDescriptor(::open(proc_name(pinned.get()).c_str(), flags));
}

}  // namespace spolia
