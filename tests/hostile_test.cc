// Checkpoints that are damaged, or made to do harm, through the whole library. Whatever is wrong ends in one
// error that says where and what; nothing is written; what has digests at all has the right ones.
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/text.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/verify.h"
#include "spolia/format/torch/dcp_metadata.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/store/memory_store.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

using namespace spolia::testing;
using namespace std::string_literals;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

/// The files of a folder.
using Files = std::map<std::string, std::string>;

Files files_of(const char* fixture) {
  Files files;
  const fs::path folder = fs::path(SPOLIA_TEST_DATA) / fixture / "checkpoint";
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

/// A store that has the files in /in.
std::shared_ptr<MemoryStore> in_memory(const Files& files) {
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/in");
  for (const auto& [name, bytes] : files) put(*store, fs::path("/in") / name, bytes);
  return store;
}

PlanOptions small_plan() { return {.memory = kLeastMemory, .threads = 1, .largest_tile = 64 << 10}; }

std::vector<std::string> digests_of(const Source& source) {
  return digest_tensors(source, {.plan = small_plan()});
}

void convert(const Source& source, Store& store) {
  ConvertOptions options;
  options.plan = small_plan();
  run_conversion(source, plan_conversion(source, options), store, "/out", {});
}

/// One message, fit for a terminal, that has all of the words.
void expect_message(std::string_view message, const std::vector<std::string>& words) {
  EXPECT_LT(message.size(), 4000u) << message;
  EXPECT_TRUE(is_utf8(message)) << quote(message);
  EXPECT_TRUE(std::ranges::none_of(message, [](unsigned char c) { return c < 0x20; })) << quote(message);
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string_view::npos) << "\"" << word << "\" is not in: " << message;
  }
}

/// Neither digest nor convert nor verify is content with what lies at `path`, /in unless told.
void expect_refused(const std::shared_ptr<MemoryStore>& store, const std::vector<std::string>& words,
                    const fs::path& path = "/in") {
  std::unique_ptr<Source> source;
  try {
    source = open_source(store, path);
  } catch (const Error& error) {
    return expect_message(error.what(), words);
  }
  expect_message(error_of([&] { digests_of(*source); }).what(), words);
  const Verdict verdict = verify(*source, {});
  ASSERT_FALSE(verdict.faults.empty());
  for (const std::string& fault : verdict.faults) expect_message(fault, {});
  error_of([&] { convert(*source, *store); });
  EXPECT_EQ(store->list("/").size(), 1u) << "something was written";
}

void expect_refused(const Files& files, const std::vector<std::string>& words) {
  expect_refused(in_memory(files), words);
}

// --------------------------------------------------------------------------------- truncated

TEST(Hostile, EveryTruncationIsAnErrorThatNamesTheFile) {
  struct Case {
    const char* fixture;
    const char* file;
  };
  for (const Case& c :
       {Case{"torch-2.14/nested-1", ".metadata"}, Case{"torch-2.14/nested-1", "__0_0.distcp"},
        Case{"torch-2.14/zstd-2", "__1_0.distcp"}, Case{"torch-2.14/torch-save-1", "state.pt"},
        Case{"torch-2.14/rank-files-2", "model_world_size_2_rank_1.pt"},
        Case{"torch-2.14/hf-shards-3", "shard-00002-model-00001-of-00001.safetensors"},
        Case{"torch-2.14/hf-consolidated-3", "model.safetensors.index.json"},
        Case{"torch-2.14/hf-consolidated-3", "model-00002-of-00002.safetensors"}}) {
    Files files = files_of(c.fixture);
    const std::string whole = files[c.file];
    for (size_t i = 0; i < 24; ++i) {
      size_t length = i < 4 ? i : i < 8 ? whole.size() - (i - 3) : whole.size() * (i - 7) / 17;
      SCOPED_TRACE(::testing::Message() << c.fixture << "/" << c.file << " cut to " << length);
      files[c.file] = whole.substr(0, length);
      expect_refused(files, {c.file});
    }
  }
}

// ------------------------------------------------------------------------------- safetensors

std::string safetensors_file(std::string_view json, size_t data_bytes) {
  return little(static_cast<uint64_t>(json.size())) + std::string(json) + std::string(data_bytes, 'x');
}

