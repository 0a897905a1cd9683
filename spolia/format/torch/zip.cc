#include "spolia/format/torch/zip.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocatorSignature = 0x07064b50;

constexpr int64_t kLocalBytes = 30;
constexpr int64_t kCentralBytes = 46;
constexpr int64_t kEndBytes = 22;
constexpr int64_t kEnd64Bytes = 56;
constexpr int64_t kLocatorBytes = 20;

constexpr int64_t kMostTrailingBytes = 0xFFFF;
constexpr int64_t kMostDirectoryBytes = int64_t{64} << 20;
constexpr int64_t kMostDeflation = 1032;  // one byte of a deflate stream never unpacks to more

constexpr uint16_t kEncrypted = 1 << 0;
constexpr uint16_t kSizesFollow = 1 << 3;
constexpr uint32_t kIn64 = 0xFFFFFFFF;  // "the zip64 field has it"

/// The little-endian number at `at`; the caller knows that it lies inside.
template <class T>
T number(std::span<const std::byte> bytes, size_t at) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Replaces the sizes and the offset that say "in the zip64 field" by what that field says.
void apply_zip64(std::span<const std::byte> extra, std::span<int64_t* const> wanted, std::string_view name) {
  while (extra.size() >= 4) {
    size_t length = number<uint16_t>(extra, 2);
    if (length > extra.size() - 4) break;
    std::span<const std::byte> field = extra.subspan(4, length);
    if (number<uint16_t>(extra, 0) == 1) {
      for (int64_t* value : wanted) {
        if (*value != kIn64) continue;
        if (field.size() < 8) throw CorruptError("the zip64 field of {} is cut short", quote(name));
        *value = checked_cast<int64_t>(number<uint64_t>(field, 0), "a zip64 size");
        field = field.subspan(8);
      }
      return;
    }
    extra = extra.subspan(4 + length);
  }
}

}  // namespace

/// What the end of the archive says of its directory.
struct Zip::End {
  int64_t at = 0;  // where this end record starts; the directory must end here
  uint64_t records = 0;
  int64_t offset = 0;
  int64_t size = 0;
};

Zip::Zip(ByteSource& bytes) : bytes_(&bytes) {
  try {
    read_directory(find_end());
  } catch (const Error& error) {
    rethrow_with_context(error, where());
  }
}

const ZipRecord* Zip::find(std::string_view name) const {
  auto at = std::ranges::lower_bound(by_name_, name, {}, [&](uint32_t i) { return records_[i].name; });
  return at != by_name_.end() && records_[*at].name == name ? &records_[*at] : nullptr;
}

Zip::End Zip::find_end() const {
  int64_t size = bytes_->size();
  if (size < kEndBytes) throw CorruptError("{} bytes are too few for a zip archive", size);
  // Most archives end with their end record; only the others are searched.
  for (int64_t room : {kEndBytes, std::min(size, kEndBytes + kMostTrailingBytes)}) {
    std::vector<std::byte> tail(static_cast<size_t>(room));
    bytes_->read(size - room, tail);
    for (int64_t i = room - kEndBytes; i >= 0; --i) {
      std::span<const std::byte> record = std::span(tail).subspan(static_cast<size_t>(i));
      if (number<uint32_t>(record, 0) != kEndSignature) continue;
      int64_t at = size - room + i;
      if (number<uint16_t>(record, 4) != 0 || number<uint16_t>(record, 6) != 0) {
        throw UnsupportedError("the zip archive spans several disks");
      }
      if (auto end64 = find_end64(at)) return *end64;
      return {at, number<uint16_t>(record, 10), number<uint32_t>(record, 16), number<uint32_t>(record, 12)};
    }
  }
  throw CorruptError("no zip archive ends here: it was cut short, or is none");
}

