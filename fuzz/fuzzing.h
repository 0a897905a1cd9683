// What the fuzz targets share. A parser may say no to any bytes, with a spolia::Error; everything else it
// does wrong is a crash here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/format/source.h"
#include "spolia/store/memory_store.h"

namespace spolia::fuzzing {

using Bytes = std::span<const std::byte>;

inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

inline std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Whether `action` ends without an Error. The Error's message must be fit for a terminal.
template <class Action>
bool accepts(Action&& action) {
  try {
    action();
    return true;
  } catch (const Error& error) {
    std::string_view message = error.what();
    require(!message.empty() && is_utf8(message));
    require(std::ranges::none_of(message, [](unsigned char c) { return c < 0x20 || c == 0x7f; }));
    return false;
  }
}

/// Bytes as a file. A reader that leaves them is a bug even where a store would notice.
class BytesFile final : public InputFile {
 public:
  explicit BytesFile(Bytes bytes) : bytes_(bytes) {}
  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes_); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    require(offset >= 0 && offset <= size() && std::ssize(out) <= size() - offset);
    std::ranges::copy(bytes_.subspan(static_cast<size_t>(offset), out.size()), out.begin());
  }

 private:
  std::filesystem::path path_ = "/fuzz/file";
  Bytes bytes_;
};

inline void put_file(Store& store, const std::filesystem::path& path, Bytes bytes) {
  if (!store.exists(path.parent_path())) store.create_folder(path.parent_path());
  store.create(path)->write(0, bytes);
}

/// Reads all there is to read; what verify() finds no fault in must have digests.
inline void read_everything(const Source& source) {
  constexpr int64_t kMostBytes = int64_t{1} << 20;  // strides of 0 make small files large
  const Catalog& catalog = source.catalog();
  require(std::ranges::is_sorted(catalog.tensors, {}, &TensorEntry::name));
  require(std::ranges::is_sorted(catalog.values, {}, &ValueEntry::name));
  int64_t bytes = 0;
  for (const TensorEntry& tensor : catalog.tensors) {
    require(tensor.boxes.size() == tensor.extents.size() && tensor.boxes.ndim() == tensor.shape.size());
    for (const Extent& extent : tensor.extents) require(extent.file < catalog.files.size());
    bytes += std::min(tensor.bytes(), kMostBytes);
  }
  for (size_t v = 0; v < catalog.values.size(); ++v) {
    accepts([&] { require(source.value(v).text(100).size() < 1000); });
  }
  Verdict verdict;
  require(accepts([&] { verdict = verify(source, {}); }));
  if (bytes >= kMostBytes) return;
  PlanOptions plan;
  plan.memory = kLeastMemory;
  plan.largest_tile = int64_t{64} << 10;
  bool digested = accepts([&] { digest_tensors(source, {.plan = plan}); });
  require(digested || !verdict.faults.empty());
}

/// Opens what lies at `path` of the store, and reads everything.
inline void read_checkpoint(std::shared_ptr<const Store> store, const std::filesystem::path& path) {
  std::unique_ptr<Source> source;
  if (accepts([&] { source = open_source(std::move(store), path); })) read_everything(*source);
}

/// What each target defines: one run.
void run(Bytes bytes);

}  // namespace spolia::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  spolia::fuzzing::run(std::as_bytes(std::span(data, size)));
  return 0;
}
