// A manifest, and after a NUL byte what its only part says: both can be written again, and the folder keeps
// its promises.
#include "fuzz/fuzzing.h"
#include "spolia/format/native/manifest.h"

namespace spolia::fuzzing {
namespace {

std::string sha256_of(std::string_view text) {
  Sha256 hash;
  hash.update(bytes_of(text));
  return hash.finish_hex();
}

/// A folder in which all hashes are right and the data file has the size that is due.
void read_folder(Manifest manifest, PartFile part) {
  constexpr int64_t kMostBytes = int64_t{1} << 16;
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/fuzz");
  part.data_file = "data";
  const std::string text = write_part(part);
  if (manifest.parts.size() > 1) manifest.parts.resize(1);
  for (Manifest::Part& listed : manifest.parts) listed.file = {"part", std::ssize(text), sha256_of(text)};
  store->create("/fuzz/part")->write(0, bytes_of(text));
  store->create("/fuzz/spolia.json")->write(0, bytes_of(write_manifest(manifest)));
  if (part.bytes <= kMostBytes) {
    store->create("/fuzz/data")->write(0, bytes_of(std::string(static_cast<size_t>(part.bytes), 'x')));
  }
  read_checkpoint(store, "/fuzz");
}

}  // namespace

void run(Bytes bytes) {
  const std::string_view text = text_of(bytes);
  const size_t cut = std::min(text.find('\0'), text.size());
  Manifest manifest;
  PartFile part;
  if (!accepts([&] { manifest = read_manifest(text.substr(0, cut), "spolia.json"); })) return;
  require(read_manifest(write_manifest(manifest), "again") == manifest);
  auto store = std::make_shared<MemoryStore>();
  put_file(*store, "/fuzz/spolia.json", bytes.first(cut));
  read_checkpoint(store, "/fuzz");
  if (cut == text.size() || !accepts([&] { part = read_part(text.substr(cut + 1), "part"); })) return;
  require(read_part(write_part(part), "again") == part);
  read_folder(std::move(manifest), std::move(part));
}

}  // namespace spolia::fuzzing
