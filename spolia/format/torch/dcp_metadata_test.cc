#include "spolia/format/torch/dcp_metadata.h"

#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/format/torch/pickle.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;
using pickle::Writer;

std::string contents(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<fs::path> dcp_fixtures() {
  std::vector<fs::path> found;
  for (const char* version : {"torch-2.14", "torch-2.6"}) {
    for (const auto& entry : fs::directory_iterator(fs::path(SPOLIA_TEST_DATA) / version)) {
      if (fs::exists(entry.path() / "checkpoint" / ".metadata")) found.push_back(entry.path());
    }
  }
  return found;
}

Catalog read_fixture(const fs::path& fixture) {
  fs::path path = fixture / "checkpoint" / ".metadata";
  return read_dcp_metadata(bytes_of(contents(path)), path);
}

TEST(DcpMetadataTest, FixturesHoldWhatPyTorchSays) {
  ASSERT_GE(dcp_fixtures().size(), 16U);
  for (const fs::path& fixture : dcp_fixtures()) {
    SCOPED_TRACE(fixture);
    Catalog catalog = read_fixture(fixture);
    auto expected = nlohmann::json::parse(contents(fixture / "expected.json"));
    ASSERT_EQ(catalog.tensors.size(), expected["tensors"].size());
    for (const TensorEntry& tensor : catalog.tensors) {
      SCOPED_TRACE(tensor.name);
      ASSERT_TRUE(expected["tensors"].contains(tensor.name));
      const auto& truth = expected["tensors"][tensor.name];
      EXPECT_EQ(name_of(tensor.dtype), truth["dtype"].get<std::string>());
      auto shape = truth["shape"].get<std::vector<int64_t>>();
      EXPECT_EQ(tensor.shape, Dims(shape.begin(), shape.end()));
      int64_t covered = 0;
      for (size_t chunk = 0; chunk < tensor.chunks(); ++chunk) covered += tensor.boxes[chunk].numel();
      EXPECT_EQ(covered, numel(tensor.shape));
      EXPECT_EQ(joined(tensor.path), tensor.name);
    }
    ASSERT_EQ(catalog.values.size(), expected["values"].size());
    for (const ValueEntry& value : catalog.values) {
      EXPECT_TRUE(expected["values"].contains(value.name)) << value.name;
      EXPECT_TRUE(value.extent.has_value());
      EXPECT_EQ(joined(value.path), value.name);
    }
    for (const std::string& file : catalog.files) EXPECT_TRUE(fs::exists(catalog.root / file)) << file;
  }
}

TEST(DcpMetadataTest, ItemsOfAFileStandBackToBack) {
  for (const fs::path& fixture : dcp_fixtures()) {
    SCOPED_TRACE(fixture);
    Catalog catalog = read_fixture(fixture);
    std::vector<std::set<std::pair<int64_t, int64_t>>> items(catalog.files.size());
    auto note = [&](const Extent& extent) { items[extent.file].emplace(extent.offset, extent.length); };
    for (const TensorEntry& tensor : catalog.tensors) std::ranges::for_each(tensor.extents, note);
    for (const ValueEntry& value : catalog.values) note(*value.extent);
    for (size_t file = 0; file < items.size(); ++file) {
      int64_t end = 0;
      for (auto [offset, length] : items[file]) {
        EXPECT_EQ(offset, end) << catalog.files[file];
        end = offset + length;
      }
      EXPECT_EQ(std::cmp_equal(fs::file_size(catalog.root / catalog.files[file]), end), true)
          << catalog.files[file];
    }
  }
}

TEST(DcpMetadataTest, PathsComeFromThePlanner) {
  Catalog catalog = read_fixture(fs::path(SPOLIA_TEST_DATA) / "torch-2.14" / "nested-1");
  EXPECT_EQ(catalog.find_tensor("a.dotted.key")->path, (KeyPath{"a", "dotted.key"}));
  EXPECT_EQ(catalog.find_tensor("list.0")->path, (KeyPath{"list", int64_t{0}}));
  EXPECT_EQ(catalog.find_value("list.1.z")->path, (KeyPath{"list", int64_t{1}, "z"}));
}

TEST(DcpMetadataTest, EveryTruncationIsRefused) {
  std::string whole =
      contents(fs::path(SPOLIA_TEST_DATA) / "torch-2.14" / "nested-1" / "checkpoint" / ".metadata");
  for (size_t size = 0; size < whole.size(); ++size) {
    try {
      read_dcp_metadata(bytes_of(whole.substr(0, size)), "/ckpt/.metadata");
      ADD_FAILURE() << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt) << error.what();
      EXPECT_NE(std::string_view(error.what()).find("the save was probably interrupted"),
                std::string_view::npos);
    }
  }
}

