#include "spolia/format/torch/dcp_target.h"

#include <numeric>
#include <random>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/format/torch/dcp_source.h"
#include "spolia/format/torch/resolved_source.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/format/torch/testing_target.h"
#include "spolia/format/torch/torch_zip_writer.h"
#include "spolia/format/torch/value_pickle.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;
const std::filesystem::path kFolder = "/written";

/// A source of values alone.
std::unique_ptr<Source> source_of(std::vector<ValueEntry> values) {
  Catalog catalog;
  catalog.values = std::move(values);
  return make_resolved_source(std::move(catalog), {}, nullptr);
}

TensorEntry tensor_of(const std::string& name, DType dtype, Dims shape) {
  return whole_tensor(name, dtype, shape, {});
}

/// Bytes that differ from tensor to tensor.
std::vector<std::byte> noise(const TensorEntry& entry) {
  std::mt19937 random(static_cast<uint32_t>(std::hash<std::string>()(entry.name)));
  std::vector<std::byte> bytes(static_cast<size_t>(entry.bytes()));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

struct Written {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::vector<std::string> left_out;
  std::unique_ptr<Source> again;
};

/// Writes a target of noise, and reads it back.
Written write(TargetContents contents, const Source& source) {
  auto target = make_dcp_target(std::move(contents));
  Written written;
  written.left_out = write_target(
      *target, source, [&](size_t t) { return noise(target->catalog().tensors[t]); }, *written.store,
      kFolder);
  written.again = open_dcp(written.store, kFolder);
  return written;
}

void expect_same_tensors(const Catalog& original, const Source& again) {
  const Catalog& catalog = again.catalog();
  ASSERT_EQ(catalog.tensors.size(), original.tensors.size());
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry& a = original.tensors[t];
    const TensorEntry& b = catalog.tensors[t];
    SCOPED_TRACE(a.name.substr(0, 100));
    EXPECT_EQ(b.name, a.name);
    EXPECT_EQ(b.dtype, a.dtype);
    EXPECT_EQ(b.shape, a.shape);
    EXPECT_EQ(b.requires_grad, a.requires_grad);
    EXPECT_EQ(b.path, a.path.empty() ? KeyPath{a.name} : a.path);
    EXPECT_EQ(gather(again, t), noise(a));
  }
}

TEST(DcpTarget, TensorsOfEveryKind) {
  Catalog catalog;
  for (size_t d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (is_sub_byte(dtype) || (dtype >= DType::kUInt1 && dtype <= DType::kQUInt2x4)) continue;
    catalog.tensors.push_back(tensor_of(fmt::format("dtype.{}", name_of(dtype)), dtype, {7, 3}));
  }
  catalog.tensors.push_back(tensor_of("0-d", DType::kFloat32, {}));
  catalog.tensors.push_back(tensor_of("empty", DType::kFloat32, {0, 4}));
  catalog.tensors.push_back(tensor_of("empty.inside", DType::kInt64, {3, 0, 4}));
  catalog.tensors.push_back(tensor_of("one.row", DType::kBool, {1, 1, 1, 1, 1, 5}));
  catalog.tensors.push_back(tensor_of("vector", DType::kFloat64, {1001}));
  catalog.tensors.push_back(tensor_of("parameter", DType::kFloat32, {5, 5}));
  catalog.tensors.back().requires_grad = true;
  sort_entries(catalog);
  for (size_t writers : {1, 2, 5}) {
    for (int64_t pieces : {1, 3}) {
      const Written written = write(contents_of(catalog, writers, pieces), *source_of({}));
      EXPECT_TRUE(written.left_out.empty());
      EXPECT_EQ(written.again->catalog().files.size(), writers);
      expect_same_tensors(catalog, *written.again);
    }
  }
}