/// The zip64 end record, where its locator stands before the end record at `at`.
std::optional<Zip::End> Zip::find_end64(int64_t at) const {
  if (at < kLocatorBytes) return std::nullopt;
  std::array<std::byte, kLocatorBytes> locator;
  bytes_->read(at - kLocatorBytes, locator);
  if (number<uint32_t>(locator, 0) != kLocatorSignature) return std::nullopt;
  if (number<uint32_t>(locator, 4) != 0 || number<uint32_t>(locator, 16) > 1) {
    throw UnsupportedError("the zip archive spans several disks");
  }
  uint64_t start = number<uint64_t>(locator, 8);
  if (start > static_cast<uint64_t>(at - kLocatorBytes) ||
      at - kLocatorBytes - static_cast<int64_t>(start) < kEnd64Bytes) {
    throw CorruptError("the zip64 end record is said to lie at {}, which is no place for it", start);
  }
  std::array<std::byte, kEnd64Bytes> record;
  bytes_->read(static_cast<int64_t>(start), record);
  uint64_t length = static_cast<uint64_t>(at - kLocatorBytes) - start;
  if (number<uint32_t>(record, 0) != kEnd64Signature || number<uint64_t>(record, 4) != length - 12) {
    throw CorruptError("there is no zip64 end record at {}, where it is said to lie", start);
  }
  return End{static_cast<int64_t>(start), number<uint64_t>(record, 32),
             checked_cast<int64_t>(number<uint64_t>(record, 48), "the zip directory's offset"),
             checked_cast<int64_t>(number<uint64_t>(record, 40), "the zip directory's size")};
}

void Zip::read_directory(const End& end) {
  if (end.offset > end.at || end.size != end.at - end.offset) {
    throw CorruptError("the zip directory is said to be the {} bytes at {}, but it ends at {}", end.size,
                       end.offset, end.at);
  }
  if (end.size > kMostDirectoryBytes) {
    throw UnsupportedError("the zip directory has {}; at most {} are read", human_bytes(end.size),
                           human_bytes(kMostDirectoryBytes));
  }
  if (end.records > static_cast<uint64_t>(end.size / kCentralBytes)) {
    throw CorruptError("a zip directory of {} bytes cannot hold {} records", end.size, end.records);
  }
  directory_.resize(static_cast<size_t>(end.size));
  bytes_->read(end.offset, directory_);
  records_.reserve(end.records);
  std::span<const std::byte> rest = directory_;
  while (records_.size() < end.records) records_.push_back(next_record(rest));
  if (!rest.empty()) {
    throw CorruptError("the zip directory has {} bytes after its {} records", rest.size(), end.records);
  }
  check_places(end.offset);
  index_names();
}

ZipRecord Zip::next_record(std::span<const std::byte>& rest) const {
  size_t at = directory_.size() - rest.size();
  if (std::ssize(rest) < kCentralBytes || number<uint32_t>(rest, 0) != kCentralSignature) {
    throw CorruptError("no record stands at byte {} of the zip directory", at);
  }
  size_t name_length = number<uint16_t>(rest, 28);
  size_t extra_length = number<uint16_t>(rest, 30);
  size_t length = kCentralBytes + name_length + extra_length + number<uint16_t>(rest, 32);
  if (length > rest.size()) throw CorruptError("the record at byte {} of the zip directory is cut short", at);

  ZipRecord record;
  record.name = text(rest.subspan(kCentralBytes, name_length));
  uint16_t flags = number<uint16_t>(rest, 8);
  uint16_t method = number<uint16_t>(rest, 10);
  if (flags & kEncrypted) throw UnsupportedError("the zip record {} is encrypted", quote(record.name));
  if (method != 0 && method != 8) {
    throw UnsupportedError("the zip record {} is packed by method {}; only stored and deflated ones are read",
                           quote(record.name), method);
  }
  record.deflated = method == 8;
  if (uint32_t crc = number<uint32_t>(rest, 16); crc != 0) record.crc32 = crc;
  record.packed_size = number<uint32_t>(rest, 20);
  record.size = number<uint32_t>(rest, 24);
  record.header = number<uint32_t>(rest, 42);
  std::array wanted{&record.size, &record.packed_size, &record.header};
  apply_zip64(rest.subspan(kCentralBytes + name_length, extra_length), wanted, record.name);

  if (!record.deflated && record.size != record.packed_size) {
    throw CorruptError("the zip record {} is stored, yet {} bytes become {}", quote(record.name),
                       record.packed_size, record.size);
  }
  if (record.deflated && record.size / kMostDeflation > record.packed_size) {
    throw CorruptError("the zip record {} claims that {} bytes unpack to {}", quote(record.name),
                       record.packed_size, record.size);
  }
  rest = rest.subspan(length);
  return record;
}

