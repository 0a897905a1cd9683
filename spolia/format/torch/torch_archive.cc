#include "spolia/format/torch/torch_archive.h"

#include <algorithm>
#include <array>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kPickleRecord = "data.pkl";
constexpr int64_t kAlwaysAllowedPickle = int64_t{4} << 20;
constexpr int64_t kMostGrowth = 16;  // of a packed pickle; reading one costs a hundred times its size

bool starts_with(std::span<const std::byte> bytes, std::string_view prefix, size_t at = 0) {
  return bytes.size() >= at + prefix.size() &&
         std::ranges::equal(bytes.subspan(at, prefix.size()), bytes_of(prefix));
}

}  // namespace

bool starts_like_zip(std::span<const std::byte> first) { return starts_with(first, "PK\3\4"); }

std::string_view name_of_old_format(std::span<const std::byte> first) {
  // torch/serialization.py: MAGIC_NUMBER, pickled by protocol 2.
  if (starts_with(first, "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv)) {
    return "a file in torch.save's form from before torch 1.6 (a stream of pickles, no zip)";
  }
  if (starts_with(first, "ustar", 257)) return "a file in torch.save's oldest form (a tar archive)";
  return {};
}

TorchArchive::TorchArchive(ByteSource& bytes, int64_t stored_bytes)
    : stored_bytes_(stored_bytes), zip_(checked(bytes)), root_(find_root()) {
  if (zip_.find(root_ + "constants.pkl") != nullptr) {
    throw UnsupportedError(
        "{}: a TorchScript archive (torch.jit.save), which holds code. Save its state_dict() with torch.save",
        zip_.where());
  }
  if (const ZipRecord* record = zip_.find(root_ + "byteorder")) {
    if (!starts_with(zip_.read(*record, 64), "little")) {
      throw UnsupportedError(
          "{}: the storages are not little-endian. Save the file again on a little-endian machine",
          zip_.where());
    }
  }
}

/// Says what a file is that is no zip archive.
ByteSource& TorchArchive::checked(ByteSource& bytes) {
  std::array<std::byte, 512> room;
  auto first = std::span(room).first(static_cast<size_t>(std::min<int64_t>(bytes.size(), room.size())));
  bytes.read(0, first);
  if (std::string_view old = name_of_old_format(first); !old.empty()) {
    throw UnsupportedError("{}: {}. Load it with PyTorch and torch.save it again", bytes.where(), old);
  }
  if (!starts_like_zip(first)) {
    throw CorruptError("{}: not a torch.save archive: no zip starts here", bytes.where());
  }
  return bytes;
}

std::string TorchArchive::find_root() const {
  for (const ZipRecord& record : zip_.records()) {
    size_t slash = record.name.find('/');
    if (slash != std::string_view::npos && record.name.substr(slash + 1) == kPickleRecord) {
      return std::string(record.name.substr(0, slash + 1));
    }
  }
  throw CorruptError("{}: a zip archive, but not torch.save's: it has no record ROOT/data.pkl", zip_.where());
}

std::vector<std::byte> TorchArchive::pickle() const {
  int64_t most = try_mul(stored_bytes_, kMostGrowth).value_or(kNoLimit);
  return zip_.read(*zip_.find(root_ + std::string(kPickleRecord)), std::max(most, kAlwaysAllowedPickle));
}

const ZipRecord& TorchArchive::storage(std::string_view key) const {
  std::string name = root_ + "data/" + std::string(key);
  const ZipRecord* record = zip_.find(name);
  if (record == nullptr) throw CorruptError("{}: the storage {} is missing", zip_.where(), quote(name));
  return *record;
}

}  // namespace spolia