TEST(Hostile, SafetensorsHeaders) {
  const std::string deep(1 << 20, '[');
  const std::string long_name(1 << 20, 'n');
  const std::string zeros(1 << 16, '0');
  const std::pair<std::string, std::string> kCases[] = {
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       "\"b\""},  // overlap
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       "\"b\""},                                                                // gap
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", "\"a\""},  // beyond the end
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[12,0]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[-3],"data_offsets":[0,12]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[-12,0]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,12]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[0,9223372036854775807,4],"data_offsets":[0,0]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,18446744073709551628]}})", "\"a\""},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[0],"data_offsets":[12,12]}})",
       "\"a\""},
      {R"({"a":{"dtype":"F33","shape":[3],"data_offsets":[0,12]}})", "F33"},
      {R"({"a":{"dtype":"F32","shape":)" + deep, "\"a\""},
      {R"({"\u001b[31m":{"dtype":"F32","shape":[9],"data_offsets":[0,12]}})", "\\x1b"},
      {R"({")" + long_name + R"(":{"dtype":"F32","shape":[9],"data_offsets":[0,12]}})", "nnn"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,1)" + zeros + "]}}", "\"a\""},
      {"{\"a\xff\":{}}", "header"},
      {"", "model.safetensors"},
  };
  for (const auto& [json, word] : kCases) {
    SCOPED_TRACE(json.substr(0, 150));
    expect_refused({{"model.safetensors", safetensors_file(json, 12)}}, {"model.safetensors", word});
  }
  expect_refused({{"model.safetensors", little(uint64_t{1} << 63) + "{"}}, {"model.safetensors"});
  expect_refused({{"model.safetensors", little(uint64_t{99'999'999}) + "{"}}, {"model.safetensors"});
}

void replace(std::string& text, std::string_view from, std::string_view to) {
  size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
}

TEST(Hostile, IndicesThatDisagreeWithTheFiles) {
  constexpr const char* kIndex = "model.safetensors.index.json";
  const Files sound = files_of("torch-2.14/hf-consolidated-3");
  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
  struct Case {
    std::string from, to;
    std::vector<std::string> words;
  };
  for (const Case& c : {Case{first, second, {second}},                            // in another file
                        Case{first, "model-00003.safetensors", {"model-00003"}},  // no such file
                        Case{first, "../in/" + first, {"../in/"}}, Case{first, "/in/" + first, {"/in/"}},
                        Case{first, ".", {}}, Case{first, "", {}},
                        Case{"model.layers.0", "model.layers.9", {"model.layers."}},  // no such tensor
                        Case{"model.layers.0", "model.layers.1", {"model.layers.1"}},
                        Case{"\"weight_map\"", "\"weight_mop\"", {kIndex, "weight_map"}}}) {
    SCOPED_TRACE(c.from + " -> " + c.to);
    Files files = sound;
    replace(files[kIndex], c.from, c.to);
    expect_refused(files, c.words);
  }
  Files files = sound;
  files.erase(second);
  expect_refused(files, {second});
}

// --------------------------------------------------------------------------------- metadata

/// A real checkpoint of five ranks whose metadata says something else, and what is said about that.
void expect_metadata_refused(const std::function<void(Catalog& catalog, TensorEntry& tensor)>& change,
                             const std::vector<std::string>& words) {
  Files files = files_of("torch-2.14/uneven-5");
  Catalog catalog = read_dcp_metadata(bytes_of(files[".metadata"]), "/in/.metadata");
  auto tensor = std::ranges::find(catalog.tensors, "w12x2.p0", &TensorEntry::name);
  ASSERT_NE(tensor, catalog.tensors.end());
  change(catalog, *tensor);
  files[".metadata"] = write_dcp_metadata(catalog);
  expect_refused(files, words);
}

/// The tensor's boxes anew, with those that `change` makes of each.
void change_boxes(TensorEntry& tensor, const std::function<void(size_t chunk, Box& box)>& change) {
  BoxList boxes(tensor.shape.size());
  for (size_t c = 0; c < tensor.chunks(); ++c) {
    Box box = tensor.boxes[c];
    change(c, box);
    boxes.add(box);
  }
  tensor.boxes = std::move(boxes);
}

TEST(Hostile, WrittenMetadataOfASoundCheckpointIsSound) {
  Files files = files_of("torch-2.14/uneven-5");
  const auto digests = digests_of(*open_source(in_memory(files), "/in"));
  files[".metadata"] = write_dcp_metadata(read_dcp_metadata(bytes_of(files[".metadata"]), "/in/.metadata"));
  EXPECT_EQ(digests_of(*open_source(in_memory(files), "/in")), digests);
}

