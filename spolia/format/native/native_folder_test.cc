// Spolia's own folder, written by its target and read by its source.
#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/native/box_dealer.h"
#include "spolia/format/native/manifest.h"
#include "spolia/format/native/native_source.h"
#include "spolia/format/native/native_target.h"
#include "spolia/format/native/random_layout.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/format/torch/testing_target.h"
#include "spolia/state/tiling.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;
using testing::kind_thrown;

const fs::path kFolder = "/out";

/// Values of their own, and archives for some.
class ValueSource final : public Source {
 public:
  struct Item {
    Value value;
    std::optional<std::vector<std::byte>> archive;
  };
  explicit ValueSource(std::vector<Item> items) : items_(std::move(items)) {}
  Payload payload(size_t, size_t) const override { throw InvalidArgumentError("there are no tensors"); }
  Value value(size_t index) const override { return items_[index].value; }
  std::optional<std::vector<std::byte>> value_archive(size_t index) const override {
    return items_[index].archive;
  }
  const InputFile& file(uint32_t) const override { throw InvalidArgumentError("there are no files"); }

 private:
  std::vector<Item> items_;
};

std::vector<std::byte> random_bytes(int64_t count, uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((seed = seed * 6364136223846793005u + 1) >> 56);
  return bytes;
}

std::vector<std::byte> bytes_of_tensor(const TensorEntry& tensor) {
  return random_bytes(tensor.bytes(), tensor.name.size() + tensor.shape.size());
}

void add_chunk(TensorEntry& tensor, const Box& box, uint32_t writer) {
  tensor.boxes.add(box);
  tensor.extents.push_back({writer, 0, byte_size(tensor.dtype, box.sizes)});
}

TensorEntry tensor_of(std::string name, DType dtype, Dims shape) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.boxes = BoxList(shape.size());
  tensor.shape = std::move(shape);
  return tensor;
}

/// Gives the tensor the chunks of a layout, as TensorEntry::layout promises.
void share_out(TensorEntry& tensor, const Layout& layout, uint32_t replica) {
  tensor.layout = std::make_shared<const Layout>(layout);
  tensor.replica = replica;
  if (numel(tensor.shape) == 0) return add_chunk(tensor, whole(tensor.shape), 0);
  std::vector<int64_t> ranks(layout.mesh().ranks().begin(), layout.mesh().ranks().end());
  std::ranges::sort(ranks);
  for (int64_t rank : ranks) {
    if (layout.replicas(rank)[replica] != rank) continue;
    for (const LocalBox& box : layout.shard(tensor.shape, rank).boxes) {
      add_chunk(tensor, box.global, static_cast<uint32_t>(rank));
    }
  }
}

/// Whole, or in pieces that go to any of the writers.
void cut_at_random(TensorEntry& tensor, size_t writers) {
  std::vector<Box> boxes{whole(tensor.shape)};
  if (!boxes[0].empty() && !is_sub_byte(tensor.dtype)) boxes = split_row_major(boxes[0], pick(1, 20));
  std::vector<uint32_t> to;
  for (size_t i = 0; i < boxes.size(); ++i)
    to.push_back(static_cast<uint32_t>(pick(0, static_cast<int64_t>(writers))));
  std::ranges::sort(to);  // the order in which they are found again
  for (size_t i = 0; i < boxes.size(); ++i) add_chunk(tensor, boxes[i], to[i]);
}

