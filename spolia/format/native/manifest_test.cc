#include "spolia/format/native/manifest.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/native/random_value.h"
#include "spolia/format/torch/testing.h"

namespace spolia {
namespace {

using testing::kind_thrown;

std::string hash_of(char digit) { return std::string(64, digit); }

Manifest example() {
  Manifest manifest;
  manifest.block_bytes = 1 << 20;
  manifest.layouts = {"[shard(0)] over 2 (dp)"};
  manifest.parts = {{0, {"part-00000.json", 10, hash_of('0')}}, {7, {"part-00007.json", 11, hash_of('a')}}};
  manifest.tensors.push_back({"w", DType::kBFloat16, {4}, 2, 0u, 1, true, {}, {}});
  manifest.tensors.push_back(
      {"x", DType::kInt8, {1, 2}, 1, {}, {}, false, MemoryFormat::kChannelsLast, {"a", 0}});
  manifest.tensors.push_back({"\xff", DType::kComplex32, {}, 1, {}, {}, false, {}, {"\xfe"}});
  manifest.values.push_back({"lr", Value(0.5), {}});
  manifest.values.push_back({"object", HashedFile{"value-00000.pt", 12, hash_of('f')}, {"object"}});
  return manifest;
}

TEST(Manifest, IsWrittenAsTheDocumentSays) {
  const std::string due = fmt::format(R"json({{
"format": "spolia",
"version": 1,
"block_bytes": 1048576,
"layouts": [
"[shard(0)] over 2 (dp)"
],
"parts": [
{{"writer": 0, "file": "part-00000.json", "bytes": 10, "sha256": "{}"}},
{{"writer": 7, "file": "part-00007.json", "bytes": 11, "sha256": "{}"}}
],
"tensors": [
{{"name": "w", "dtype": "bfloat16", "shape": [4], "chunks": 2, "layout": 0, "replica": 1, "requires_grad": true}},
{{"name": "x", "dtype": "int8", "shape": [1, 2], "chunks": 1, "memory_format": "channels_last", "path": ["a", 0]}},
{{"name": {{"$text": "ff"}}, "dtype": "complex32", "shape": [], "chunks": 1, "path": [{{"$text": "fe"}}]}}
],
"values": [
{{"name": "lr", "value": 0.5}},
{{"name": "object", "file": "value-00000.pt", "bytes": 12, "sha256": "{}", "path": ["object"]}}
]
}}
)json",
                                      hash_of('0'), hash_of('a'), hash_of('f'));
  EXPECT_EQ(write_manifest(example()), due);
  EXPECT_EQ(read_manifest(due, "f"), example());
  EXPECT_EQ(read_manifest(write_manifest({}), "f"), Manifest{});
}

PartFile example_part() {
  PartFile part{"data-00007.safetensors", 500, 100, 0xdeadbeef, {}};
  part.chunks.push_back({0, 100, std::nullopt, {1, 0xabcdef01}});
  part.chunks.push_back({3, 300, Box{{0, 2}, {1, 2}}, {}});
  return part;
}

TEST(PartFile, IsWrittenAsTheDocumentSays) {
  const std::string due = R"({
"format": "spolia part",
"version": 1,
"data": {"file": "data-00007.safetensors", "bytes": 500},
"header": {"bytes": 100, "crc32": "deadbeef"},
"chunks": [
{"tensor": 0, "offset": 100, "crc32": "00000001abcdef01"},
{"tensor": 3, "offset": 300, "box": [[0, 2], [1, 2]]}
]
}
)";
  EXPECT_EQ(write_part(example_part()), due);
  EXPECT_EQ(read_part(due, "f"), example_part());
}

KeyPath random_path() {
  KeyPath path;
  for (int64_t i = pick(0, 3); i > 0; --i) {
    path.push_back(pick(0, 2) == 1 ? PathKey(pick(-3, 3)) : PathKey(random_text()));
  }
  return path;
}

Manifest random_manifest() {
  Manifest manifest;
  manifest.block_bytes = pick(0, 3);
  for (int64_t i = pick(0, 3); i > 0; --i) manifest.layouts.push_back("\"" + std::to_string(i));
  for (int64_t i = 0, writer = 0; i < pick(0, 4); ++i) {
    writer += pick(1, 1000);
    manifest.parts.push_back(
        {static_cast<uint32_t>(writer), {"p\"" + std::to_string(writer), pick(0, 1 << 20), hash_of('9')}});
  }
  std::string name;
  for (int64_t i = pick(0, 4); i > 0; --i) {
    name += "a" + random_text();
    Manifest::Tensor tensor;
    tensor.name = name;
    tensor.dtype = static_cast<DType>(pick(0, int64_t{kDTypeCount}));
    for (int64_t d = pick(0, 4); d > 0; --d) tensor.shape.push_back(8 * pick(0, 9));
    if (tensor.shape.empty() && is_sub_byte(tensor.dtype)) tensor.dtype = DType::kBool;
    if (pick(0, 4) > 0) tensor.chunks = pick(0, 100);
    if (!manifest.layouts.empty() && pick(0, 2) == 1) {
      tensor.layout = static_cast<uint32_t>(pick(0, std::ssize(manifest.layouts)));
      if (pick(0, 3) > 0) tensor.replica = static_cast<uint32_t>(pick(0, 5));
    }
    tensor.requires_grad = pick(0, 2) == 1;
    tensor.memory_format = static_cast<MemoryFormat>(pick(0, 3));
    tensor.path = random_path();
    manifest.tensors.push_back(tensor);
    if (pick(0, 2) == 1) {
      manifest.values.push_back({"v" + name, random_value(2), random_path()});
    } else {
      manifest.values.push_back(
          {"v" + name, HashedFile{"v" + std::to_string(i), 5, hash_of('b')}, random_path()});
    }
  }
  return manifest;
}