TEST(Hostile, ChunksThatDoNotTile) {
  const std::string name = "\"w12x2.p0\"";
  auto without_first = [](Catalog&, TensorEntry& tensor) {
    BoxList boxes(tensor.shape.size());
    for (size_t c = 1; c < tensor.chunks(); ++c) boxes.add(tensor.boxes[c]);
    tensor.boxes = std::move(boxes);
    tensor.extents.erase(tensor.extents.begin());
  };
  expect_metadata_refused(without_first, {name});
  auto doubled = [](Catalog&, TensorEntry& tensor) {
    tensor.boxes.add(tensor.boxes[0]);
    tensor.extents.push_back(tensor.extents[0]);
  };
  expect_metadata_refused(doubled, {name});
  auto moved = [](size_t chunk, Box& box) { box.offsets[0] -= chunk == 1 ? 1 : 0; };
  expect_metadata_refused([&](Catalog&, TensorEntry& t) { change_boxes(t, moved); }, {name});
  auto outside = [](size_t chunk, Box& box) { box.offsets[1] += chunk == 1 ? 1 : 0; };
  expect_metadata_refused([&](Catalog&, TensorEntry& t) { change_boxes(t, outside); }, {name, ".metadata"});
  auto negative = [](size_t chunk, Box& box) { box.offsets[0] = chunk == 0 ? -1 : box.offsets[0]; };
  expect_metadata_refused([&](Catalog&, TensorEntry& t) { change_boxes(t, negative); }, {name, ".metadata"});
  auto huge = [](size_t chunk, Box& box) {
    if (chunk == 1) box.offsets[0] = box.sizes[0] = kMax;
  };
  expect_metadata_refused([&](Catalog&, TensorEntry& t) { change_boxes(t, huge); }, {name, ".metadata"});
}

TEST(Hostile, ShapesThatCannotBe) {
  for (const Dims& shape : {Dims{-12, 2}, Dims{kMax, 2}, Dims{kMax, kMax}, Dims{13, 2}, Dims{11, 2}}) {
    SCOPED_TRACE(list_text(shape));
    expect_metadata_refused([&](Catalog&, TensorEntry& tensor) { tensor.shape = shape; }, {"\"w12x2.p0\""});
  }
  expect_metadata_refused([](Catalog&, TensorEntry& tensor) { tensor.dtype = DType::kFloat64; },
                          {"\"w12x2.p0\"", "float64", ".distcp"});
}

TEST(Hostile, ItemsThatAreNotThere) {
  const std::string name = "\"w12x2.p0\"";
  auto at = [](int64_t offset, int64_t length) {
    return [=](Catalog&, TensorEntry& tensor) {
      tensor.extents[0].offset = offset;
      tensor.extents[0].length = length;
    };
  };
  for (auto [offset, length] : {std::pair<int64_t, int64_t>{-1, 100}, {0, -1}, {kMax, 1}, {1, kMax}}) {
    expect_metadata_refused(at(offset, length), {".metadata", "w12x2.p0"});
  }
  for (auto [offset, length] : {std::pair<int64_t, int64_t>{0, 0}, {1 << 20, 100}, {0, 1 << 20}, {3, 900}}) {
    expect_metadata_refused(at(offset, length), {name, ".distcp"});
  }
  // The items of two tensors, exchanged.
  auto exchanged = [](Catalog& catalog, TensorEntry& tensor) {
    for (TensorEntry& other : catalog.tensors) {
      if (other.name == "vec") std::swap(tensor.extents[0], other.extents[0]);
    }
  };
  expect_metadata_refused(exchanged, {"item holds", ".distcp"});
}

TEST(Hostile, FilesThatAreNotThereOrElsewhere) {
  for (std::string file : {"__9_0.distcp", "../in/__0_0.distcp", "/in/__0_0.distcp", "../../etc/passwd",
                           "/etc/passwd", "x/../../in/__0_0.distcp", "", ".", "/"}) {
    SCOPED_TRACE(file);
    expect_metadata_refused([&](Catalog& catalog, TensorEntry&) { catalog.files[0] = file; }, {file});
  }
  std::string hostile = "\x1b[2J\n" + std::string(4000, 'x');
  expect_metadata_refused([&](Catalog& catalog, TensorEntry&) { catalog.files[0] = hostile; }, {"\\x1b"});
}