TargetContents random_contents() {
  TargetContents contents;
  contents.writers = 70;
  contents.checksums = pick(0, 4) > 0;
  for (int64_t i = pick(0, 6); i > 0; --i) {
    const std::vector<std::string> names = {"w",    "a.b",          "w#1",        "w##1",
                                            "\xff", "__metadata__", "tensor 0#1", ""};
    std::string name =
        names[static_cast<size_t>(pick(0, std::ssize(names)))] + std::string(static_cast<size_t>(i / 2), '#');
    if (contents.catalog.find_tensor(name) != nullptr) continue;
    Dims shape = random_shape();
    DType dtype = static_cast<DType>(pick(0, int64_t{kDTypeCount}));
    if (is_sub_byte(dtype)) shape = {8 * pick(0, 3)};
    TensorEntry tensor = tensor_of(name, dtype, shape);
    tensor.requires_grad = pick(0, 2) == 1;
    tensor.memory_format = static_cast<MemoryFormat>(pick(0, 3));
    if (pick(0, 2) == 1) tensor.path = {name, pick(0, 3)};
    if (!is_sub_byte(dtype) && pick(0, 3) > 0) {
      const Layout layout = random_layout(shape);
      const auto replicas = std::ssize(layout.replicas(layout.mesh().ranks()[0]));
      share_out(tensor, layout, static_cast<uint32_t>(pick(0, replicas)));
      if (pick(0, 3) == 0) {  // ranks wrote whatever parts they liked
        tensor.replica.reset();
        tensor.boxes = BoxList(tensor.shape.size());
        tensor.extents.clear();
        cut_at_random(tensor, contents.writers);
      }
    } else {
      cut_at_random(tensor, contents.writers);
    }
    contents.catalog.tensors.push_back(std::move(tensor));
    sort_entries(contents.catalog);
  }
  for (size_t t = 0; t < contents.catalog.tensors.size(); ++t) contents.order.push_back(t);
  std::ranges::reverse(contents.order);
  return contents;
}

std::vector<std::string> write_contents(Store& store, const TargetContents& contents,
                                        const Source& source = ValueSource({})) {
  const auto target = make_spolia_target(contents);
  return testing::write_target(
      *target, source, [&](size_t t) { return bytes_of_tensor(contents.catalog.tensors[t]); }, store,
      kFolder);
}

/// The CRC-32s of a payload's blocks are those of its bytes.
void check_blocks(const Source& source, size_t tensor, size_t chunk, bool checksums) {
  const Payload payload = source.payload(tensor, chunk);
  ASSERT_EQ(payload.has_checksums(), checksums);
  if (!checksums) return;
  int64_t end = 0;
  for (size_t b = 0; b < payload.checksum_blocks(); ++b) {
    const ChecksumBlock block = payload.checksum_block(b);
    ASSERT_EQ(block.offset, end);
    end += block.length;
    std::vector<std::byte> bytes(static_cast<size_t>(block.length));
    source.file(payload.stored.file).read(payload.stored.offset + block.offset, bytes);
    EXPECT_EQ(crc32(0, bytes), block.crc32);
  }
  EXPECT_EQ(end, payload.length);
}

RC_GTEST_PROP(SpoliaFolder, GivesBackEveryByteAndBox, ()) {
  const TargetContents contents = random_contents();
  auto store = std::make_shared<MemoryStore>();
  RC_ASSERT(write_contents(*store, contents).empty());
  const auto source = open_source(store, kFolder);
  const Catalog& catalog = source->catalog();
  RC_ASSERT(catalog.format == "spolia");
  RC_ASSERT(catalog.tensors.size() == contents.catalog.tensors.size());
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry &is = catalog.tensors[t], &was = contents.catalog.tensors[t];
    RC_ASSERT(is.name == was.name);
    RC_ASSERT(is.dtype == was.dtype);
    RC_ASSERT(is.shape == was.shape);
    RC_ASSERT(is.requires_grad == was.requires_grad);
    RC_ASSERT(is.memory_format == was.memory_format);
    RC_ASSERT(is.path == was.path);
    RC_ASSERT(is.replica == was.replica);
    RC_ASSERT((is.layout == nullptr) == (was.layout == nullptr));
    if (is.layout != nullptr) RC_ASSERT(*is.layout == *was.layout);
    RC_ASSERT(is.boxes == was.boxes);
    for (size_t c = 0; c < is.chunks(); ++c) {
      RC_ASSERT(catalog.files[is.extents[c].file] ==
                fmt::format("data-{:05}.safetensors", was.extents[c].file));
      RC_ASSERT(is.extents[c].offset % element_bytes(is.dtype) % 8 == 0);
      check_blocks(*source, t, c, contents.checksums);
    }
    RC_ASSERT(!find_tiling_fault(is));
    RC_ASSERT(testing::gather(*source, t) == bytes_of_tensor(was));
  }
  for (uint32_t f = 0; f < catalog.files.size(); ++f) source->check_file(f);
}