RC_GTEST_PROP(Manifest, GivesBackWhatWasWritten, ()) {
  const Manifest manifest = random_manifest();
  const std::string text = write_manifest(manifest);
  const Manifest again = read_manifest(text, "f");
  RC_ASSERT(again == manifest);
  RC_ASSERT(write_manifest(again) == text);
}

RC_GTEST_PROP(PartFile, GivesBackWhatWasWritten, ()) {
  PartFile part{"d" + std::to_string(pick(0, 9)), pick(0, 1000), pick(0, 1000), std::nullopt, {}};
  if (pick(0, 2) == 1) part.header_crc = static_cast<uint32_t>(pick(0, int64_t{1} << 32));
  for (int64_t i = pick(0, 4); i > 0; --i) {
    PartFile::Chunk chunk{static_cast<uint32_t>(pick(0, 9)), pick(0, 1000), std::nullopt, {}};
    if (pick(0, 2) == 1) {
      chunk.box.emplace();
      for (int64_t d = pick(0, 4); d > 0; --d) {
        chunk.box->offsets.push_back(pick(0, 9));
        chunk.box->sizes.push_back(pick(0, 9));
      }
    }
    for (int64_t c = pick(0, 3); c > 0; --c)
      chunk.crcs.push_back(static_cast<uint32_t>(pick(0, int64_t{1} << 32)));
    part.chunks.push_back(chunk);
  }
  RC_ASSERT(read_part(write_part(part), "f") == part);
}

TEST(Manifest, RefusesEveryTruncation) {
  const std::string text = write_manifest(example());
  for (size_t length = 0; length + 1 < text.size(); ++length) {  // the last byte is a newline
    EXPECT_EQ(kind_thrown([&] { read_manifest(text.substr(0, length), "f"); }), ErrorKind::kCorrupt)
        << length;
  }
  const std::string part = write_part(example_part());
  for (size_t length = 0; length + 1 < part.size(); ++length) {
    EXPECT_EQ(kind_thrown([&] { read_part(part.substr(0, length), "f"); }), ErrorKind::kCorrupt) << length;
  }
}

/// `text` with the first `from` in it replaced.
std::string with(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Manifest, IgnoresKeysItDoesNotKnow) {
  std::string text = write_manifest(example());
  text =
      with(text, "\"block_bytes\"", "\"written_by\": {\"x\": [1, {}]}, \"more\": [1, [2]],\n\"block_bytes\"");
  text = with(text, "\"writer\": 0", "\"host\": \"h\", \"writer\": 0");
  text = with(text, "\"name\": \"w\"", "\"note\": {\"$odd\": 1}, \"name\": \"w\"");
  text = with(text, "\"name\": \"lr\"", "\"note\": [], \"name\": \"lr\"");
  EXPECT_EQ(read_manifest(text, "f"), example());
  const std::string part = with(write_part(example_part()), "\"tensor\": 0", "\"x\": null, \"tensor\": 0");
  EXPECT_EQ(read_part(part, "f"), example_part());
}

TEST(Manifest, RefusesOtherFormatsAndVersions) {
  const std::string text = write_manifest(example());
  auto expect = [&](std::string_view from, std::string_view to, ErrorKind kind, const char* word) {
    EXPECT_EQ(kind_thrown([&] { read_manifest(with(text, from, to), "f.json"); }, {"f.json", word}), kind)
        << to;
  };
  expect("\"version\": 1", "\"version\": 2", ErrorKind::kUnsupported, "version 1 of the format, not 2");
  expect("\"version\": 1", "\"version\": \"1\"", ErrorKind::kUnsupported, "newer");
  expect("\"version\": 1,\n", "", ErrorKind::kCorrupt, "version");
  expect("\"format\": \"spolia\",\n", "", ErrorKind::kCorrupt, "format");
  expect("\"spolia\"", "\"other\"", ErrorKind::kUnsupported, "other");
  expect("\"spolia\"", "[\"spolia\"]", ErrorKind::kCorrupt, "format");
  EXPECT_EQ(kind_thrown([&] { read_manifest("{}", "f"); }), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { read_part(text, "f"); }), ErrorKind::kUnsupported);
  EXPECT_EQ(kind_thrown([&] { read_part("{\"format\": \"spolia part\", \"version\": 1}", "f"); }),
            ErrorKind::kCorrupt);
}

