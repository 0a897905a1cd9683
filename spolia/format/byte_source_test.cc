#include "spolia/format/byte_source.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>

#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing.h"

namespace spolia {
namespace {

using testing::MemoryFile;

/// Text that packs well, but not to nothing.
std::string sample(size_t size) {
  std::mt19937 random(7);
  std::string text;
  while (text.size() < size) text += std::to_string(random() % 1000) + " the same words again and again; ";
  text.resize(size);
  return text;
}

std::string zstd(std::string_view text, std::function<void(ZSTD_CCtx*)> setup = nullptr) {
  std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  if (setup) setup(context.get());
  std::string out(ZSTD_compressBound(text.size()), '\0');
  size_t size = ZSTD_compress2(context.get(), out.data(), out.size(), text.data(), text.size());
  EXPECT_FALSE(ZSTD_isError(size));
  out.resize(size);
  return out;
}

/// As PyTorch's extension writes it: as a stream, so without the size in the header.
std::string zstd_stream(std::string_view text) {
  return zstd(text, [](ZSTD_CCtx* c) { ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, 0); });
}

std::string deflate_raw(std::string_view text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string read_text(ByteSource& source, int64_t offset, int64_t length) {
  std::string text(static_cast<size_t>(length), '?');
  source.read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

struct Packed {
  std::string name;
  Codec codec;
  std::string bytes;
};

std::vector<Packed> all_forms(const std::string& text) {
  return {{"plain", Codec::kNone, text},
          {"zstd", Codec::kZstd, zstd(text)},
          {"zstd stream", Codec::kZstd, zstd_stream(text)},
          {"deflate", Codec::kDeflate, deflate_raw(text)}};
}

/// The kind of error that decoding the whole file throws.
std::optional<ErrorKind> kind_thrown_by(const InputFile& file, Codec codec) {
  return testing::kind_thrown([&] { open_bytes(file, 0, file.size(), codec)->size(); });
}

TEST(ByteSource, ReadsAnywhereInAnyOrder) {
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1} << 20, (int64_t{1} << 20) + 1,
                       int64_t{3'000'000}}) {
    std::string text = sample(static_cast<size_t>(size));
    for (const Packed& form : all_forms(text)) {
      SCOPED_TRACE(form.name + " " + std::to_string(size));
      MemoryFile file("before" + form.bytes + "after");
      std::mt19937_64 random(3);
      for (bool size_first : {false, true}) {
        auto source = open_bytes(file, 6, std::ssize(form.bytes), form.codec);
        if (size_first) {
          EXPECT_EQ(source->size(), size);
        }
        for (int i = 0; i < 12; ++i) {
          int64_t offset = static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
          int64_t length = std::min<int64_t>(size - offset, static_cast<int64_t>(random() % 300'000));
          EXPECT_TRUE(read_text(*source, offset, length) ==
                      text.substr(static_cast<size_t>(offset), static_cast<size_t>(length)));
        }
        EXPECT_TRUE(read_text(*source, 0, size) == text);
        EXPECT_EQ(source->size(), size);
        EXPECT_THROW(read_text(*source, size, 1), CorruptError);
        EXPECT_THROW(read_text(*source, size + 10, 0), CorruptError);
        EXPECT_THROW(read_text(*source, -1, 1), CorruptError);
        EXPECT_THROW(read_text(*source, std::numeric_limits<int64_t>::max(), 1), CorruptError);
        EXPECT_TRUE(read_text(*source, 0, size) == text);  // still usable
      }
    }
  }
}

TEST(ByteSource, RangesOutsideTheFileAreRefused) {
  MemoryFile file("0123456789");
  EXPECT_EQ(read_text(*open_bytes(file, 4, 3, Codec::kNone), 1, 2), "56");
  for (auto [offset, length] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 11}, {11, 0}, {-1, 2}, {3, -1}, {1, std::numeric_limits<int64_t>::max()}}) {
    EXPECT_THROW(open_bytes(file, offset, length, Codec::kNone), CorruptError) << offset << " " << length;
  }
  auto outer = bytes_in_memory(testing::to_bytes("0123456789"), "memory");
  auto inner = open_bytes(*outer, 2, 5, Codec::kNone);
  EXPECT_EQ(read_text(*inner, 0, 5), "23456");
  EXPECT_THROW(read_text(*inner, 4, 2), CorruptError);
  EXPECT_THROW(open_bytes(*outer, 6, 5, Codec::kNone), CorruptError);
}

