// What the tests of these readers share: a second, naive way from a payload to a tensor's bytes, and files in
// memory.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/byte_source.h"
#include "spolia/format/source.h"
#include "spolia/format/torch/testing_zip.h"

namespace spolia::testing {

inline std::vector<std::byte> to_bytes(std::string_view text) {
  auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

/// Bytes in memory as a file.
class MemoryFile final : public InputFile {
 public:
  explicit MemoryFile(std::string_view bytes) : bytes_(to_bytes(bytes)) {}
  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes_); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    ASSERT_GE(offset, 0);
    ASSERT_LE(offset + std::ssize(out), size()) << "a reader went out of its file";
    std::copy_n(bytes_.begin() + offset, out.size(), out.begin());
  }

 private:
  std::filesystem::path path_ = "/memory";
  std::vector<std::byte> bytes_;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The whole tensor, row-major, gathered element by element; a byte no chunk fills fails the test, as does a
/// payload whose CRC is wrong.
inline std::vector<std::byte> gather(const Source& source, size_t tensor) {
  const TensorEntry& entry = source.catalog().tensors[tensor];
  const int64_t width = element_bytes(entry.dtype);
  const Dims strides = row_major_strides(addressable_shape(entry.dtype, entry.shape));
  std::vector<std::byte> whole(static_cast<size_t>(entry.bytes()));
  std::vector<bool> filled(whole.size() / static_cast<size_t>(width));
  for (size_t c = 0; c < entry.chunks(); ++c) {
    Payload payload = source.payload(tensor, c);
    auto bytes = open_bytes(source.file(payload.stored.file), payload.stored.offset, payload.stored.length,
                            payload.codec);
    std::vector<std::byte> data(static_cast<size_t>(payload.length));
    bytes->read(payload.offset, data);
    if (payload.crc32) {
      EXPECT_EQ(crc32(0, data), *payload.crc32) << entry.name;
    }
    const Box box = addressable_box(entry, c);
    Dims index(box.ndim());
    for (int64_t i = 0; i < box.numel(); ++i) {
      int64_t from = payload.first;
      int64_t to = 0;
      for (size_t d = 0; d < index.size(); ++d) {
        from += index[d] * payload.strides[d];
        to += (box.offsets[d] + index[d]) * strides[d];
      }
      std::memcpy(whole.data() + to * width, data.data() + from * width, static_cast<size_t>(width));
      filled[static_cast<size_t>(to)] = true;
      for (size_t d = index.size(); d-- > 0 && ++index[d] == box.sizes[d];) index[d] = 0;
    }
  }
  EXPECT_EQ(std::ranges::count(filled, false), 0) << entry.name << " has elements that no chunk fills";
  return whole;
}

inline std::string sha256(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish_hex();
}

/// Compares names, dtypes, shapes and digests of all tensors, and all values, with what PyTorch said.
inline void expect_matches(const Source& source, const std::filesystem::path& expected_json) {
  const auto expected = nlohmann::ordered_json::parse(read_file(expected_json));
  const Catalog& catalog = source.catalog();
  EXPECT_EQ(catalog.tensors.size(), expected["tensors"].size());
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry& entry = catalog.tensors[t];
    ASSERT_TRUE(expected["tensors"].contains(entry.name)) << entry.name;
    const auto& truth = expected["tensors"][entry.name];
    EXPECT_EQ(name_of(entry.dtype), truth["dtype"].get<std::string>()) << entry.name;
    EXPECT_EQ(std::vector<int64_t>(entry.shape.begin(), entry.shape.end()),
              truth["shape"].get<std::vector<int64_t>>())
        << entry.name;
    EXPECT_EQ(sha256(gather(source, t)), truth["sha256"].get<std::string>()) << entry.name;
    if (!entry.path.empty()) {
      EXPECT_EQ(joined(entry.path), entry.name);
    }
  }
  EXPECT_EQ(catalog.values.size(), expected["values"].size());
  for (size_t v = 0; v < catalog.values.size(); ++v) {
    const std::string& name = catalog.values[v].name;
    ASSERT_TRUE(expected["values"].contains(name)) << name;
    const auto& truth = expected["values"][name];
    Value value = source.value(v);
    ASSERT_EQ(value.is_json(), truth.contains("json")) << name;
    if (truth.contains("json")) {
      EXPECT_EQ(value.to_json(), truth["json"]) << name;
    } else {
      EXPECT_EQ(value.python_type(), truth["python"].get<std::string>()) << name;
    }
  }
}

/// The kind of the error that `action` throws, whose message must have all of `words`; nothing where it
/// throws none.
template <class Action>
std::optional<ErrorKind> kind_thrown(Action&& action, const std::vector<std::string>& words = {}) {
  try {
    action();
  } catch (const Error& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string_view(error.what()).find(word), std::string_view::npos)
          << "\"" << word << "\" is not in: " << error.what();
    }
    return error.kind();
  }
  return std::nullopt;
}

/// Writes a file, whose folder is there.
inline void put_file(Store& store, const std::filesystem::path& path, std::string_view bytes) {
  store.create(path)->write(0, bytes_of(bytes));
}

}  // namespace spolia::testing
