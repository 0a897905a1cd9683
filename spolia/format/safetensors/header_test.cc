#include "spolia/format/safetensors/header.h"

#include <cstring>
#include <functional>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

/// The header of a file with this JSON and so many bytes of data.
SafetensorsHeader parse(std::string_view json, int64_t data_bytes) {
  return parse_safetensors_header(json, 8 + static_cast<int64_t>(json.size()) + data_bytes, "f.safetensors");
}

/// What `action` throws, as "kind: message"; empty where it throws nothing.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return fmt::format("{}: {}", name_of(error.kind()), error.what());
  }
  return "";
}

void expect_error(const std::function<void()>& action, std::string_view kind,
                  std::initializer_list<std::string_view> parts) {
  std::string error = error_of(action);
  EXPECT_TRUE(error.starts_with(kind)) << error;
  for (std::string_view part : parts)
    EXPECT_NE(error.find(part), std::string::npos) << part << "\n in " << error;
}

void expect_bad_header(std::string_view json, int64_t data_bytes, std::string_view reason) {
  SCOPED_TRACE(std::string(json.substr(0, 200)));
  expect_error([&] { parse(json, data_bytes); }, "corrupt", {"\"f.safetensors\"", reason});
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirBytes) {
  auto header = parse(R"({"b":{"data_offsets":[4,28],"shape":[2,3],"dtype":"F32"},
                          "__metadata__":{"format":"pt","":"\u0001"},
                          "empty":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]},
                          "a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},
                          "scalar":{"dtype":"BOOL","shape":[],"data_offsets":[28,29]}}   )",
                      29);
  ASSERT_EQ(header.tensors.size(), 4u);
  int64_t data = header.tensors[0].offset;
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].name, "empty");
  EXPECT_EQ(header.tensors[1].shape, (Dims{3, 0}));
  EXPECT_EQ(header.tensors[1].length, 0);
  EXPECT_EQ(header.tensors[2].name, "b");
  EXPECT_EQ(header.tensors[2].dtype, DType::kFloat32);
  EXPECT_EQ(header.tensors[2].offset, data + 4);
  EXPECT_EQ(header.tensors[2].length, 24);
  EXPECT_EQ(header.tensors[3].shape, Dims{});
  EXPECT_EQ(header.metadata, (SafetensorsMetadata{{"format", "pt"}, {"", "\x01"}}));
}

TEST(SafetensorsHeader, ReadsAnEmptyFile) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse(R"({"__metadata__":{}})", 0).tensors.empty());
}

TEST(SafetensorsHeader, PairsUpFloat4) {
  auto one = [](std::string_view shape, int64_t bytes) {
    auto json = fmt::format(R"({{"x":{{"dtype":"F4","shape":{},"data_offsets":[0,{}]}}}})", shape, bytes);
    return parse(json, bytes).tensors[0];
  };
  EXPECT_EQ(one("[3,8]", 12).dtype, DType::kFloat4E2M1FNx2);
  EXPECT_EQ(one("[3,8]", 12).shape, (Dims{3, 4}));
  EXPECT_EQ(one("[4,0]", 0).shape, (Dims{4, 0}));
  EXPECT_EQ(one("[4,3]", 6).dtype, DType::kFloat4E2M1FN);
  EXPECT_EQ(one("[4,3]", 6).shape, (Dims{4, 3}));
  EXPECT_NE(error_of([&] { one("[3,3]", 5); }).find("does not fill whole bytes"), std::string::npos);
  EXPECT_NE(error_of([&] { one("[]", 1); }).find("does not fill whole bytes"), std::string::npos);
}

TEST(SafetensorsHeader, KnowsEveryDType) {
  for (std::string_view name :
       {"BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
        "I16",  "U16", "F16", "BF16",    "I32",     "U32",     "F32",         "C64",
        "F64",  "I64", "U64", "F4",      "F6_E2M3", "F6_E3M2"}) {
    auto json = fmt::format(R"({{"x":{{"dtype":"{}","shape":[0],"data_offsets":[0,0]}}}})", name);
    EXPECT_EQ(info(parse(json, 0).tensors[0].dtype).safetensors, name);
  }
  auto json = R"({"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})";
  EXPECT_EQ(parse(json, 3).tensors[0].length, 3);
}

