// The hashes Spolia speaks: SHA-256 for digests, CRC-32 for zip payloads, XXH3 for fingerprints and blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace spolia {

/// SHA-256 (FIPS 180-4) of a stream of bytes. One object, one thread.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(std::span<const std::byte> bytes);
  /// The digest as 64 lower-case hex digits; the object starts afresh.
  std::string finish_hex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

/// The CRC-32 of zip and gzip (reflected polynomial 0xEDB88320) of `bytes`, continuing from `crc` (0 to
/// start).
uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes);

/// The CRC-32 of A followed by B, from the CRCs of each and B's length in bytes.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, int64_t length_b);

/// XXH3 with 64 bits. Stable across machines and versions.
uint64_t xxh3_64(std::span<const std::byte> bytes);

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace spolia