RC_GTEST_PROP(DcpMetadataProperty, ChangedBytesAreReadOrRefused, ()) {
  static const std::string whole =
      contents(fs::path(SPOLIA_TEST_DATA) / "torch-2.6" / "nested-1" / "checkpoint" / ".metadata");
  std::string bytes = whole;
  int changes = *rc::gen::inRange(1, 4);
  for (int i = 0; i < changes; ++i)
    bytes[*rc::gen::inRange<size_t>(0, bytes.size())] = *rc::gen::arbitrary<char>();
  try {
    read_dcp_metadata(bytes_of(bytes), "/ckpt/.metadata");
  } catch (const Error&) {
  }
}

// Metadata by hand, with everything that may be wrong.

struct Item {
  std::string name;
  std::optional<int64_t> index = 0;
  std::optional<std::vector<int64_t>> offset = std::vector<int64_t>{0};  // nothing for a value
  std::string file = "__0_0.distcp";
  int64_t start = 0;
  int64_t length = 100;
};

struct Chunk {
  std::vector<int64_t> offsets, sizes;
};

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<Chunk> chunks;
  std::string dtype = "float32";
  std::string layout = "torch.strided";
};

struct Metadata {
  std::vector<Tensor> tensors = {{"w", {4}, {{{0}, {4}}}}};
  std::vector<std::string> values = {};
  std::vector<Item> items = {{"w"}};
  std::string type = "Metadata";
  std::string module = "torch.distributed.checkpoint.metadata";
  std::function<void(Writer&)> more_attributes = [](Writer&) {};

  std::string bytes() const {
    Writer out(Writer::Protocol::k4);
    begin(out, module, type);
    out.string("state_dict_metadata");
    out.empty_dict();
    out.mark();
    for (const Tensor& tensor : tensors) write(out, tensor);
    for (const std::string& value : values) {
      out.string(value);
      object(out, kModule, "BytesStorageMetadata");
    }
    out.set_from_mark();
    out.string("planner_data");
    out.none();
    out.string("storage_data");
    out.empty_dict();
    out.mark();
    for (const Item& item : items) write(out, item);
    out.set_from_mark();
    more_attributes(out);
    end(out);
    return out.finish();
  }

  static constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
  static void object(Writer& out, std::string_view module, std::string_view name) {
    out.global(module, name);
    out.empty_tuple();
    out.new_object();
  }
  static void begin(Writer& out, std::string_view module, std::string_view name) {
    object(out, module, name);
    out.empty_dict();
    out.mark();
  }
  static void end(Writer& out) {
    out.set_from_mark();
    out.build();
  }
  static void size(Writer& out, std::span<const int64_t> numbers) {
    out.global("torch", "Size");
    out.tuple(numbers);
    out.tuple1();
    out.reduce();
  }
  static void write(Writer& out, const Tensor& tensor) {
    out.string(tensor.name);
    begin(out, kModule, "TensorStorageMetadata");
    out.string("properties");
    // As PyTorch 2.0 to 2.2 wrote it.
    object(out, "torch.distributed._shard.sharded_tensor.metadata", "TensorProperties");
    out.mark();
    out.global("torch", tensor.dtype);
    out.global("torch.serialization", "_get_layout");
    out.string(tensor.layout);
    out.tuple1();
    out.reduce();
    out.boolean(true);
    out.global("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING");
    out.integer(1);
    out.tuple1();
    out.reduce();
    out.boolean(false);
    out.tuple_from_mark();
    out.build();
    out.string("size");
    size(out, tensor.shape);
    out.string("chunks");
    out.empty_list();
    out.mark();
    for (const Chunk& chunk : tensor.chunks) {
      begin(out, kModule, "ChunkStorageMetadata");
      out.string("offsets");
      size(out, chunk.offsets);
      out.string("sizes");
      size(out, chunk.sizes);
      end(out);
    }
    out.append_from_mark();
    end(out);
  }
  static void write(Writer& out, const Item& item) {
    begin(out, kModule, "MetadataIndex");
    out.string("fqn");
    out.string(item.name);
    out.string("index");
    item.index ? out.integer(*item.index) : out.none();
    if (item.offset) {
      out.string("offset");
      size(out, *item.offset);
    }
    end(out);
    begin(out, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    out.string("relative_path");
    out.string(item.file);
    out.string("offset");
    out.integer(item.start);
    out.string("length");
    out.integer(item.length);
    end(out);
  }

  Catalog read() const { return read_dcp_metadata(bytes_of(bytes()), "/ckpt/.metadata"); }
};

/// That reading throws an error of the kind whose message names the file and has each of the parts.
void expect_refused(const Metadata& metadata, ErrorKind kind, std::vector<std::string> parts) {
  try {
    metadata.read();
    ADD_FAILURE() << "was read: " << parts[0];
  } catch (const Error& error) {
    EXPECT_EQ(name_of(error.kind()), name_of(kind)) << error.what();
    parts.push_back("\"/ckpt/.metadata\"");
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " in: " << error.what();
    }
  }
}