/// Two tensors over four ranks: one shared out, one whole and long, and values of both kinds.
TargetContents example() {
  TargetContents contents;
  contents.writers = 4;
  const Layout layout(DeviceMesh({2, 2}, {"dp", "tp"}), {Replicate{}, Shard{0}});
  contents.catalog.tensors = {tensor_of("long", DType::kFloat64, {(5 << 16) + 3}),
                              tensor_of("w", DType::kFloat32, {5, 3})};
  add_chunk(contents.catalog.tensors[0], whole(contents.catalog.tensors[0].shape), 1);
  share_out(contents.catalog.tensors[1], layout, 1);
  contents.order = {0, 1};
  contents.values = {{"object", {}, 0}, {"step", {"step"}, 1}};
  return contents;
}

Value object_value() {
  auto record = std::make_unique<Record>();
  record->type = {"trainer", "Schedule"};
  record->construction = Record::Construction::kCall;
  record->entries.emplace_back(Value(std::string("lr")), Value(0.5));
  return Value(std::move(record));
}

ValueSource example_source() {
  std::vector<ValueSource::Item> items(2);
  items[0].value = object_value();
  items[1].value = Value(int64_t{7});
  return ValueSource(std::move(items));
}

std::shared_ptr<MemoryStore> example_folder() {
  auto store = std::make_shared<MemoryStore>();
  EXPECT_TRUE(write_contents(*store, example(), example_source()).empty());
  return store;
}

