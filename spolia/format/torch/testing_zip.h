// Zips made by hand, for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/hash.h"

namespace spolia::testing {

/// The little-endian bytes of a number.
template <class T>
std::string little(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// A record for make_zip().
struct TestRecord {
  std::string name;
  std::string data;                            // as it is stored
  uint16_t method = 0;                         // 8: `data` is a deflate stream
  int64_t size = -1;                           // of what it unpacks to; -1: the size of `data`
  std::optional<uint32_t> crc = std::nullopt;  // nothing: that of `data`
};

/// A zip with plain headers; with zip64 ends where asked for.
inline std::string make_zip(const std::vector<TestRecord>& records, bool zip64 = false) {
  std::string out;
  std::string directory;
  for (const TestRecord& record : records) {
    auto packed = static_cast<uint32_t>(record.data.size());
    auto size = record.size < 0 ? packed : static_cast<uint32_t>(record.size);
    uint32_t crc = record.crc.value_or(crc32(0, bytes_of(record.data)));
    std::string common = little<uint16_t>(20) + little<uint16_t>(0) + little(record.method) +
                         little<uint32_t>(0) + little(crc) + little(packed) + little(size) +
                         little(static_cast<uint16_t>(record.name.size()));
    directory += "PK\1\2" + little<uint16_t>(20) + common;
    if (zip64) {
      directory += little<uint16_t>(12) + std::string(10, '\0') + little<uint32_t>(0xFFFFFFFF) + record.name +
                   little<uint16_t>(1) + little<uint16_t>(8) + little(static_cast<uint64_t>(out.size()));
    } else {
      directory += std::string(12, '\0') + little(static_cast<uint32_t>(out.size())) + record.name;
    }
    out += "PK\3\4" + common + little<uint16_t>(0) + record.name + record.data;
  }
  uint64_t start = out.size();
  uint64_t count = records.size();
  out += directory;
  if (zip64) {
    uint64_t end64 = out.size();
    out += "PK\6\6" + little<uint64_t>(44) + little<uint16_t>(45) + little<uint16_t>(45) +
           std::string(8, '\0') + little(count) + little(count) +
           little(static_cast<uint64_t>(directory.size())) + little(start);
    out += "PK\6\7" + little<uint32_t>(0) + little(end64) + little<uint32_t>(1);
  }
  uint32_t narrow_start = zip64 ? 0xFFFFFFFF : static_cast<uint32_t>(start);
  out += "PK\5\6" + std::string(4, '\0') + little(static_cast<uint16_t>(count)) +
         little(static_cast<uint16_t>(count)) + little(static_cast<uint32_t>(directory.size())) +
         little(narrow_start) + std::string(2, '\0');
  return out;
}

}  // namespace spolia::testing
