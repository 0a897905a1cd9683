// Reading Spolia's own folder. docs/formats/spolia.md specifies it.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "spolia/format/source.h"

namespace spolia {

/// Reads `spolia.json` and the parts it lists, whose hashes must be right. Data files are opened when they
/// are needed: their sizes must then be what their parts say, and reading looks at nothing else in them than
/// the chunks. Source::check_file(), and so verify(), also compares their headers. Of a chunk that several
/// parts have (copies on several hosts) the first one counts; nothing looks at the others' bytes.
///
/// CorruptError naming the file where something is damaged, breaks the format's rules or is missing, the
/// manifest too; UnsupportedError for a version or dtype that is not known, or a Partial layout.
std::unique_ptr<Source> open_spolia(std::shared_ptr<const Store> store, const std::filesystem::path& folder);

/// Whether a folder with a file of this name is Spolia's own, whole or not: `spolia.json`, `part-00000.json`.
bool is_spolia_name(std::string_view name);
/// A file for a value in such a folder: `value-00000.pt`. Elsewhere it may be anyone's.
bool is_spolia_value_name(std::string_view name);

}  // namespace spolia
