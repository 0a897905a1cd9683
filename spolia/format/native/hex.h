// Bytes and CRCs as lower-case hex digits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace spolia {

/// Two digits a byte.
std::string hex_of_bytes(std::span<const std::byte> bytes);
/// CorruptError where the text is not that.
std::vector<std::byte> bytes_of_hex(std::string_view text);

/// Eight digits a number, the most significant first.
std::string hex_of_crcs(std::span<const uint32_t> crcs);
/// CorruptError where the text is not that.
std::vector<uint32_t> crcs_of_hex(std::string_view text);

/// Whether `text` is a SHA-256 as 64 such digits.
bool is_sha256_hex(std::string_view text);

}  // namespace spolia
