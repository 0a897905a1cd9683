// The manifests of ranks that each saved without the others, as one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/format/native/manifest.h"

namespace spolia {

/// "spolia-00003.json" of rank 3.
std::string own_manifest_name(uint32_t writer);
bool is_own_manifest_name(std::string_view name);

struct MergedManifest {
  Manifest manifest;
  /// For each of its parts: the number here of each tensor that the part counts.
  std::vector<std::vector<uint32_t>> tensors;
  std::vector<std::string> notes;  // values that ranks have under one name, and not alike
};

/// Pure. `names`: of the files, for messages. Of a value that several have, the first one's is taken.
/// MismatchError naming the tensor and two files where they disagree about its dtype, shape or layout;
/// CorruptError where a file or a writer is in two of them, or their checksums cover other blocks.
MergedManifest merge_manifests(const std::vector<Manifest>& manifests, const std::vector<std::string>& names);

}  // namespace spolia