TEST(SafetensorsHeader, RefusesUnknownDTypes) {
  for (std::string_view name : {"F33", "", "f32", "BF16 ", "complex128"}) {
    auto json = fmt::format(R"({{"x":{{"dtype":"{}","shape":[0],"data_offsets":[0,0]}}}})", name);
    expect_error([&] { parse(json, 0); }, "unsupported", {"f.safetensors", "\"x\"", quote(name)});
  }
}

TEST(SafetensorsHeader, RefusesBrokenJson) {
  expect_bad_header("", 0, "byte 0");
  expect_bad_header("[]", 0, "byte 0");
  expect_bad_header(" {}", 0, "byte 0");
  expect_bad_header("\xEF\xBB\xBF{}", 0, "byte 0");
  expect_bad_header("{", 0, "UTF-8 or JSON");
  expect_bad_header("{}x", 0, "UTF-8 or JSON");
  expect_bad_header("{},{}", 0, "UTF-8 or JSON");
  expect_bad_header(std::string_view("{}\0", 3), 0, "byte 2");
  expect_bad_header(R"({"a":NaN})", 0, "UTF-8 or JSON");
  expect_bad_header("{\"\xff\":{}}", 0, "UTF-8 or JSON");
  expect_bad_header("{\"\xed\xa0\x80\":{}}", 0, "UTF-8 or JSON");
  expect_bad_header(R"({"\ud800":{}})", 0, "UTF-8 or JSON");
  expect_bad_header("{\"a\nb\":{}}", 0, "UTF-8 or JSON");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}})", 4, "UTF-8 or JSON");
}

TEST(SafetensorsHeader, RefusesOtherStructures) {
  expect_bad_header(R"({"a":1})", 0, "\"a\": a number");
  expect_bad_header(R"({"a":null})", 0, "\"a\": null");
  expect_bad_header(R"({"a":true})", 0, "\"a\": true or false");
  expect_bad_header(R"({"a":"x"})", 0, "\"a\": a string");
  expect_bad_header(R"({"a":[]})", 0, "\"a\": an array");
  expect_bad_header(R"({"a":{}})", 0, "missing");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "missing");
  expect_bad_header(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "missing");
  expect_bad_header(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "missing");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0}})", 4, "\"x\" is unknown");
  expect_bad_header(R"({"a":{"dtype":4}})", 4, "a number");
  expect_bad_header(R"({"a":{"dtype":["F32"]}})", 4, "an array");
  expect_bad_header(R"({"a":{"dtype":{}}})", 4, "an object");
  expect_bad_header(R"({"a":{"shape":1}})", 4, "a number");
  expect_bad_header(R"({"a":{"shape":"1"}})", 4, "a string");
  expect_bad_header(R"({"a":{"shape":["1"]}})", 4, "a string");
  expect_bad_header(R"({"a":{"shape":[[1]]}})", 4, "an array");
  expect_bad_header(R"({"a":{"shape":[{}]}})", 4, "an object");
  expect_bad_header(R"({"a":{"shape":[null]}})", 4, "null");
  expect_bad_header(R"({"__metadata__":1})", 0, "__metadata__: a number");
  expect_bad_header(R"({"__metadata__":{"k":1}})", 0, "\"k\": a number");
  expect_bad_header(R"({"__metadata__":{"k":null}})", 0, "\"k\": null");
  expect_bad_header(R"({"__metadata__":{"k":{}}})", 0, "\"k\": an object");
  expect_bad_header(R"({"__metadata__":{"k":["v"]}})", 0, "\"k\": an array");
}

