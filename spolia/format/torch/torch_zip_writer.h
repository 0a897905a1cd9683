// Writes torch.save archives, byte for byte as PyTorch 2.14 does but for the serialization id.
//
// An archive is a zip of a pickle, small records that say how to read it, and the storages. A tensor's
// storage may be larger than memory, so its archive is made as a frame: what stands before the storage's
// bytes and what stands after them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace spolia {

/// The archive of an object without storages, whose data.pkl is `pickle`.
std::string write_torch_archive(std::string_view pickle);

/// What an archive has before and after the bytes of its only storage. The lengths of both follow from the
/// lengths of the pickle and the storage alone.
struct ArchiveFrame {
  std::string before;  // ends at a multiple of 64
  std::string after;
};

/// The frame of the archive with the storage "0" of `length` bytes, whose CRC-32 is `crc32`; 0 where it was
/// not computed, as PyTorch and Spolia read it. Sizes and offsets of 4 GiB or more are in zip64 fields.
ArchiveFrame frame_torch_archive(std::string_view pickle, int64_t length, uint32_t crc32);

}  // namespace spolia
