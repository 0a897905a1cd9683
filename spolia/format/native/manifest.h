// The JSON files of Spolia's own folder: `spolia.json`, the manifest, and the `part-NNNNN.json` of its
// writers. docs/formats/spolia.md specifies them.
//
// Plain data to text and back. Reading checks all that a file says by itself; what needs other files, or the
// meaning of layouts, is left to native_source.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spolia/layout/box.h"
#include "spolia/state/catalog.h"
#include "spolia/tensor/dtype.h"

namespace spolia {

inline constexpr const char* kSpoliaManifest = "spolia.json";
inline constexpr int64_t kSpoliaVersion = 1;

/// A file in the folder, whole, with the hash of its bytes.
struct HashedFile {
  std::string name;
  int64_t bytes = 0;
  std::string sha256;  // 64 lower-case hex digits
  friend bool operator==(const HashedFile&, const HashedFile&) = default;
};

struct Manifest {
  struct Part {
    uint32_t writer = 0;  // the rank, where a tensor in it has a layout
    HashedFile file;
    friend bool operator==(const Part&, const Part&) = default;
  };
  struct Tensor {
    std::string name;
    DType dtype = DType::kFloat32;
    Dims shape;
    std::optional<int64_t> chunks;    // in all parts; nothing where nobody counted
    std::optional<uint32_t> layout;   // an index into `layouts`
    std::optional<uint32_t> replica;  // only with a layout
    bool requires_grad = false;
    MemoryFormat memory_format = MemoryFormat::kContiguous;
    KeyPath path;
    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  struct NamedValue {
    std::string name;
    std::variant<Value, HashedFile> content;  // or the torch.save archive that holds it
    KeyPath path;
    friend bool operator==(const NamedValue&, const NamedValue&) = default;
  };

  int64_t block_bytes = 0;           // 0: no checksums
  std::vector<std::string> layouts;  // as Layout::text() writes them
  std::vector<Part> parts;           // by writer, each at most once
  std::vector<Tensor> tensors;       // by name, each once
  std::vector<NamedValue> values;    // likewise
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// What one writer wrote.
struct PartFile {
  struct Chunk {
    uint32_t tensor = 0;         // an index into the manifest's tensors
    int64_t offset = 0;          // in the data file
    std::optional<Box> box;      // nothing: the one that the layout gives, or the whole
    std::vector<uint32_t> crcs;  // of its blocks
    friend bool operator==(const Chunk&, const Chunk&) = default;
  };
  std::string data_file;
  int64_t bytes = 0;                   // of the data file
  int64_t header_bytes = 0;            // of these, those before the first chunk
  std::optional<uint32_t> header_crc;  // of those
  std::vector<Chunk> chunks;           // in the order of their bytes
  friend bool operator==(const PartFile&, const PartFile&) = default;
};

/// The text of a file, a line a record; equal arguments give equal bytes. InvalidArgumentError for a value
/// that can_tag() refuses.
std::string write_manifest(const Manifest& manifest);
/// The same handed on in pieces, for it may be large.
void write_manifest(const Manifest& manifest, const std::function<void(std::string_view)>& write);
std::string write_part(const PartFile& part);

/// The reverse; `file` is the file's name, for messages. UnsupportedError for a version or a dtype that is
/// not known; CorruptError where the text is not what docs/formats/spolia.md says, a name leaves the folder,
/// entries are not in order, or numbers are out of range.
Manifest read_manifest(std::string_view text, std::string_view file);
PartFile read_part(std::string_view text, std::string_view file);

}  // namespace spolia