TEST(DcpMetadataTest, OldPropertiesAreRead) {
  Catalog catalog = Metadata{}.read();
  EXPECT_TRUE(catalog.tensors[0].requires_grad);
  EXPECT_EQ(catalog.tensors[0].memory_format, MemoryFormat::kChannelsLast);
  EXPECT_EQ(catalog.tensors[0].extents[0], (Extent{0, 0, 100}));
  EXPECT_EQ(catalog.format, "dcp");
  EXPECT_EQ(catalog.root, "/ckpt");
  EXPECT_TRUE(catalog.notes.empty());
}

TEST(DcpMetadataTest, DamageIsNamed) {
  constexpr ErrorKind kCorrupt = ErrorKind::kCorrupt, kUnsupported = ErrorKind::kUnsupported;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
  auto tensor = [](std::vector<int64_t> shape, std::vector<Chunk> chunks) {
    return Metadata{.tensors = {{"w", std::move(shape), std::move(chunks)}}};
  };
  auto item = [](Item it) { return Metadata{.items = {std::move(it)}}; };
  expect_refused({.items = {}}, kCorrupt, {"the chunk [0] + [4] of tensor \"w\" has no item"});
  expect_refused({.values = {"v"}}, kCorrupt, {"the value \"v\" has no item"});
  expect_refused({.items = {{"w"}, {"x"}}}, kCorrupt, {"an item for \"x\", which is no tensor"});
  expect_refused({.items = {{"w"}, {.name = "x", .offset = std::nullopt}}}, kCorrupt,
                 {"\"x\", which is no value"});
  expect_refused(item({.name = "w", .offset = std::nullopt}), kCorrupt, {"\"w\", which is no value"});
  expect_refused({.values = {"v"}, .items = {{"w"}, {"v"}}}, kCorrupt, {"\"v\", which is no tensor"});
  expect_refused(item({.name = "w", .offset = {{1}}}), kCorrupt,
                 {"tensor \"w\" at [1], where it has no chunk"});
  expect_refused(item({.name = "w", .offset = {{0, 0}}}), kCorrupt,
                 {"tensor \"w\" at [0, 0], where it has no chunk"});
  expect_refused({.items = {{"w"}, {"w"}}}, kCorrupt, {"two items for the chunk at [0] of tensor \"w\""});
  expect_refused({.items = {{"w"}, {.name = "w", .index = 7}}}, kCorrupt, {"two items for the chunk"});
  expect_refused(
      {.values = {"v"},
       .items = {{"w"}, {.name = "v", .offset = std::nullopt}, {.name = "v", .offset = std::nullopt}}},
      kCorrupt, {"two items for the value \"v\""});
  expect_refused({.tensors = {{"w", {4}, {{{0}, {4}}}}, {"w", {4}, {{{0}, {4}}}}}}, kCorrupt,
                 {"\"w\"", "twice"});
  expect_refused({.values = {"w"}}, kCorrupt, {"\"w\" is both a tensor and a value"});
  expect_refused(item({.name = "w", .start = -1}), kCorrupt, {"\"w\"", "__0_0.distcp", "offset -1"});
  expect_refused(item({.name = "w", .length = -5}), kCorrupt, {"\"w\"", "length of -5"});
  expect_refused(item({.name = "w", .start = kMax, .length = 1}), kCorrupt, {"\"w\"", "cannot be at offset"});
  expect_refused(tensor({4}, {{{1}, {4}}}), kCorrupt,
                 {"tensor \"w\"", "[1] + [4] is not inside of the shape [4]"});
  expect_refused(tensor({4}, {{{-1}, {4}}}), kCorrupt, {"tensor \"w\"", "not inside"});
  expect_refused(tensor({4}, {{{0}, {-4}}}), kCorrupt, {"tensor \"w\"", "not inside"});
  expect_refused(tensor({4}, {{{kMax}, {kMax}}}), kCorrupt, {"tensor \"w\"", "not inside"});
  expect_refused(tensor({4}, {{{0, 0}, {4, 1}}}), kCorrupt, {"tensor \"w\"", "not inside"});
  expect_refused(tensor({4}, {{{0}, {4, 1}}}), kCorrupt, {"tensor \"w\"", "proper offsets and sizes"});
  expect_refused(tensor(std::vector<int64_t>(65, 1), {}), kUnsupported, {"tensor \"w\"", "64 dims"});
  expect_refused(tensor({-4}, {}), kCorrupt, {"tensor \"w\"", "negative"});
  expect_refused(tensor({kMin}, {}), kCorrupt, {"tensor \"w\"", "negative"});
  expect_refused(tensor({kMax, 3}, {}), kCorrupt, {"tensor \"w\"", "overflow"});
  expect_refused(tensor({kMax / 2}, {}), kCorrupt, {"tensor \"w\"", "overflow"});
  expect_refused({.tensors = {{"w", {4}, {{{0}, {4}}}, "float33"}}}, kUnsupported,
                 {"\"w\"", "torch.float33"});
  expect_refused({.tensors = {{"w", {4}, {{{0}, {4}}}, "float32", "torch.sparse_coo"}}}, kUnsupported,
                 {"tensor \"w\"", "torch.sparse_coo"});
}