TEST(Hostile, NamesThatAreThereTwice) {
  auto twice = [](Catalog& catalog, TensorEntry& tensor) { catalog.tensors.push_back(tensor); };
  expect_metadata_refused(twice, {".metadata", "\"w12x2.p0\""});
  auto value_too = [](Catalog& catalog, TensorEntry& tensor) {
    catalog.values.push_back({.name = tensor.name, .extent = tensor.extents[0], .value = {}, .path = {}});
  };
  expect_metadata_refused(value_too, {".metadata", "\"w12x2.p0\""});
}

TEST(Hostile, LinksOutOfTheFolder) {
  for (const char* fixture : {"torch-2.14/nested-1", "torch-2.14/hf-shards-3", "torch-2.14/rank-files-2"}) {
    for (const auto& [linked, bytes] : files_of(fixture)) {
      SCOPED_TRACE(std::string(fixture) + "/" + linked);
      TempFolder temp;
      fs::create_directory(temp.path() / "in");
      fs::create_directory(temp.path() / "elsewhere");
      for (const auto& [name, content] : files_of(fixture))
        put(*posix_store(), temp.path() / "in" / name, content);
      fs::rename(temp.path() / "in" / linked, temp.path() / "elsewhere" / linked);
      fs::create_symlink("../elsewhere/" + linked, temp.path() / "in" / linked);
      const Error error = error_of([&] { digests_of(*open_source(posix_store(), temp.path() / "in")); });
      expect_message(error.what(), {linked});
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt) << error.what();
    }
  }
}

TEST(Hostile, InterruptedSaves) {
  Files files = files_of("torch-2.14/nested-1");
  const std::string metadata = files[".metadata"];
  files.erase(".metadata");
  expect_refused(files, {"/in", ".metadata", "interrupted"});
  files[".metadata.tmp"] = metadata;
  expect_refused(files, {"/in", ".metadata", "interrupted"});
  files[".metadata"] = "";
  expect_refused(files, {"/in/.metadata", "interrupted"});
  files[".metadata"] = metadata.substr(0, metadata.size() / 2);
  expect_refused(files, {"/in/.metadata", "interrupted"});
  files.erase(".metadata");
  files["__0.metadata"] = metadata;
  files["__2.metadata"] = metadata;
  expect_refused(files, {"rank 1", "missing"});
}

// ---------------------------------------------------------------------------- zips and pickles

/// An archive with this pickle and a storage of 24 floats.
std::string archive_of(const std::string& pickle) {
  return make_zip(
      {{.name = "a/data.pkl", .data = pickle}, {.name = "a/data/0", .data = std::string(96, 'x')}});
}

std::string floats() { return py_storage("FloatStorage", "0", 24); }