TEST(ByteSource, KeptEndsReadTheSame) {
  std::string text = sample(50'000);
  MemoryFile file(text);
  for (int64_t ends : {1, 100, 6000, 7000, 100'000}) {
    auto source = keep_ends(open_bytes(file, 0, file.size(), Codec::kNone), ends);
    EXPECT_EQ(source->size(), 50'000);
    for (auto [offset, length] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 100}, {0, 101}, {49'900, 100}, {49'899, 101}, {50'000, 0}, {0, 50'000}, {20'000, 5}}) {
      EXPECT_TRUE(read_text(*source, offset, length) ==
                  text.substr(static_cast<size_t>(offset), static_cast<size_t>(length)));
    }
    EXPECT_THROW(read_text(*source, 49'999, 2), CorruptError);
  }
}

TEST(ByteSource, TruncatedStreamsAreCorrupt) {
  std::string text = sample(3000);
  for (const Packed& form : all_forms(text)) {
    if (form.codec == Codec::kNone) continue;
    for (size_t length = 0; length < form.bytes.size(); ++length) {
      MemoryFile file(form.bytes.substr(0, length));
      EXPECT_EQ(kind_thrown_by(file, form.codec), ErrorKind::kCorrupt) << form.name << " cut to " << length;
    }
    MemoryFile file(form.bytes + "x");
    EXPECT_EQ(kind_thrown_by(file, form.codec), ErrorKind::kCorrupt) << form.name;
  }
}

TEST(ByteSource, DamagedStreamsGiveErrorsOrOtherBytesButNeverMore) {
  std::string text = sample(3000);
  for (const Packed& form : all_forms(text)) {
    if (form.codec == Codec::kNone) continue;
    for (size_t i = 0; i < form.bytes.size(); ++i) {
      for (char flip : {'\x01', '\x80', '\xFF'}) {
        std::string damaged = form.bytes;
        damaged[i] = static_cast<char>(damaged[i] ^ flip);
        MemoryFile file(damaged);
        auto source = open_bytes(file, 0, file.size(), form.codec, 100'000);
        try {
          EXPECT_LE(source->size(), 100'000);
        } catch (const Error& error) {
          EXPECT_TRUE(error.kind() == ErrorKind::kCorrupt || error.kind() == ErrorKind::kUnsupported);
          EXPECT_NE(std::string(error.what()).find("/memory"), std::string::npos) << error.what();
        }
      }
    }
  }
}

TEST(ByteSource, ZstdChecksumIsChecked) {
  std::string text = sample(3000);
  std::string packed = zstd(text, [](ZSTD_CCtx* c) { ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1); });
  packed.back() = static_cast<char>(packed.back() ^ 1);
  MemoryFile file(packed);
  EXPECT_EQ(kind_thrown_by(file, Codec::kZstd), ErrorKind::kCorrupt);
}

TEST(ByteSource, MoreThanTheLimitIsCorrupt) {
  std::string zeros(5'000'000, '\0');
  for (const Packed& form : all_forms(zeros)) {
    if (form.codec == Codec::kNone) continue;
    MemoryFile file(form.bytes);
    EXPECT_EQ(open_bytes(file, 0, file.size(), form.codec, 5'000'000)->size(), 5'000'000);
    EXPECT_THROW(open_bytes(file, 0, file.size(), form.codec, 4'999'999)->size(), CorruptError);
  }
}

TEST(ByteSource, ZstdWindowsAreBounded) {
  // A frame header by hand: no content size, window descriptor for 2^log bytes, then one empty last block.
  auto frame = [](int log) {
    return std::string("\x28\xB5\x2F\xFD\x00", 5) + static_cast<char>((log - 10) << 3) +
           std::string("\x01\x00\x00", 3);
  };
  MemoryFile allowed(frame(27));
  EXPECT_EQ(open_bytes(allowed, 0, allowed.size(), Codec::kZstd)->size(), 0);
  MemoryFile large(frame(28));
  EXPECT_EQ(kind_thrown_by(large, Codec::kZstd), ErrorKind::kUnsupported);
  MemoryFile absurd(frame(41));
  EXPECT_EQ(kind_thrown_by(absurd, Codec::kZstd), ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace spolia