TEST(DcpTarget, NamesAndPaths) {
  Catalog catalog;
  auto add = [&](const std::string& name, KeyPath path) {
    catalog.tensors.push_back(tensor_of(name, DType::kInt16, {2}));
    catalog.tensors.back().path = std::move(path);
  };
  add("optimizer.state.0.w.exp_avg", {"optimizer", "state.0.w.exp_avg"});
  add("list.0.3", {"list", int64_t{0}, int64_t{3}});
  add("list.1", {"list", int64_t{1} << 40});
  add("a/b.c//d", {});
  add("..", {});
  add("ключ", {"ключ"});
  add("name with \"quotes\"\n", {});
  add(std::string(4096, 'n'), {});
  add("", {});
  add("size", {"offset", "size"});  // words that stand in the metadata itself
  sort_entries(catalog);
  expect_same_tensors(catalog, *write(contents_of(catalog, 1, 1), *source_of({})).again);
}

TEST(DcpTarget, FilesOfWritersThatHaveSomething) {
  Catalog catalog;
  catalog.tensors.push_back(tensor_of("a", DType::kUInt8, {3}));
  catalog.tensors.push_back(tensor_of("b", DType::kUInt8, {3}));
  auto names = [&](std::vector<uint32_t> writer_of_tensor, bool has_value) {
    TargetContents contents = contents_of(catalog, 5, 1);
    for (size_t t = 0; t < writer_of_tensor.size(); ++t) {
      contents.catalog.tensors[t].extents[0].file = writer_of_tensor[t];
    }
    std::vector<ValueEntry> values;
    if (has_value) {
      values.push_back({"v", std::nullopt, Value(std::string("text")), {}});
      contents.values = {{"v", {}, 0}};
    }
    auto source = source_of(std::move(values));
    const auto target = make_dcp_target(contents);
    const Written written = write(std::move(contents), *source);
    std::vector<std::string> listed;
    for (const FolderEntry& entry : written.store->list(kFolder)) listed.push_back(entry.name);
    EXPECT_EQ(listed.front(), ".metadata");
    listed.erase(listed.begin());
    EXPECT_EQ(target->catalog().files, listed);
    expect_same_tensors(catalog, *written.again);
    if (has_value) {
      EXPECT_EQ(written.again->value(0), Value(std::string("text")));
    }
    return listed;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names({0, 0}, true), (Names{"__0_0.distcp"}));
  EXPECT_EQ(names({4, 1}, false), (Names{"__1_0.distcp", "__4_0.distcp"}));
  EXPECT_EQ(names({4, 1}, true), (Names{"__0_0.distcp", "__1_0.distcp", "__4_0.distcp"}));
  catalog.tensors.clear();
  EXPECT_EQ(names({}, true), (Names{"__0_0.distcp"}));
  EXPECT_EQ(names({}, false), Names());
}

/// Items lie back to back in the order asked for, elements at multiples of 64 of their item.
TEST(DcpTarget, TheLayoutOfAFile) {
  Catalog catalog;
  for (const char* name : {"a", "b", "c"}) catalog.tensors.push_back(tensor_of(name, DType::kInt32, {6, 11}));
  TargetContents contents = contents_of(catalog, 1, 2);
  contents.order = {2, 0, 1};
  const auto target = make_dcp_target(contents);
  EXPECT_TRUE(std::ranges::equal(target->order(), contents.order));
  EXPECT_EQ(target->checksum_block(), BlockChecksums::kWholeChunk);
  const Written written = write(std::move(contents), *source_of({}));
  int64_t end = 0;
  for (size_t t : {2, 0, 1}) {
    for (size_t c : {0, 1}) {
      const Extent item = written.again->catalog().tensors[t].extents[c];
      const Payload payload = written.again->payload(t, c);
      EXPECT_EQ(item.offset, end);
      EXPECT_EQ(payload.offset % 64, 0);
      EXPECT_EQ(target->catalog().tensors[t].extents[c],
                (Extent{0, item.offset + payload.offset, payload.length}));
      end += item.length;
    }
  }
  EXPECT_EQ(written.store->open(kFolder / "__0_0.distcp")->size(), end);
}

TEST(DcpTarget, Checksums) {
  Catalog catalog;
  catalog.tensors.push_back(tensor_of("a", DType::kInt32, {1000}));
  TargetContents contents = contents_of(catalog, 1, 1);
  EXPECT_EQ(write(contents, *source_of({})).again->payload(0, 0).crc32, crc32(0, noise(catalog.tensors[0])));
  contents.checksums = false;
  EXPECT_EQ(make_dcp_target(contents)->checksum_block(), 0);
  const Written written = write(contents, *source_of({}));
  EXPECT_EQ(written.again->payload(0, 0).crc32, std::nullopt);
  expect_same_tensors(catalog, *written.again);
}

