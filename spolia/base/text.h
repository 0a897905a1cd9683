// Small pieces of text work: quoting hostile names, sizes for people, patterns.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace spolia {

/// `name` in double quotes, with control bytes, quotes, backslashes and invalid UTF-8 escaped (\n, \x1b) and
/// at most about 200 bytes of it shown. For names and paths in messages: they may come from strangers.
std::string quote(std::string_view name);

/// `name` as it can stand in a line for people: whole and as it is, or quote(name) where it holds something
/// that would not show as itself.
std::string printable(std::string_view name);

/// "1.5 GiB", "312 B".
std::string human_bytes(int64_t bytes);

/// A byte count as people write it: "1048576", "64MiB", "5GB", "512k" (k, M, G, T are powers of 1024, as are
/// KiB, MiB, ...; KB, MB, GB, TB are powers of 1000). InvalidArgumentError for anything else, negative or too
/// large.
int64_t parse_bytes(std::string_view text);

/// Whether `text` matches the pattern as a whole: `*` any run of bytes, `?` one byte, everything else itself.
bool glob_match(std::string_view pattern, std::string_view text);

/// Whether `text` is valid UTF-8 (no surrogates, no overlong forms).
bool is_utf8(std::string_view text);

}  // namespace spolia