TEST(Manifest, RefusesWrongTypesAndNumbers) {
  const std::string text = write_manifest(example());
  auto expect = [&](std::string_view from, std::string_view to, ErrorKind kind = ErrorKind::kCorrupt) {
    EXPECT_EQ(kind_thrown([&] { read_manifest(with(text, from, to), "f.json"); }, {"f.json"}), kind) << to;
  };
  expect("1048576", "0");
  expect("1048576", "-1");
  expect("1048576", "1.5");
  expect("1048576", "[1048576]");
  expect("\"[shard(0)] over 2 (dp)\"", "5");
  expect("\"layouts\": [\n\"[shard(0)] over 2 (dp)\"\n]", "\"layouts\": 5");
  expect("\"writer\": 0", "\"writer\": -1");
  expect("\"writer\": 0", "\"writer\": 4294967296");
  expect("\"writer\": 0", "\"writer\": 7");  // as the next one
  expect("\"writer\": 0", "\"writer\": 8");  // after the next one
  expect("\"bytes\": 10", "\"bytes\": -10");
  expect("\"bytes\": 10", "\"bytes\": 9223372036854775808");
  expect("part-00000.json", "../part-00000.json");
  expect("part-00000.json", "/etc/passwd");
  expect("part-00000.json", "..");
  expect("part-00000.json", ".");
  expect("part-00000.json", "");
  expect("part-00000.json", "a\\u0000b");
  expect("part-00000.json", "part-00007.json");
  expect("part-00000.json", "value-00000.pt");
  expect(hash_of('0'), hash_of('0') + "0");
  expect(hash_of('a'), hash_of('A'));
  expect("\"w\"", "5");
  expect("\"w\"", "{\"$bytes\": \"00\"}");
  expect("{\"$text\": \"ff\"}", "\"x\"");  // twice
  expect("{\"$text\": \"ff\"}", "\"a\"");  // out of order
  expect("\"bfloat16\"", "\"float128\"", ErrorKind::kUnsupported);
  expect("[1, 2]", "[4, -3]");
  expect("[1, 2]", "[4, 3.0]");
  expect("[1, 2]", "12");
  expect("[1, 2]", "[4294967296, 4294967296]");
  expect("[1, 2]", "[0, 4294967296, 4294967296]");  // its strides overflow
  std::string many = "[1";
  for (size_t i = 0; i < 64; ++i) many += ", 1";
  expect("[1, 2]", many + "]", ErrorKind::kUnsupported);
  expect("\"chunks\": 2", "\"chunks\": -2");
  expect("\"layout\": 0", "\"layout\": 1");
  expect("\"layout\": 0", "\"layout\": null");
  expect("\"replica\": 1", "\"replica\": 4294967296");
  expect("\"requires_grad\": true", "\"requires_grad\": 1");
  expect("\"channels_last\"", "\"sideways\"", ErrorKind::kUnsupported);
  expect("[\"a\", 0]", "[0.5]");
  expect("[\"a\", 0]", "\"a\"");
  expect("\"value\": 0.5", "\"valeu\": 0.5");
  expect("\"value\": 0.5", "\"value\": {\"$odd\": 1}");
  expect("\"lr\"", "\"object\"");  // twice
  expect("{\"name\": \"lr\", \"value\": 0.5}", "7");

  const std::string part = write_part(example_part());
  auto expect_part = [&](std::string_view from, std::string_view to) {
    EXPECT_EQ(kind_thrown([&] { read_part(with(part, from, to), "f.json"); }, {"f.json"}),
              ErrorKind::kCorrupt)
        << to;
  };
  expect_part("data-00007.safetensors", "a/b");
  expect_part("{\"file\": \"data-00007.safetensors\", \"bytes\": 500}", "\"data-00007.safetensors\"");
  expect_part("\"bytes\": 500", "\"bytes\": null");
  expect_part("deadbeef", "deadbee");
  expect_part("deadbeef", "deadbeefdeadbeef");
  expect_part("\"tensor\": 0", "\"tensor\": 4294967296");
  expect_part("\"offset\": 100", "\"offset\": -1");
  expect_part("\"offset\": 100, ", "");
  expect_part("00000001abcdef01", "00000001abcdef0");
  expect_part("00000001abcdef01", "00000001ABCDEF01");
  expect_part("[[0, 2], [1, 2]]", "[[0, 2]]");
  expect_part("[[0, 2], [1, 2]]", "[[0, 2], [1, -2]]");
  expect_part("[[0, 2], [1, 2]]", "{}");
  expect_part("[[0, 2], [1, 2]]", "[5, 5]");
}

}  // namespace
}  // namespace spolia