TEST(SafetensorsHeader, RefusesRepeatedKeys) {
  constexpr std::string_view kTensor = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  expect_bad_header(fmt::format(R"({{"a":{},"b":{},"\u0061":{}}})", kTensor, kTensor, kTensor), 0,
                    "tensor \"a\": it is there twice");
  expect_bad_header(R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__: it is there twice");
  expect_bad_header(R"({"__metadata__":{"k":"v","k":"v"}})", 0, "\"k\": the key is there twice");
  expect_bad_header(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0, "dtype is there twice");
  expect_bad_header(R"({"a":{"shape":[],"shape":[]}})", 0, "shape is there twice");
  expect_bad_header(R"({"a":{"data_offsets":[0,0],"data_offsets":[0,0]}})", 0, "data_offsets is there twice");
}

TEST(SafetensorsHeader, RefusesBadNumbers) {
  auto shape = [](std::string_view numbers) {
    return fmt::format(R"({{"a":{{"dtype":"F32","shape":[{}],"data_offsets":[0,4]}}}})", numbers);
  };
  expect_bad_header(shape("-1"), 4, "a negative number");
  expect_bad_header(shape("-0"), 4, "a negative number");
  expect_bad_header(shape("1.0"), 4, "a fraction");
  expect_bad_header(shape("1e0"), 4, "a fraction");
  expect_bad_header(shape("9223372036854775808"), 4, "too large");
  expect_bad_header(shape("18446744073709551616"), 4, "more than 64 bits");
  expect_bad_header(shape("4294967296,4294967296"), 4, "overflows");
  expect_bad_header(shape("1152921504606846976"), 4, "overflows");
  expect_bad_header(shape("0,4294967296,4294967296"), 4, "overflows");
  expect_bad_header(shape("2"), 4, "span 4 bytes, but float32 of shape [2] takes 8");
  expect_bad_header(shape("0"), 4, "span 4 bytes, but float32 of shape [0] takes 0");

  std::string many = "1";
  for (size_t i = 1; i < kMaxDims; ++i) many += ",1";
  EXPECT_EQ(parse(shape(many), 4).tensors[0].shape.size(), kMaxDims);
  expect_error([&] { parse(shape(many + ",1"), 4); }, "unsupported", {"\"a\"", "64 dims"});
}

TEST(SafetensorsHeader, RefusesBadOffsets) {
  auto offsets = [](std::string_view numbers) {
    return fmt::format(R"({{"a":{{"dtype":"F32","shape":[1],"data_offsets":[{}]}}}})", numbers);
  };
  EXPECT_NO_THROW(parse(offsets("0,4"), 4));
  expect_bad_header(offsets(""), 4, "fewer than two");
  expect_bad_header(offsets("0"), 4, "fewer than two");
  expect_bad_header(offsets("0,4,4"), 4, "more than two");
  expect_bad_header(offsets("4,0"), 4, "backwards");
  expect_bad_header(offsets("0,5"), 5, "span 5 bytes");
  expect_bad_header(offsets("1,5"), 5, "there is a hole between data offsets 0 and 1");
  expect_bad_header(offsets("0,4"), 3, "it ends at data offset 4, but the file at 3");
  expect_bad_header(offsets("0,4"), 5, "the tensors end at data offset 4, but the file at 5");
  expect_bad_header("{}", 1, "the tensors end at data offset 0, but the file at 1");
  expect_bad_header(offsets("9223372036854775803,9223372036854775807"), 4, "there is a hole");

  auto two = [](std::string_view b) {
    return fmt::format(R"({{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},)"
                       R"("b":{{"dtype":"F32","shape":[1],"data_offsets":[{}]}}}})",
                       b);
  };
  EXPECT_NO_THROW(parse(two("4,8"), 8));
  expect_bad_header(two("0,4"), 4, "overlaps another between data offsets 0 and 4");
  expect_bad_header(two("3,7"), 7, "tensor \"b\": it overlaps another between data offsets 3 and 4");
  expect_bad_header(two("5,9"), 9, "tensor \"b\": there is a hole between data offsets 4 and 5");
}

TEST(SafetensorsHeader, ShowsHostileNamesQuoted) {
  expect_bad_header(R"({"\u001b[2J":1})", 0, "tensor \"\\x1b[2J\"");
}

TEST(SafetensorsHeader, DeepNestingIsRefusedAtTheFirstLevelThatIsTooDeep) {
  expect_bad_header(R"({"a":{"shape":)" + std::string(1'000'000, '['), 0, "an array");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  expect_bad_header(objects, 0, "is unknown");
}

/// A file of a memory store.
std::unique_ptr<InputFile> file_of(const std::string& bytes) {
  MemoryStore store;
  store.create("/f.safetensors")->write(0, bytes_of(bytes));
  return store.open("/f.safetensors");
}

std::string with_length(uint64_t length, std::string_view rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes.append(rest);
}

TEST(SafetensorsHeader, ChecksTheLength) {
  auto expect = [](const std::string& bytes, std::string_view reason) {
    expect_error([&] { read_safetensors_header(*file_of(bytes)); }, "corrupt", {"f.safetensors", reason});
  };
  expect("", "0 bytes are too few");
  expect("1234567", "7 bytes are too few");
  expect(with_length(3, "{}"), "should have 3 bytes, but the file ends after 2");
  expect(with_length(1, ""), "should have 1 bytes, but the file ends after 0");
  expect(with_length(100'000'001, "{}"), "at most 100000000 are allowed");
  expect(with_length(~uint64_t{0}, "{}"), "18446744073709551615 bytes");
  expect(with_length(~uint64_t{0} - 7, "{}"), "at most");
  expect(with_length(0, ""), "byte 0");
  expect(with_length(2, "{}x"), "the tensors end at data offset 0, but the file at 1");
  EXPECT_TRUE(read_safetensors_header(*file_of(with_length(2, "{}"))).tensors.empty());
}

TEST(SafetensorsHeader, EveryTruncationIsNoticed) {
  Dims shape{2, 3};
  std::vector<SafetensorsSpec> specs = {{"a", DType::kFloat32, shape}};
  std::string bytes = lay_out_safetensors(specs).header + std::string(24, 'x');
  EXPECT_EQ(read_safetensors_header(*file_of(bytes)).tensors.size(), 1u);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(read_safetensors_header(*file_of(bytes.substr(0, size))), Error) << size;
  }
}

TEST(SafetensorsHeader, LooksLike) {
  auto looks = [](const std::string& bytes) { return looks_like_safetensors(bytes_of(bytes)); };
  EXPECT_TRUE(looks(with_length(2, "{}")));
  EXPECT_FALSE(looks(with_length(2, "[]")));
  EXPECT_FALSE(looks(with_length(2, "")));
  EXPECT_FALSE(looks(""));
  EXPECT_FALSE(looks("PK\x03\x04 some zip {"));
  EXPECT_FALSE(looks(with_length(100'000'001, "{}")));
}

TEST(SafetensorsLayout, IsWhatItSaysByteForByte) {
  Dims matrix{2, 3}, pairs{2, 4};
  std::vector<SafetensorsSpec> specs = {
      {"w", DType::kBFloat16, matrix}, {"q", DType::kFloat4E2M1FNx2, pairs}, {"s", DType::kInt64, {}}};
  SafetensorsLayout layout = lay_out_safetensors(specs);
  std::string json =
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
      R"("q":{"dtype":"F4","shape":[2,8],"data_offsets":[12,20]},)"
      R"("s":{"dtype":"I64","shape":[],"data_offsets":[20,28]}})";
  while (json.size() % 8 != 0) json += ' ';
  EXPECT_EQ(layout.header, with_length(json.size(), json));
  int64_t data = static_cast<int64_t>(layout.header.size());
  EXPECT_EQ(layout.offsets, (std::vector<int64_t>{data, data + 12, data + 20}));
  EXPECT_EQ(layout.file_size, data + 28);
}

TEST(SafetensorsLayout, HoldsNoTensorsToo) {
  SafetensorsLayout layout = lay_out_safetensors({}, {});
  EXPECT_EQ(layout.file_size, static_cast<int64_t>(layout.header.size()));
  EXPECT_TRUE(parse(std::string_view(layout.header).substr(8), 0).metadata.empty());
}

TEST(SafetensorsLayout, RefusesWhatTheFormatCannotHold) {
  auto expect = [](std::vector<SafetensorsSpec> specs, std::string_view kind, std::string_view reason) {
    expect_error([&] { lay_out_safetensors(specs); }, kind, {"tensor", reason});
  };
  Dims shape{2}, deep(kMaxDims + 1, 1);
  expect({{"z", DType::kComplex128, shape}}, "unsupported",
         "\"z\": safetensors has no dtype for complex128; drop the tensor");
  expect({{"z", DType::kFloat4E2M1FNx2, {}}}, "unsupported", "0-d");
  expect({{"\xff", DType::kFloat32, shape}}, "unsupported", "of this name");
  expect({{"__metadata__", DType::kFloat32, shape}}, "unsupported", "of this name");
  expect({{"z", DType::kFloat32, deep}}, "unsupported", "64 dims");
  expect({{"z", DType::kFloat32, shape}, {"z", DType::kInt8, shape}}, "invalid argument",
         "\"z\" is given twice");
  expect_error([&] { lay_out_safetensors({}, {{"k", "\xff"}}); }, "unsupported", {"\"k\"", "UTF-8"});
}

TEST(SafetensorsLayoutSlow, RefusesAHeaderThatIsTooLarge) {
  std::string text(100'000'000, 'n');
  expect_error([&] { lay_out_safetensors({}, {{"k", text}}); }, "unsupported", {"more, smaller files"});
}

std::string random_text() {
  static const std::vector<std::string> kPieces = {
      "a", "layers.0", "\"", "\\", "/", "\n", std::string(1, '\0'), "\x1f", "\x7f", "é", "\u2028",
      "𝄞", "{",        "}",  ",",  ":", " "};
  std::string text;
  for (size_t i : *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, kPieces.size()))) {
    text += kPieces[i];
  }
  return text;
}