/// Puts the records in the order in which they lie; none may reach into the next or into the directory.
void Zip::check_places(int64_t directory) {
  std::ranges::stable_sort(records_, {}, &ZipRecord::header);
  for (size_t i = 0; i < records_.size(); ++i) {
    ZipRecord& record = records_[i];
    record.limit = i + 1 < records_.size() ? records_[i + 1].header : directory;
    int64_t least = kLocalBytes + std::ssize(record.name);
    if (record.header > record.limit || record.limit - record.header < least ||
        record.limit - record.header - least < record.packed_size) {
      throw CorruptError("the zip record {} with {} bytes at {} reaches past {}, where the next part starts",
                         quote(record.name), record.packed_size, record.header, record.limit);
    }
  }
}

void Zip::index_names() {
  by_name_.resize(records_.size());
  for (uint32_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
  auto name = [&](uint32_t i) { return records_[i].name; };
  std::ranges::sort(by_name_, {}, name);
  auto twice = std::ranges::adjacent_find(by_name_, {}, name);
  if (twice != by_name_.end()) throw CorruptError("the zip record {} is there twice", quote(name(*twice)));
}

int64_t Zip::data_start(const ZipRecord& record) const {
  std::vector<std::byte> header(kLocalBytes + record.name.size());  // inside, check_places() saw to that
  bytes_->read(record.header, header);
  size_t name_length = number<uint16_t>(header, 26);
  uint16_t flags = number<uint16_t>(header, 6);
  bool agrees = number<uint32_t>(header, 0) == kLocalSignature && !(flags & kEncrypted) &&
                number<uint16_t>(header, 8) == (record.deflated ? 8 : 0) &&
                name_length == record.name.size() &&
                text(std::span(header).subspan(kLocalBytes)) == record.name;
  if (agrees && !(flags & kSizesFollow)) {
    uint32_t packed = number<uint32_t>(header, 18);
    uint32_t size = number<uint32_t>(header, 22);
    agrees = (packed == kIn64 || packed == record.packed_size) && (size == kIn64 || size == record.size);
  }
  int64_t start = record.header + std::ssize(header) + number<uint16_t>(header, 28);
  if (!agrees || start > record.limit || record.limit - start < record.packed_size) {
    throw CorruptError("{}: the header of the zip record {} at byte {} disagrees with the zip directory",
                       where(), quote(record.name), record.header);
  }
  return start;
}

std::vector<std::byte> Zip::read(const ZipRecord& record, int64_t most) const {
  if (record.size > most) {
    throw UnsupportedError("{}: the zip record {} has {}; at most {} are read", where(), quote(record.name),
                           human_bytes(record.size), human_bytes(most));
  }
  auto source = open_bytes(*bytes_, data_start(record), record.packed_size,
                           record.deflated ? Codec::kDeflate : Codec::kNone, record.size);
  if (source->size() != record.size) {
    throw CorruptError("{}: the zip record {} unpacks to {} bytes instead of {}", where(), quote(record.name),
                       source->size(), record.size);
  }
  std::vector<std::byte> bytes = read_all(*source);
  if (record.crc32 && crc32(0, bytes) != *record.crc32) {
    throw CorruptError("{}: the zip record {} at byte {} fails its checksum (CRC-32)", where(),
                       quote(record.name), record.header);
  }
  return bytes;
}

}  // namespace spolia