TEST(DcpTarget, WhatItRefuses) {
  Catalog catalog;
  catalog.tensors.push_back(tensor_of("six bits", DType::kFloat6E2M3FN, {4}));
  EXPECT_EQ(
      kind_thrown([&] { make_dcp_target(contents_of(catalog, 1, 1)); }, {"\"six bits\"", "float6_e2m3fn"}),
      ErrorKind::kUnsupported);
  catalog.tensors = {tensor_of("a", DType::kInt8, {4})};
  TargetContents contents = contents_of(catalog, 2, 1);
  contents.catalog.tensors[0].extents[0].file = 2;
  EXPECT_EQ(kind_thrown([&] { make_dcp_target(contents); }, {"\"a\"", "2"}), ErrorKind::kInvalidArgument);
  contents.writers = 0;
  EXPECT_EQ(kind_thrown([&] { make_dcp_target(contents); }), ErrorKind::kInvalidArgument);
}

TEST(DcpTarget, ValuesAreWrittenOrNamed) {
  auto tensor = std::make_unique<Record>();
  tensor->type = {"torch", "Tensor"};
  std::vector<ValueEntry> values;
  values.push_back({"a.lr", std::nullopt, Value(0.5), {"a", "lr"}});
  values.push_back({"b", std::nullopt, Value(std::move(tensor)), {}});
  values.push_back({"c", std::nullopt, Value(Tuple{}), {"c", int64_t{3}}});
  const auto source = source_of(std::move(values));
  const Written written = write(contents_of(source->catalog(), 1, 1), *source);
  EXPECT_EQ(written.left_out, std::vector<std::string>{"b"});
  const Catalog& catalog = written.again->catalog();
  ASSERT_EQ(catalog.values.size(), 2U);
  EXPECT_EQ(catalog.values[0].name, "a.lr");
  EXPECT_EQ(catalog.values[0].path, (KeyPath{"a", "lr"}));
  EXPECT_EQ(catalog.values[1].path, (KeyPath{"c", int64_t{3}}));
  EXPECT_EQ(written.again->value(0), Value(0.5));
  EXPECT_EQ(written.again->value(1), Value(Tuple{}));
}

