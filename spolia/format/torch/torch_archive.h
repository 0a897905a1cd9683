// A torch.save archive: the zip that torch.save writes since PyTorch 1.6.
//
// Records: ROOT/data.pkl (the object, with storages by key), ROOT/data/KEY (a storage's bytes), and small
// ones: ROOT/version, ROOT/byteorder, ... The root is the file's stem, or "archive" for streams.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/format/torch/zip.h"

namespace spolia {

class TorchArchive {
 public:
  /// Reads the directory. `bytes` must outlive the object; `stored_bytes` is what they take in their file,
  /// where they may be packed. CorruptError where it is no such archive; UnsupportedError, by name, for files
  /// from before torch 1.6, TorchScript, and big-endian storages.
  TorchArchive(ByteSource& bytes, int64_t stored_bytes);

  const Zip& zip() const { return zip_; }

  /// The bytes of data.pkl, its CRC checked. UnsupportedError where it is packed and unpacks to more than
  /// 4 MiB and more than 16 times the bytes stored.
  std::vector<std::byte> pickle() const;

  /// The record of a storage; CorruptError where it is missing.
  const ZipRecord& storage(std::string_view key) const;

 private:
  ByteSource& checked(ByteSource& bytes);
  std::string find_root() const;

  int64_t stored_bytes_;
  Zip zip_;
  std::string root_;  // with its slash
};

/// Whether `first`, the first bytes of a file, are those of a zip archive.
bool starts_like_zip(std::span<const std::byte> first);

/// "a file from before torch 1.6 ..." where `first`, the first bytes of a file (512 suffice), say that torch
/// saved it in one of its older forms; else empty.
std::string_view name_of_old_format(std::span<const std::byte> first);

}  // namespace spolia