TEST(DcpMetadataTest, SharedPartsCannotGrowWithoutEnd) {
  constexpr ErrorKind kCorrupt = ErrorKind::kCorrupt;
  // planner_data that gives many names one path of a long key.
  const std::string key(10'000, 'k');
  Metadata metadata;
  metadata.more_attributes = [&](Writer& out) {
    out.string("planner_data");
    out.empty_dict();
    out.mark();
    out.string("w");
    out.string(key);
    out.tuple1();
    auto path = out.put();
    for (int i = 0; i < 1000; ++i) {
      out.string("w");
      out.get(path);
    }
    out.set_from_mark();
  };
  expect_refused(metadata, kCorrupt, {"shared parts"});
  expect_refused({.items = {{std::string(4097, 'n')}}}, kCorrupt, {"MetadataIndex"});
  expect_refused({.items = {{.name = "w", .file = std::string(4097, 'f')}}}, kCorrupt, {"relative_path"});
}

TEST(DcpMetadataTest, WhatIsNoMetadataIsRefused) {
  auto message = [](std::string_view bytes) -> std::string {
    try {
      read_dcp_metadata(bytes_of(bytes), "/ckpt/.metadata");
      return "was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
      return error.what();
    }
  };
  EXPECT_EQ(message(""), "\"/ckpt/.metadata\" is empty; the save was probably interrupted");
  EXPECT_EQ(message("N."), "\"/ckpt/.metadata\": it holds None, which is no checkpoint metadata");
  EXPECT_NE(message(Metadata{}.bytes().substr(0, 300)).find("the save was probably interrupted"),
            std::string::npos);
  EXPECT_NE(message(std::string_view("cm\nC\n)\x81}X\x13\0\0\0state_dict_metadataNsb.", 36)).find("has no"),
            std::string::npos);
}

TEST(DcpMetadataTest, OtherFrameworksAttributesAreNoted) {
  Metadata metadata;
  metadata.module = "megatron.core.dist_checkpointing.strategies.torch";
  metadata.type = "MCoreMetadata";
  metadata.more_attributes = [](Writer& out) {
    out.string("mcore_data");
    out.empty_dict();
    out.string("all_local_plans");
    Metadata::object(out, "torch.distributed.checkpoint.planner", "SavePlan");
  };
  Catalog catalog = metadata.read();
  ASSERT_EQ(catalog.notes.size(), 3U);
  EXPECT_NE(catalog.notes[0].find("MCoreMetadata"), std::string::npos);
  EXPECT_NE(catalog.notes[1].find("mcore_data"), std::string::npos);
}

TEST(DcpMetadataTest, TransformsAreNoted) {
  Catalog catalog = read_fixture(fs::path(SPOLIA_TEST_DATA) / "torch-2.14" / "zstd-2");
  EXPECT_EQ(catalog.notes, std::vector<std::string>{"items are stored with the transform \"stream.zstd/1\""});
}

// Joining chunks and items.

Item at(int64_t offset, std::optional<int64_t> index, int64_t start) {
  return {.name = "w", .index = index, .offset = {{offset}}, .start = start};
}

TEST(DcpMetadataTest, IndicesAreHintsAlone) {
  std::vector<Chunk> chunks = {{{2}, {2}}, {{0}, {2}}, {{4}, {1}}};
  Metadata metadata{.tensors = {{"w", {5}, chunks}}};
  for (auto index : {std::optional<int64_t>(), std::optional<int64_t>(0), std::optional<int64_t>(-7),
                     std::optional<int64_t>(1000)}) {
    metadata.items = {at(0, index, 10), at(2, index, 20), at(4, index, 30)};
    Catalog catalog = metadata.read();
    EXPECT_EQ(catalog.tensors[0].extents, (std::vector<Extent>{{0, 20, 100}, {0, 10, 100}, {0, 30, 100}}));
  }
}

TEST(DcpMetadataTest, EmptyShardsShareAnOffset) {
  // One row over four ranks: three empty shards at its end, of which PyTorch stores one.
  Metadata metadata{.tensors = {{"w", {1}, {{{0}, {1}}, {{1}, {0}}, {{1}, {0}}, {{1}, {0}}}}}};
  metadata.items = {at(0, 0, 10), at(1, 1, 20)};
  EXPECT_EQ(metadata.read().tensors[0].extents, (std::vector<Extent>{{0, 10, 100}, {0, 20, 100}}));
  // All of them stored.
  metadata.items = {at(0, 0, 10), at(1, 3, 20), at(1, 2, 30), at(1, 1, 40)};
  EXPECT_EQ(metadata.read().tensors[0].extents,
            (std::vector<Extent>{{0, 10, 100}, {0, 40, 100}, {0, 30, 100}, {0, 20, 100}}));
}

TEST(DcpMetadataTest, AnEmptyShardAndARealOneShareAnOffset) {
  Metadata metadata{.tensors = {{"w", {4}, {{{0}, {0}}, {{0}, {4}}}}}};
  metadata.items = {at(0, 0, 10), at(0, 1, 20)};
  EXPECT_EQ(metadata.read().tensors[0].extents, (std::vector<Extent>{{0, 10, 100}, {0, 20, 100}}));
  // One item alone is the real one's, whatever its index says.
  for (auto index : {std::optional<int64_t>(0), std::optional<int64_t>(1), std::optional<int64_t>()}) {
    metadata.items = {at(0, index, 30)};
    const TensorEntry tensor = metadata.read().tensors[0];
    ASSERT_EQ(tensor.chunks(), 1U);
    EXPECT_EQ(tensor.boxes[0], (Box{{0}, {4}}));
    EXPECT_EQ(tensor.extents[0], (Extent{0, 30, 100}));
  }
}

TEST(DcpMetadataTest, ReplicasShareAnItem) {
  Metadata metadata{.tensors = {{"w", {4}, {{{0}, {4}}, {{0}, {4}}}}}};
  EXPECT_EQ(metadata.read().tensors[0].chunks(), 1U);
  metadata.tensors[0].chunks = {{{0}, {4}}, {{0}, {3}}};  // not the same box
  expect_refused(metadata, ErrorKind::kCorrupt, {"[0] + [3] of tensor \"w\" has no item"});
}

// The writer's direction.

Catalog without_notes(Catalog catalog) {
  catalog.notes.clear();
  return catalog;
}

void expect_equal(const Catalog& a, const Catalog& b) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorEntry &x = a.tensors[i], &y = b.tensors[i];
    SCOPED_TRACE(x.name);
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.boxes, y.boxes);
    EXPECT_EQ(x.requires_grad, y.requires_grad);
    EXPECT_EQ(x.memory_format, y.memory_format);
    EXPECT_EQ(x.path, y.path);
    ASSERT_EQ(x.extents.size(), y.extents.size());
    for (size_t c = 0; c < x.extents.size(); ++c) {
      EXPECT_EQ(a.files[x.extents[c].file], b.files[y.extents[c].file]);
      EXPECT_EQ(x.extents[c].offset, y.extents[c].offset);
      EXPECT_EQ(x.extents[c].length, y.extents[c].length);
    }
  }
  ASSERT_EQ(a.values.size(), b.values.size());
  for (size_t i = 0; i < a.values.size(); ++i) {
    EXPECT_EQ(a.values[i].name, b.values[i].name);
    EXPECT_EQ(a.values[i].path, b.values[i].path);
    EXPECT_EQ(a.values[i].extent->length, b.values[i].extent->length);
  }
}