RC_GTEST_PROP(SafetensorsLayout, ParseGivesBackWhatWasLaidOut, ()) {
  std::vector<DType> dtypes;
  for (size_t i = 0; i < kDTypeCount; ++i) {
    DType dtype = static_cast<DType>(i);
    if (!info(dtype).safetensors.empty()) dtypes.push_back(dtype);
  }
  std::set<std::string> names;
  for (int i = *rc::gen::inRange(0, 8); i > 0; --i) names.insert(random_text());
  std::vector<std::pair<DType, Dims>> types;
  for (size_t i = 0; i < names.size(); ++i) {
    DType dtype = *rc::gen::elementOf(dtypes);
    Dims shape(*rc::gen::inRange<size_t>(0, 4));
    for (int64_t& size : shape) size = *rc::gen::inRange<int64_t>(0, 5);
    // Sub-byte elements must fill bytes; float4 with an even last size is the paired dtype.
    if (is_sub_byte(dtype)) {
      shape.insert(shape.begin(), 4);
      shape.push_back(3);
    }
    if (dtype == DType::kFloat4E2M1FNx2) shape.push_back(2);
    types.emplace_back(dtype, shape);
  }
  SafetensorsMetadata metadata;
  for (int i = *rc::gen::inRange(0, 4); i > 0; --i) metadata.emplace(random_text(), random_text());

  std::vector<SafetensorsSpec> specs;
  for (const std::string& name : names) {
    const auto& [dtype, shape] = types[specs.size()];
    specs.push_back({name, dtype, shape});
  }
  SafetensorsLayout layout = lay_out_safetensors(specs, metadata);
  RC_ASSERT(layout.header.size() % 8 == 0u);
  auto header = parse_safetensors_header(std::string_view(layout.header).substr(8), layout.file_size, "f");
  RC_ASSERT(header.metadata == metadata);
  RC_ASSERT(header.tensors.size() == specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    // Empty tensors at one offset may have changed places with none but empty ones.
    auto at = std::ranges::find(header.tensors, specs[i].name, &SafetensorsTensor::name);
    RC_ASSERT(at != header.tensors.end());
    RC_ASSERT(at->dtype == specs[i].dtype);
    RC_ASSERT(std::ranges::equal(at->shape, specs[i].shape));
    RC_ASSERT(at->offset == layout.offsets[i]);
    RC_ASSERT(at->length == byte_size(specs[i].dtype, specs[i].shape));
  }
}