/// A checkpoint of one value, whose item is `item`.
std::unique_ptr<Source> source_of_item(const std::string& item) {
  auto store = std::make_shared<MemoryStore>();
  Catalog catalog;
  catalog.files = {"__0_0.distcp"};
  catalog.values.push_back({"v", Extent{0, 3, std::ssize(item)}, {}, {}});
  put_file(*store, "/.metadata", write_dcp_metadata(catalog));
  put_file(*store, "/__0_0.distcp", "..." + item + "...");
  return open_dcp(store, "/");
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

TEST(DcpTarget, ValuesOfDcpAreKeptByteForByte) {
  // Its tensor could not be written anew.
  const std::string archive = make_archive(
      py_list({py_tensor(py_storage("LongStorage", "0", 2), 0, {2}, {1})}), {{"0", std::string(16, 'x')}});
  for (const std::string& item : {archive, zstd(archive)}) {
    const auto source = source_of_item(item);
    EXPECT_EQ(source->value_archive(0), to_bytes(archive));
    EXPECT_FALSE(can_pickle(source->value(0)));
    const Written written = write(contents_of(source->catalog(), 1, 1), *source);
    EXPECT_TRUE(written.left_out.empty());
    EXPECT_EQ(written.again->value_archive(0), to_bytes(archive));
    EXPECT_EQ(written.again->value(0), source->value(0));
  }
}

TEST(DcpTarget, ValuesThatAreDamagedAreNotCopied) {
  const std::string archive = make_archive(
      py_list({py_tensor(py_storage("LongStorage", "0", 2), 0, {2}, {1})}), {{"0", std::string(16, 'x')}});
  std::string damaged = archive;
  damaged[damaged.find("xxxx")] = 'y';  // in the storage, which value() does not look into
  EXPECT_EQ(kind_thrown([&] { source_of_item(damaged)->value_archive(0); }, {"value \"v\"", "checksum"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([&] { source_of_item(archive.substr(0, 50))->value_archive(0); }, {"value \"v\""}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(source_of_item("no archive")->value_archive(0), std::nullopt);
}

class DcpTargetOfCheckpoint : public ::testing::TestWithParam<const char*> {};

/// All of a checkpoint that PyTorch wrote, written anew for three writers.
TEST_P(DcpTargetOfCheckpoint, IsWhatPyTorchSaidOfTheOriginal) {
  const auto folder = kData / GetParam();
  const bool is_file = folder.filename().string().starts_with("torch-save");
  const auto source =
      open_source(posix_store(), is_file ? folder / "checkpoint/state.pt" : folder / "checkpoint");
  const auto target = make_dcp_target(contents_of(source->catalog(), 3, 2));
  auto store = std::make_shared<MemoryStore>();
  const auto left_out = write_target(
      *target, *source, [&](size_t t) { return gather(*source, t); }, *store, kFolder);
  EXPECT_TRUE(left_out.empty());
  const auto again = open_source(store, kFolder);
  EXPECT_EQ(again->catalog().format, "dcp");
  expect_matches(*again, folder / "expected.json");
  for (size_t v = 0; v < again->catalog().values.size(); ++v) {
    EXPECT_EQ(again->value(v), source->value(v)) << again->catalog().values[v].name;
    EXPECT_EQ(again->catalog().values[v].path, source->catalog().values[v].path);
    if (auto archive = source->value_archive(v)) {
      EXPECT_EQ(again->value_archive(v), archive);
    }
  }
  // The same once more gives the same bytes.
  auto store2 = std::make_shared<MemoryStore>();
  write_target(
      *make_dcp_target(contents_of(source->catalog(), 3, 2)), *source,
      [&](size_t t) { return gather(*source, t); }, *store2, kFolder);
  for (const FolderEntry& entry : store->list(kFolder)) {
    const auto a = store->open(kFolder / entry.name), b = store2->open(kFolder / entry.name);
    std::vector<std::byte> x(static_cast<size_t>(a->size())), y(static_cast<size_t>(b->size()));
    a->read(0, x);
    b->read(0, y);
    EXPECT_EQ(x, y) << entry.name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DcpTargetOfCheckpoint,
                         ::testing::Values("torch-2.14/dtypes-1", "torch-2.14/files-per-item-2",
                                           "torch-2.14/fsdp-tp-2x2", "torch-2.14/fsdp2-3",
                                           "torch-2.14/fsdp2-4", "torch-2.14/fsdp2-4-flat",
                                           "torch-2.14/hsdp-2x2", "torch-2.14/muon-1", "torch-2.14/nested-1",
                                           "torch-2.14/rank-files-2", "torch-2.14/safetensors-1",
                                           "torch-2.14/torch-save-1", "torch-2.14/uneven-3x2",
                                           "torch-2.14/zstd-2", "torch-2.6/dtypes-1", "torch-2.6/nested-1",
                                           "torch-2.6/torch-save-1", "torch-2.6/uneven-5"));

/// Frames of chunks too large to write: the lengths are those that the layout was made with.
TEST(DcpTarget, ChunksOf4GiBAndMore) {
  Catalog catalog;
  for (int64_t gib : {3, 4, 5, 9}) {
    catalog.tensors.push_back(tensor_of(fmt::format("{} GiB", gib), DType::kUInt8, {gib << 30}));
  }
  const auto target = make_dcp_target(contents_of(catalog, 1, 1));
  int64_t end = 0;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const Extent& extent = target->catalog().tensors[t].extents[0];
    const uint32_t crc = 0xFFFFFFFF;
    const Target::Frame frame = target->frame(t, 0, std::span(&crc, 1));
    EXPECT_EQ(extent.offset, end + std::ssize(frame.before));
    end = extent.offset + extent.length + std::ssize(frame.after);
  }
}

}  // namespace
}  // namespace spolia