TEST(DcpMetadataWriterTest, WhatIsWrittenIsReadBack) {
  for (const fs::path& fixture : dcp_fixtures()) {
    SCOPED_TRACE(fixture);
    Catalog catalog = without_notes(read_fixture(fixture));
    for (auto protocol : {Writer::Protocol::k2, Writer::Protocol::k4}) {
      std::string bytes = write_dcp_metadata(catalog, protocol);
      expect_equal(read_dcp_metadata(bytes_of(bytes), fixture / "checkpoint" / ".metadata"), catalog);
    }
  }
}

// Metadata that each rank wrote for itself.

TEST(DcpMetadataMergeTest, ReplicasAreKeptOnce) {
  Metadata first{.tensors = {{"w", {4}, {{{0}, {2}}}}, {"r", {2}, {{{0}, {2}}}}}, .values = {"v"}};
  first.items = {
      at(0, 0, 10), {.name = "r", .start = 20}, {.name = "v", .offset = std::nullopt, .start = 30}};
  Metadata second = first;
  second.tensors[0].chunks = {{{2}, {2}}};
  second.items = {
      at(2, 0, 40), {.name = "r", .start = 50}, {.name = "v", .offset = std::nullopt, .start = 60}};
  for (Item& item : second.items) item.file = "__1_0.distcp";
  std::vector<fs::path> paths = {"/ckpt/__0.metadata", "/ckpt/__1.metadata"};
  std::vector<Catalog> parts;
  parts.push_back(first.read());
  parts.push_back(second.read());
  Catalog merged = merge_dcp_metadata(std::move(parts), paths);
  EXPECT_EQ(merged.files, (std::vector<std::string>{"__0_0.distcp", "__1_0.distcp"}));
  EXPECT_EQ(merged.find_tensor("w")->extents, (std::vector<Extent>{{0, 10, 100}, {1, 40, 100}}));
  EXPECT_EQ(merged.find_tensor("w")->boxes[1], (Box{{2}, {2}}));
  EXPECT_EQ(merged.find_tensor("r")->extents, (std::vector<Extent>{{0, 20, 100}}));
  EXPECT_EQ(merged.find_value("v")->extent, (Extent{0, 30, 100}));
  EXPECT_EQ(merged.values.size(), 1U);
}