RC_GTEST_PROP(SafetensorsHeader, DamagedBytesAreRefusedOrStillTileTheFile, ()) {
  Dims matrix{2, 3}, empty{0, 2};
  std::vector<SafetensorsSpec> specs = {
      {"a", DType::kFloat32, matrix}, {"b", DType::kInt8, empty}, {"c", DType::kFloat64, matrix}};
  SafetensorsLayout layout = lay_out_safetensors(specs);
  std::string json = layout.header.substr(8);
  for (int i = *rc::gen::inRange(1, 4); i > 0; --i) {
    size_t at = *rc::gen::inRange<size_t>(0, json.size());
    json[at] = *rc::gen::oneOf(rc::gen::elementOf(std::string("0123456789{}[]\",:-.eF")),
                               rc::gen::arbitrary<char>());
  }
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(json, layout.file_size, "f");
  } catch (const Error&) {
    return;
  }
  int64_t end = static_cast<int64_t>(layout.header.size());
  for (const SafetensorsTensor& tensor : header.tensors) {
    RC_ASSERT(tensor.offset == end);
    RC_ASSERT(tensor.length == byte_size(tensor.dtype, tensor.shape));
    end += tensor.length;
  }
  RC_ASSERT(end == layout.file_size);
}

}  // namespace
}  // namespace spolia
