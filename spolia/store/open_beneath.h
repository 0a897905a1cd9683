// Opening a file that a stranger named, without ever leaving the folder it was named in.
#pragma once

#include <string>

#include "spolia/store/file_descriptor.h"

namespace spolia {

/// Opens `name`, below the open folder `folder`, as openat(2) with `flags` would. Where it fails the result
/// holds none and errno says why: EXDEV where a symbolic link on the way leads out of the folder.
///
/// The kernel holds the walk below the folder (openat2 with RESOLVE_BENEATH, Linux 5.6), so no race with a
/// changing link can lead out; a link with an absolute target counts as leading out. Where openat2 is
/// missing or forbidden, open_beneath_by_path() decides.
FileDescriptor open_beneath(int folder, const std::string& name, int flags);

/// The same without openat2: pins the file that `name` leads to, compares its real path with the folder's,
/// and only then opens what was pinned. It lets pass a link that leaves the folder and comes back. Needs
/// /proc.
FileDescriptor open_beneath_by_path(int folder, const std::string& name, int flags);

}  // namespace spolia