std::string read_text(const Store& store, const std::string& name) {
  const auto file = store.open(kFolder / name);
  std::string text(static_cast<size_t>(file->size()), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void replace_file(Store& store, const std::string& name, std::string_view text) {
  store.remove_all(kFolder / name);
  store.create(kFolder / name)->write(0, bytes_of(text));
}

TEST(SpoliaFolder, HasTheFilesThatTheDocumentNames) {
  const auto store = example_folder();
  std::vector<std::string> names;
  for (const FolderEntry& entry : store->list(kFolder)) names.push_back(entry.name);
  // Of w, ranks 2 and 3 write the shards: they are number 1 of the replicas.
  EXPECT_EQ(names, (std::vector<std::string>{"data-00001.safetensors", "data-00002.safetensors",
                                             "data-00003.safetensors", "part-00001.json", "part-00002.json",
                                             "part-00003.json", "spolia.json", "value-00000.pt"}));
  EXPECT_EQ(read_text(*store, "part-00002.json").find("box"), std::string::npos);
}

TEST(SpoliaFolder, SameContentsSameBytes) {
  const auto a = example_folder(), b = example_folder();
  for (const FolderEntry& entry : a->list(kFolder)) {
    EXPECT_EQ(read_text(*a, entry.name), read_text(*b, entry.name)) << entry.name;
  }
}

TEST(SpoliaFolder, IsOpenedByItsManifestToo) {
  const auto store = example_folder();
  EXPECT_EQ(open_source(store, kFolder / "spolia.json")->catalog().format, "spolia");
}

TEST(SpoliaFolder, WithoutAManifestIsAnInterruptedSave) {
  const auto store = example_folder();
  store->remove_all(kFolder / "spolia.json");
  EXPECT_EQ(kind_thrown([&] { open_source(store, kFolder); }, {"/out", "interrupted"}), ErrorKind::kCorrupt);
}

TEST(SpoliaFolder, KeepsValuesInTheManifestOrAsArchives) {
  const auto store = example_folder();
  const auto source = open_source(store, kFolder);
  ASSERT_EQ(source->catalog().values.size(), 2u);
  EXPECT_EQ(source->value(0), object_value());
  EXPECT_EQ(source->value(1), Value(int64_t{7}));
  EXPECT_EQ(source->catalog().values[1].path, (KeyPath{"step"}));
  ASSERT_TRUE(source->value_archive(0).has_value());
  EXPECT_EQ(testing::to_bytes(read_text(*store, "value-00000.pt")), *source->value_archive(0));
  EXPECT_FALSE(source->value_archive(1).has_value());
}

TEST(SpoliaFolder, WritesTheArchiveOfAValueVerbatim) {
  std::vector<ValueSource::Item> items(2);
  items[0].value = object_value();
  items[0].archive = testing::to_bytes("whatever it was");
  auto store = std::make_shared<MemoryStore>();
  EXPECT_TRUE(write_contents(*store, example(), ValueSource(std::move(items))).empty());
  const auto source = open_source(store, kFolder);
  EXPECT_EQ(source->value_archive(0), testing::to_bytes("whatever it was"));
}

TEST(SpoliaFolder, NamesTheValuesItLeavesOut) {
  std::vector<ValueSource::Item> items(2);
  items[0].value = Value(std::make_unique<Record>());  // how it was made is not known
  auto store = std::make_shared<MemoryStore>();
  EXPECT_EQ(write_contents(*store, example(), ValueSource(std::move(items))),
            std::vector<std::string>{"object"});
  EXPECT_EQ(open_source(store, kFolder)->catalog().values.size(), 1u);
}

TEST(SpoliaFolder, ADamagedArchiveIsFoundByItsHash) {
  const auto store = example_folder();
  std::string archive = read_text(*store, "value-00000.pt");
  archive[archive.size() / 2] ^= 1;
  replace_file(*store, "value-00000.pt", archive);
  const auto source = open_source(store, kFolder);
  EXPECT_EQ(kind_thrown([&] { source->value(0); }, {"object", "value-00000.pt", "SHA-256"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { source->value_archive(0); }), ErrorKind::kCorrupt);
}

TEST(SpoliaFolder, OtherToolsFindTheChunksInItsDataFiles) {
  TargetContents contents;
  contents.writers = 1;
  std::vector<TensorEntry>& tensors = contents.catalog.tensors;
  tensors = {tensor_of("__metadata__", DType::kInt8, {2}), tensor_of("c128", DType::kComplex128, {2, 3}),
             tensor_of("f4", DType::kFloat4E2M1FNx2, {}),  tensor_of("f4.pairs", DType::kFloat4E2M1FNx2, {3}),
             tensor_of("odd", DType::kUInt3, {4}),         tensor_of("w", DType::kFloat32, {4}),
             tensor_of("w#1", DType::kInt16, {1}),         tensor_of("\xff", DType::kBool, {1})};
  for (TensorEntry& tensor : tensors) {
    if (tensor.name == "w") {
      for (const Box& box : split(whole(tensor.shape), 0, 2)) add_chunk(tensor, box, 0);
    } else {
      add_chunk(tensor, whole(tensor.shape), 0);
    }
  }
  for (size_t t = 0; t < tensors.size(); ++t) contents.order.push_back(t);
  auto store = std::make_shared<MemoryStore>();
  write_contents(*store, contents);
  const SafetensorsHeader header = read_safetensors_header(*store->open(kFolder / "data-00000.safetensors"));
  std::vector<std::string> found;
  for (const SafetensorsTensor& tensor : header.tensors) {
    found.push_back(fmt::format("{} {} {}", tensor.name, name_of(tensor.dtype), list_text(tensor.shape)));
  }
  EXPECT_EQ(found, (std::vector<std::string>{"c128 uint8 [2, 3, 16]", "w##1 float32 [2]", "w#2 float32 [2]",
                                             "w#1 int16 [1]", "tensor 0#1 int8 [2]", "f4 uint8 []",
                                             "f4.pairs float4_e2m1fn_x2 [3]", "odd uint8 [4]",
                                             "tensor 7#1 bool [1]"}));
}

TEST(SpoliaFolder, RefusesContentsThatAreNotAsPromised) {
  auto expect = [](const std::function<void(TargetContents&)>& change, ErrorKind kind, const char* word) {
    TargetContents contents = example();
    change(contents);
    EXPECT_EQ(kind_thrown([&] { make_spolia_target(contents); }, {word}), kind) << word;
  };
  auto w = [](TargetContents& contents) -> TensorEntry& { return contents.catalog.tensors[1]; };
  expect([](TargetContents& c) { c.writers = 3; }, ErrorKind::kInvalidArgument, "writer 3");
  expect([&](TargetContents& c) { w(c).replica = 0; }, ErrorKind::kInvalidArgument, "\"w\"");
  expect([&](TargetContents& c) { w(c).extents[0].file = 3; }, ErrorKind::kInvalidArgument, "layout");
  expect(
      [&](TargetContents& c) {
        w(c).boxes = BoxList(2);
        w(c).boxes.add(Box{{0, 0}, {2, 3}});
        w(c).boxes.add(Box{{2, 0}, {3, 3}});
      },
      ErrorKind::kInvalidArgument, "layout");
  expect(
      [&](TargetContents& c) {
        w(c).layout = std::make_shared<const Layout>(DeviceMesh({4}), std::vector<Placement>{Partial{}});
      },
      ErrorKind::kUnsupported, "reduce");
  expect(
      [&](TargetContents& c) {
        TensorEntry& tensor = c.catalog.tensors[0] = tensor_of("long", DType::kFloat6E2M3FN, {8});
        add_chunk(tensor, Box{{0}, {4}}, 0);
        add_chunk(tensor, Box{{4}, {4}}, 0);
      },
      ErrorKind::kUnsupported, "finer than a byte");
}

/// The example with the second half of w written by three writers.
TargetContents example_with_copies() {
  TargetContents contents = example();
  TensorEntry& w = contents.catalog.tensors[1];
  w.replica.reset();
  w.boxes = BoxList(2);
  w.extents.clear();
  const std::vector<Box> halves = split(whole(w.shape), 0, 3);
  add_chunk(w, halves[1], 0);
  add_chunk(w, halves[0], 1);
  add_chunk(w, halves[1], 2);
  add_chunk(w, halves[1], 3);
  return contents;
}

TEST(SpoliaFolder, OfCopiesTheFirstOneCounts) {
  const TargetContents contents = example_with_copies();
  auto store = std::make_shared<MemoryStore>();
  write_contents(*store, contents, example_source());
  // The other copies' bytes do not matter.
  for (const char* name : {"data-00002.safetensors", "data-00003.safetensors"}) {
    std::string data = read_text(*store, name);
    data.back() ^= 1;
    replace_file(*store, name, data);
  }
  const auto source = open_source(store, kFolder);
  const TensorEntry& w = source->catalog().tensors[1];
  ASSERT_EQ(w.chunks(), 2u);
  EXPECT_EQ(find_tiling_fault(w), std::nullopt);
  EXPECT_EQ(testing::gather(*source, 1), bytes_of_tensor(w));
  ASSERT_NE(w.layout, nullptr);
  EXPECT_EQ(w.replica, std::nullopt);
  for (uint32_t f = 0; f < 4; ++f) source->check_file(f);
}

TEST(SpoliaFolder, CopiesInOnePartAreAFault) {
  TargetContents contents = example_with_copies();
  contents.catalog.tensors[1].extents[3].file = 2;
  auto store = std::make_shared<MemoryStore>();
  write_contents(*store, contents, example_source());
  const auto source = open_source(store, kFolder);
  EXPECT_NE(find_tiling_fault(source->catalog().tensors[1]), std::nullopt);
}

// Damage and hostility.

/// The example with its manifest, or one of its parts, changed; all hashes are right.
struct Change {
  std::function<void(Manifest&)> manifest = [](Manifest&) {};
  std::function<void(PartFile&)> part = [](PartFile&) {};
  std::string part_name = "part-00001.json";
};

std::shared_ptr<MemoryStore> changed_folder(const Change& change) {
  auto store = example_folder();
  Manifest manifest = read_manifest(read_text(*store, "spolia.json"), "f");
  PartFile part = read_part(read_text(*store, change.part_name), "f");
  change.part(part);
  const std::string text = write_part(part);
  replace_file(*store, change.part_name, text);
  for (Manifest::Part& listed : manifest.parts) {
    if (listed.file.name == change.part_name)
      listed.file = {change.part_name, std::ssize(text), testing::sha256(bytes_of(text))};
  }
  change.manifest(manifest);
  replace_file(*store, "spolia.json", write_manifest(manifest));
  return store;
}

std::optional<ErrorKind> kind_when_opened(const Change& change, const std::vector<std::string>& words) {
  const auto store = changed_folder(change);
  return kind_thrown([&] { open_source(store, kFolder); }, words);
}

TEST(SpoliaFolder, ADamagedPartIsFoundByItsHash) {
  for (const char* name : {"part-00001.json", "part-00003.json"}) {
    const auto store = example_folder();
    std::string text = read_text(*store, name);
    text[text.find("offset") + 10] ^= 1;
    replace_file(*store, name, text);
    EXPECT_EQ(kind_thrown([&] { open_source(store, kFolder); }, {name, "SHA-256"}), ErrorKind::kCorrupt);
    replace_file(*store, name, text + " ");
    EXPECT_EQ(kind_thrown([&] { open_source(store, kFolder); }, {name, "bytes"}), ErrorKind::kCorrupt);
    store->remove_all(kFolder / name);
    EXPECT_EQ(kind_thrown([&] { open_source(store, kFolder); }, {name}), ErrorKind::kNotFound);
  }
}

TEST(SpoliaFolder, RefusesPartsThatContradictTheManifest) {
  auto expect_part = [](const std::function<void(PartFile&)>& change, const std::vector<std::string>& words,
                        const std::string& name = "part-00001.json") {
    std::vector<std::string> all = words;
    all.push_back(name);
    EXPECT_EQ(kind_when_opened({.part = change, .part_name = name}, all), ErrorKind::kCorrupt) << words[0];
  };
  expect_part([](PartFile& p) { p.chunks[0].tensor = 2; }, {"tensor 2, but there are 2"});
  expect_part([](PartFile& p) { p.chunks[0].tensor = 1; }, {"\"w\"", "another number of boxes"});
  expect_part([](PartFile& p) { p.chunks[0].offset += 8; }, {"\"long\"", "offset"});
  expect_part([](PartFile& p) { p.header_bytes -= 8; }, {"offset"});
  expect_part([](PartFile& p) { p.bytes += 1; }, {"data-00001.safetensors", "end at byte"});
  expect_part([](PartFile& p) { p.chunks[0].crcs.pop_back(); }, {"checksums"});
  expect_part([](PartFile& p) { p.chunks[0].crcs.push_back(0); }, {"checksums"});
  expect_part([](PartFile& p) { p.chunks[0].box = Box{{1}, {(5 << 16) + 3}}; }, {"leaves the shape"});
  expect_part([](PartFile& p) { p.chunks[0].box = Box{{0, 0}, {1, 1}}; }, {"leaves the shape"});
  expect_part([](PartFile& p) { p.chunks[0].box = Box{{0}, {INT64_MAX}}; }, {"leaves the shape"});
  expect_part([](PartFile& p) { p.data_file = "data-00002.safetensors"; }, {"another part's"},
              "part-00003.json");
  expect_part(
      [](PartFile& p) {
        p.chunks[0].box = Box{{0, 0}, {3, 3}};
      },
      {"follows from its tensor's layout"}, "part-00002.json");
  expect_part([](PartFile& p) { p.chunks.push_back(p.chunks[0]); }, {"\"w\""}, "part-00002.json");
}

TEST(SpoliaFolder, RefusesManifestsThatContradictTheParts) {
  auto expect = [](const std::function<void(Manifest&)>& change, const std::vector<std::string>& words,
                   ErrorKind kind = ErrorKind::kCorrupt) {
    EXPECT_EQ(kind_when_opened({.manifest = change}, words), kind) << words[0];
  };
  expect([](Manifest& m) { m.tensors[0].chunks = 2; }, {"\"long\"", "should have 2 chunks", "spolia.json"});
  expect([](Manifest& m) { m.tensors[1].chunks = 1; }, {"\"w\"", "should have 1 chunks"});
  expect([](Manifest& m) { m.parts.pop_back(); }, {"\"w\"", "should have 2 chunks"});
  expect([](Manifest& m) { m.parts[2].writer = 9; }, {"part-00003.json", "\"w\"", "layout"});
  expect([](Manifest& m) { m.tensors[1].replica = 0; }, {"\"w\"", "layout"});
  expect([](Manifest& m) { m.tensors[1].layout.reset(); }, {"part-00002.json", "end at byte"});
  expect([](Manifest& m) { m.tensors[0].layout = m.tensors[0].replica = 0; },
         {"part-00001.json", "\"long\""});
  expect([](Manifest& m) { m.tensors[1].shape = {5, 4}; }, {"part-00002.json", "end at byte"});
  expect([](Manifest& m) { m.block_bytes = 0; }, {"checksums"});
  expect([](Manifest& m) { m.block_bytes = 1 << 19; }, {"checksums"});
  expect([](Manifest& m) { m.layouts[0] = "[shard(7)] over 4"; }, {"\"w\"", "layout"});
  expect([](Manifest& m) { m.layouts[0] = "rubbish"; }, {"spolia.json", "rubbish"});
  expect([](Manifest& m) { m.layouts[0] = "[partial(sum)] over 4"; }, {"spolia.json", "partial(sum)"},
         ErrorKind::kUnsupported);
  expect([](Manifest& m) { m.layouts.assign(100, "[replicate] over 1048576"); }, {"too many ranks"},
         ErrorKind::kUnsupported);
  expect([](Manifest& m) { m.values[1].name = "w"; }, {"\"w\" is both"});
}

TEST(SpoliaFolder, APartThatIsMissingIsAGapWhereNobodyCounted) {
  auto change = [](Manifest& manifest) {
    for (Manifest::Tensor& tensor : manifest.tensors) tensor.chunks.reset();
    manifest.parts.pop_back();
  };
  const auto source = open_source(changed_folder({.manifest = change}), kFolder);
  EXPECT_EQ(find_tiling_fault(source->catalog().tensors[0]), std::nullopt);
  EXPECT_NE(find_tiling_fault(source->catalog().tensors[1]), std::nullopt);
}

TEST(SpoliaFolder, ADataFileOfAnotherSizeIsRefusedWhenItIsRead) {
  const auto store = example_folder();
  const std::string data = read_text(*store, "data-00001.safetensors");
  for (const std::string& other : {data + "x", data.substr(0, data.size() - 1), std::string()}) {
    replace_file(*store, "data-00001.safetensors", other);
    const auto source = open_source(store, kFolder);
    EXPECT_EQ(kind_thrown([&] { source->payload(0, 0); }, {"data-00001.safetensors", "its part says"}),
              ErrorKind::kCorrupt);
    EXPECT_EQ(kind_thrown([&] { source->payload(1, 0); }), std::nullopt);
  }
  store->remove_all(kFolder / "data-00001.safetensors");
  const auto source = open_source(store, kFolder);
  EXPECT_EQ(kind_thrown([&] { source->payload(0, 0); }, {"data-00001.safetensors"}), ErrorKind::kNotFound);
}

TEST(SpoliaFolder, EveryFlippedBitOfAHeaderIsFound) {
  const auto store = example_folder();
  const std::string data = read_text(*store, "data-00002.safetensors");
  const size_t header = data.size() - 9 * 4;
  for (size_t i = 0; i < header; ++i) {
    std::string damaged = data;
    damaged[i] ^= static_cast<char>(1 << (i % 8));
    replace_file(*store, "data-00002.safetensors", damaged);
    const auto source = open_source(store, kFolder);
    EXPECT_EQ(kind_thrown([&] { source->check_file(1); }, {"data-00002.safetensors"}), ErrorKind::kCorrupt)
        << i;
  }
}

TEST(SpoliaFolder, AHeaderOfAnotherWriterIsComparedByWhatItSays) {
  auto without_crc = [](PartFile& part) { part.header_crc.reset(); };
  const auto store = changed_folder({.part = without_crc, .part_name = "part-00002.json"});
  const std::string data = read_text(*store, "data-00002.safetensors");
  auto with = [&](std::string_view from, std::string_view to) {
    std::string changed = data;
    replace_file(*store, "data-00002.safetensors", changed.replace(changed.find(from), from.size(), to));
    return open_source(store, kFolder);
  };
  EXPECT_EQ(kind_thrown([&] { with("\"pt\"", "\"xy\"")->check_file(1); }), std::nullopt);
  EXPECT_EQ(kind_thrown([&] { with("\"w\"", "\"v\"")->check_file(1); }, {"\"v\"", "\"w\""}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_thrown([&] { with("F32", "I32")->check_file(1); }, {"int32"}), ErrorKind::kMismatch);
  EXPECT_EQ(kind_thrown([&] { with("[3,3]", "[9,1]")->check_file(1); }, {"[9, 1]"}), ErrorKind::kMismatch);
}

// What others wrote, taken over.

TEST(SpoliaFolder, TakesOverEveryTensorAndValueOfRealCheckpoints) {
  const auto disk = posix_store();
  size_t values = 0;
  for (const char* version : {"torch-2.6", "torch-2.14"}) {
    for (const FolderEntry& entry : disk->list(fs::path(SPOLIA_TEST_DATA) / version)) {
      const fs::path folder = fs::path(SPOLIA_TEST_DATA) / version / entry.name / "checkpoint";
      SCOPED_TRACE(folder);
      const auto source = open_source(disk, folder);
      TargetContents contents = testing::contents_of(source->catalog(), 3, 2);
      for (size_t t = 0; t < contents.order.size(); ++t) {
        TensorEntry& tensor = contents.catalog.tensors[t];
        if (!is_sub_byte(tensor.dtype)) continue;
        tensor = whole_tensor(tensor.name, tensor.dtype, tensor.shape, {0, 0, tensor.bytes()});
      }
      auto store = std::make_shared<MemoryStore>();
      const auto left_out = testing::write_target(
          *make_spolia_target(contents), *source, [&](size_t t) { return testing::gather(*source, t); },
          *store, kFolder);
      EXPECT_TRUE(left_out.empty()) << left_out.front();
      const auto again = open_source(store, kFolder);
      testing::expect_matches(*again, folder.parent_path() / "expected.json");
      ASSERT_EQ(again->catalog().values.size(), source->catalog().values.size());
      for (size_t v = 0; v < source->catalog().values.size(); ++v) {
        EXPECT_EQ(again->value(v), source->value(v)) << source->catalog().values[v].name;
        EXPECT_EQ(again->catalog().values[v].path, source->catalog().values[v].path);
        ++values;
        const auto archive = again->value_archive(v), was = source->value_archive(v);
        if (archive && was) {
          EXPECT_EQ(*archive, *was);
        }
      }
    }
  }
  EXPECT_GT(values, 20u);
}

}  // namespace
}  // namespace spolia
