#include "spolia/store/checks.h"

#include <algorithm>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {

void check_read_range(const std::filesystem::path& path, int64_t offset, int64_t length, int64_t size) {
  if (offset >= 0 && length >= 0 && length <= size && offset <= size - length) return;
  throw CorruptError("{} is too short: wanted {} bytes at offset {}, but it has {} bytes",
                     quote(path.native()), length, offset, size);
}

void check_write_range(const std::filesystem::path& path, int64_t offset, int64_t length) {
  if (offset >= 0 && try_add(offset, length)) return;
  throw InvalidArgumentError("cannot write {} bytes at offset {} of {}", length, offset,
                             quote(path.native()));
}

void throw_cannot_exchange(const std::filesystem::path& a, const std::filesystem::path& b) {
  throw UnsupportedError("cannot exchange {} with {}: their file system cannot do that in one step",
                         quote(a.native()), quote(b.native()));
}

void check_relative_name(const std::filesystem::path& folder, const std::string& relative) {
  const auto refuse = [&](const char* reason) {
    throw CorruptError("the file name {} in {} {}", quote(relative), quote(folder.native()), reason);
  };
  if (relative.empty()) refuse("is empty");
  if (relative.find('\0') != std::string::npos) refuse("has a NUL byte in it");
  const std::filesystem::path name(relative);
  if (name.is_absolute()) refuse("is absolute, so it leads out of its folder");
  if (std::find(name.begin(), name.end(), "..") != name.end()) {
    refuse("has a \"..\", so it leads out of its folder");
  }
}

}  // namespace spolia