TEST(DcpMetadataMergeTest, DifferencesNameBothFiles) {
  auto merge = [](const Metadata& a, const Metadata& b) -> std::string {
    std::vector<fs::path> paths = {"/ckpt/__0.metadata", "/ckpt/__1.metadata"};
    std::vector<Catalog> parts;
    parts.push_back(a.read());
    parts.push_back(b.read());
    try {
      merge_dcp_metadata(std::move(parts), paths);
      return "was merged";
    } catch (const MismatchError& error) {
      return error.what();
    }
  };
  Metadata one, shape{.tensors = {{"w", {8}, {{{0}, {4}}}}}},
      dtype{.tensors = {{"w", {4}, {{{0}, {4}}}, "float16"}}};
  EXPECT_EQ(merge(one, one), "was merged");
  EXPECT_EQ(merge(one, shape),
            "tensor \"w\" is float32 4 in \"/ckpt/__0.metadata\" but float32 8 in \"/ckpt/__1.metadata\"");
  EXPECT_EQ(merge(one, dtype),
            "tensor \"w\" is float32 4 in \"/ckpt/__0.metadata\" but float16 4 in \"/ckpt/__1.metadata\"");
  Metadata value{.tensors = {}, .values = {"w"}, .items = {{.name = "w", .offset = std::nullopt}}};
  EXPECT_EQ(merge(one, value),
            "\"w\" is a tensor in \"/ckpt/__0.metadata\" but a value in \"/ckpt/__1.metadata\"");
  EXPECT_EQ(merge(value, one),
            "\"w\" is a tensor in \"/ckpt/__1.metadata\" but a value in \"/ckpt/__0.metadata\"");
}

}  // namespace
}  // namespace spolia
