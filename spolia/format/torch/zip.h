// Zip archives, as torch.save writes them and as other tools rewrite them (APPNOTE.TXT 6.3.10).
//
// Read are stored and deflated records, with or without zip64 and data descriptors. The central directory
// is believed, and checked: it lies where the archive's end says, its records lie before it and do not
// overlap, no name is twice, and a record's own header agrees with it. Up to 64 KiB of a comment or of junk
// may follow the archive; nothing may come before it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "spolia/format/byte_source.h"

namespace spolia {

struct ZipRecord {
  std::string_view name;  // lives as long as its Zip
  bool deflated = false;
  std::optional<uint32_t> crc32;  // of the unpacked bytes; a stored 0 means that it was not computed
  int64_t packed_size = 0;
  int64_t size = 0;
  int64_t header = 0;  // where the record's own header starts
  int64_t limit = 0;   // where the next record, or the directory, starts
};

/// An archive's directory. Not thread-safe: reading moves `bytes`.
class Zip {
 public:
  /// Reads the directory. `bytes` must outlive the object. CorruptError where the archive breaks the rules
  /// above; UnsupportedError for encryption, other methods, more than one disk, or a directory of more than
  /// 64 MiB.
  explicit Zip(ByteSource& bytes);

  /// In the order in which they lie.
  std::span<const ZipRecord> records() const { return records_; }
  /// Or nullptr.
  const ZipRecord* find(std::string_view name) const;
  std::string where() const { return bytes_->where(); }

  /// Where a record's packed bytes start; from its own header, which must agree with the directory.
  int64_t data_start(const ZipRecord& record) const;

  /// A whole record, its CRC checked. UnsupportedError where it is larger than `most` bytes.
  std::vector<std::byte> read(const ZipRecord& record, int64_t most) const;

 private:
  struct End;
  End find_end() const;
  std::optional<End> find_end64(int64_t at) const;
  void read_directory(const End& end);
  ZipRecord next_record(std::span<const std::byte>& rest) const;
  void check_places(int64_t directory);
  void index_names();

  ByteSource* bytes_;
  std::vector<std::byte> directory_;  // holds the names
  std::vector<ZipRecord> records_;
  std::vector<uint32_t> by_name_;  // indices of records_, sorted by name
};

}  // namespace spolia