TEST(Hostile, Pickles) {
  auto repeated = [](std::string_view text, size_t count) {
    std::string out;
    for (size_t i = 0; i < count; ++i) out += text;
    return out;
  };
  // Each list holds the one before it ten times.
  std::string laughs = "]q\x01";
  for (char i = 1; i < 30; ++i) {
    laughs += "](" + repeated(std::string("h") + i, 10) + "eq" + static_cast<char>(i + 1);
  }
  const std::string rebuild = py_global("torch._utils", "_rebuild_tensor_v2");
  const std::string long_tuple = "(" + repeated("K\1", 100'000) + "tr\7\0\0\0"s;
  const std::pair<std::string, std::string> kCases[] = {
      {"cos\nsystem\n(X\4\0\0\0hal"s, "data.pkl"},  // ends early
      {"\xff.", "opcode"},
      {"", "data.pkl"},
      {"h\xff.", "memo"},
      {"j\xff\xff\xff\xff.", "memo"},
      {"Nr\xff\xff\xff\xffj\xff\xff\xff\xff."s, "memo"},
      {"X\xff\xff\xff\xff.", "data.pkl"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "data.pkl"},
      {"\x8e\0\0\0\0\0\1\0\0."s, "data.pkl"},
      {"\x8b\xff\xff\xff\x7f.", "data.pkl"},
      {"\x80\x02" + repeated("]", 1'000'000) + repeated("a", 999'999) + ".", "levels"},
      {"\x80\x02" + repeated("(", 1'000'000) + repeated("t", 1'000'000) + ".", "levels"},
      {"\x80\x02" + repeated("}K\1", 500'000) + "N" + repeated("s", 500'000) + ".", "levels"},
      {"\x80\x02" + laughs + ".", "larger than the pickle"},
      {"]q\1h\1a.", "levels"},  // a list that holds itself
      {"\x82\1.", "EXT1"},
      {py_pickle(py_tensor(floats(), 0, {25}, {1})), "storage \"0\""},
      {py_pickle(py_tensor(floats(), kMax, {24}, {1})), "overflows"},
      {py_pickle(py_tensor(floats(), 0, {kMax, kMax}, {0, 0})), "overflows"},
      {py_pickle(py_tensor(py_storage("FloatStorage", "1", 24), 0, {24}, {1})), "a/data/1"},
      {py_pickle(py_tensor(py_storage("FloatStorage", "0", 25), 0, {24}, {1})), "100 bytes"},
      {py_pickle(py_call(rebuild, {floats(), py_int(0), long_tuple, "j\7\0\0\0"s, py_bool(false)})), "dims"},
  };
  for (const auto& [pickle, word] : kCases) {
    SCOPED_TRACE(quote(pickle));
    expect_refused({{"state.pt", archive_of(pickle)}}, {"state.pt", word});
  }
}

TEST(Hostile, PicklesAsMetadata) {
  for (std::string pickle : {"N."s, "}."s, "]."s, "cos\nsystem\n(X\4\0\0\0halttR."s, "\xff"s,
                             "\x80\x02" + std::string(1'000'000, ']') + std::string(999'999, 'a') + "."}) {
    SCOPED_TRACE(quote(pickle));
    Files files = files_of("torch-2.14/nested-1");
    files[".metadata"] = pickle;
    expect_refused(files, {"/in/.metadata"});
  }
}

TEST(Hostile, Zips) {
  const std::string pickle = py_pickle(py_tensor(floats(), 0, {24}, {1}));
  const std::string storage(96, 'x');
  auto zip_with = [&](TestRecord changed) {
    std::vector<TestRecord> records{{.name = "a/data.pkl", .data = pickle}};
    records.push_back({.name = "a/data/0", .data = storage});
    std::ranges::replace_if(
        records, [&](const TestRecord& r) { return r.name == changed.name; }, changed);
    return records;
  };
  auto expect_zip_refused = [](std::string zip, const std::vector<std::string>& words) {
    std::vector<std::string> all{"state.pt"};
    all.insert(all.end(), words.begin(), words.end());
    expect_refused({{"state.pt", std::move(zip)}}, all);
  };
  for (bool zip64 : {false, true}) {
    const std::string sound = make_zip(zip_with({.name = "none"}), zip64);
    EXPECT_EQ(digests_of(*open_source(in_memory({{"state.pt", sound}}), "/in")).size(), 1u);
    expect_zip_refused(make_zip(zip_with({.name = "a/data.pkl", .data = pickle, .crc = 1}), zip64), {"CRC"});
    expect_zip_refused(make_zip(zip_with({.name = "a/data/0", .data = storage, .crc = 1}), zip64), {"CRC"});
    expect_zip_refused("x" + sound, {});
    expect_zip_refused(sound.substr(1), {});
    std::vector<TestRecord> twice = zip_with({.name = "none"});
    twice.push_back(twice.back());
    expect_zip_refused(make_zip(twice, zip64), {"twice"});
  }
  // Bombs: streams that are said to become far more than they can, or become more than is said.
  const std::string deflated_nothing = "\x03\x00"s;
  for (int64_t size : {int64_t{96}, int64_t{100'000}, int64_t{0xFFFFFFFE}}) {
    expect_zip_refused(
        make_zip(zip_with({.name = "a/data/0", .data = deflated_nothing, .method = 8, .size = size})), {});
    expect_zip_refused(
        make_zip(zip_with({.name = "a/data.pkl", .data = deflated_nothing, .method = 8, .size = size})), {});
  }
}

// ------------------------------------------------------------------------------ damaged bytes

/// All that a checkpoint says, if it can be read.
struct Contents {
  struct Tensor {
    DType dtype;
    Dims shape;
    std::string places;  // its chunks, with their files
    std::string sha256;
    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> values;
  friend bool operator==(const Contents&, const Contents&) = default;
};

std::optional<Contents> contents_of(const std::shared_ptr<MemoryStore>& store) {
  try {
    const auto source = open_source(store, "/in");
    const Catalog& catalog = source->catalog();
    const auto digests = digests_of(*source);
    Contents contents;
    for (size_t t = 0; t < digests.size(); ++t) {
      const TensorEntry& entry = catalog.tensors[t];
      std::string places;
      for (size_t c = 0; c < entry.chunks(); ++c) {
        const Extent& extent = entry.extents[c];
        places += fmt::format("{} {} {} {}; ", box_text(entry.boxes[c]), catalog.files[extent.file],
                              extent.offset, extent.length);
      }
      contents.tensors[entry.name] = {entry.dtype, entry.shape, places, digests[t]};
    }
    for (size_t v = 0; v < catalog.values.size(); ++v) {
      contents.values[catalog.values[v].name] = source->value(v).text(10'000);
    }
    return contents;
  } catch (const Error& error) {
    expect_message(error.what(), {});
    return std::nullopt;
  }
}

/// Changes every `stride`-th byte of a file in turn and hands what can still be read to `check`. Says how
/// many of the changes were refused.
size_t damage(const char* fixture, const std::string& name, size_t stride,
              const std::function<void(size_t at, const Contents& sound, const Contents& damaged)>& check) {
  const Files files = files_of(fixture);
  const auto store = in_memory(files);
  const auto sound = contents_of(store);
  if (!sound) throw std::logic_error("the fixture cannot be read");
  std::string bytes = files.at(name);
  size_t refused = 0;
  for (size_t at = 0; at < bytes.size(); at += stride) {
    const char was = bytes[at];
    bytes[at] = static_cast<char>(was ^ (at / stride % 3 == 0 ? 0xff : 1 << (at % 8)));
    store->remove_all(fs::path("/in") / name);
    put(*store, fs::path("/in") / name, bytes);
    bytes[at] = was;
    if (auto damaged = contents_of(store)) {
      SCOPED_TRACE(::testing::Message() << fixture << "/" << name << " at " << at);
      check(at, *sound, *damaged);
    } else {
      ++refused;
    }
  }
  return refused;
}

/// For files whose every byte is guarded by a checksum or says nothing.
void expect_same(size_t, const Contents& sound, const Contents& damaged) { EXPECT_EQ(damaged, sound); }

TEST(Hostile, DamagedItemsAreRefusedOrHarmless) {
  EXPECT_GT(damage("torch-2.14/nested-1", "__0_0.distcp", 7, expect_same), 500u);
  EXPECT_GT(damage("torch-2.14/uneven-5", "__1_0.distcp", 31, expect_same), 100u);
  EXPECT_GT(damage("torch-2.14/zstd-2", "__0_0.distcp", 23, expect_same), 100u);
}

TEST(Hostile, DamagedTorchFilesAreRefusedOrHarmless) {
  EXPECT_GT(damage("torch-2.14/torch-save-1", "state.pt", 8191, expect_same), 50u);
  EXPECT_GT(damage("torch-2.14/rank-files-2", "model_world_size_2_rank_0.pt", 1499, expect_same), 30u);
}

/// Nothing guards metadata. But what it says is what is read: a tensor that is said to be where it was has
/// its digest.
void expect_same_where_placed_alike(size_t, const Contents& sound, const Contents& damaged) {
  for (const auto& [name, tensor] : damaged.tensors) {
    auto before = sound.tensors.find(name);
    if (before == sound.tensors.end()) continue;
    if (before->second.places == tensor.places) {
      EXPECT_EQ(tensor.sha256, before->second.sha256) << name;
    }
  }
}

TEST(Hostile, DamagedMetadataIsRefusedOrReadAsItStands) {
  EXPECT_GT(damage("torch-2.14/nested-1", ".metadata", 1, expect_same_where_placed_alike), 800u);
  EXPECT_GT(damage("torch-2.14/uneven-5", ".metadata", 11, expect_same_where_placed_alike), 400u);
}

/// Nothing guards safetensors' data either: a changed byte changes its tensor alone. A changed header gives
/// no tensor other bytes, unless it gives it another shape.
TEST(Hostile, DamagedSafetensorsAreRefusedOrReadAsTheyStand) {
  for (const char* name :
       {"shard-00001-model-00001-of-00001.safetensors", "shard-00003-model-00001-of-00001.safetensors"}) {
    const std::string bytes = files_of("torch-2.14/hf-shards-3")[name];
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    auto check = [&](size_t at, const Contents& sound, const Contents& damaged) {
      int64_t differing = 0;
      for (const auto& [tensor, now] : damaged.tensors) {
        auto before = sound.tensors.find(tensor);
        if (before == sound.tensors.end() || before->second.shape != now.shape) continue;
        differing += before->second.sha256 != now.sha256;
      }
      EXPECT_EQ(differing, at < 8 + header ? 0 : 1);
    };
    EXPECT_GT(damage("torch-2.14/hf-shards-3", name, 1, check), 200u);
  }
}

}  // namespace
}  // namespace spolia
