// What every store holds its callers and files to, in one place so that all give the same answers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace spolia {

/// The range a read asks for lies inside a file of `size` bytes, or CorruptError with file, range and size.
void check_read_range(const std::filesystem::path& path, int64_t offset, int64_t length, int64_t size);

/// A write's offset is not negative and its end fits in 64 bits, or InvalidArgumentError.
void check_write_range(const std::filesystem::path& path, int64_t offset, int64_t length);

/// The answer of a store that cannot exchange two names in one step: UnsupportedError.
[[noreturn]] void throw_cannot_exchange(const std::filesystem::path& a, const std::filesystem::path& b);

/// `relative`, a name that a stranger wrote, can only mean something below `folder`: it is not empty or
/// absolute and has neither a `..` nor a NUL. CorruptError otherwise. Links are the store's business.
void check_relative_name(const std::filesystem::path& folder, const std::string& relative);

}  // namespace spolia
