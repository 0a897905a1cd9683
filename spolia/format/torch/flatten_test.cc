#include "spolia/format/torch/flatten.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"

namespace spolia {
namespace {

using namespace testing;

struct Names {
  std::vector<std::string> tensors;
  std::vector<std::string> values;
};

Names names_of(const std::string& value) {
  MemoryFile file(make_archive(value, {{"0", std::string(96, 'x')}}));
  auto bytes = open_bytes(file, 0, file.size(), Codec::kNone);
  TorchArchive archive(*bytes, file.size());
  TensorPickle pickle(archive);
  FlatState state = flatten(pickle);
  Names names;
  for (const FlatTensor& tensor : state.tensors) names.tensors.push_back(joined(tensor.path));
  for (const FlatValue& found : state.values) names.values.push_back(joined(found.path));
  return names;
}

std::string tensor() { return py_tensor(py_storage("FloatStorage", "0", 24), 0, {2}, {1}); }

TEST(Flatten, FollowsPyTorchsRule) {
  Names names = names_of(py_fields({
      {"dict", py_fields({{"t", tensor()}, {"v", py_int(1)}, {"empty", py_fields({})}})},
      {"plain", py_list({py_int(1), py_list({py_int(2)})})},
      {"with tensor", py_list({py_int(1), tensor()})},
      {"with dict", py_list({py_list({py_fields({{"x", py_none()}})}), py_int(3)})},
      {"tuple", py_tuple({tensor(), py_fields({{"y", tensor()}})})},
      {"dotted.key", tensor()},
  }));
  EXPECT_EQ(names.tensors, (std::vector<std::string>{"dict.t", "with tensor.1", "dotted.key"}));
  EXPECT_EQ(names.values, (std::vector<std::string>{"dict.v", "plain", "with tensor.0", "with dict.0.0.x",
                                                    "with dict.1", "tuple"}));
}

TEST(Flatten, KeysBecomeText) {
  Names names = names_of(py_dict(
      {{py_int(3), tensor()}, {py_int(-1), tensor()}, {py_bool(true), tensor()}, {py_none(), tensor()}}));
  EXPECT_EQ(names.tensors, (std::vector<std::string>{"3", "-1", "True", "None"}));
}

TEST(Flatten, RootsThatDoNotDescendGetNames) {
  EXPECT_EQ(names_of(tensor()).tensors, std::vector<std::string>{"tensor"});
  EXPECT_EQ(names_of(py_int(3)).values, std::vector<std::string>{"value"});
  EXPECT_EQ(names_of(py_list({tensor(), tensor()})).tensors, (std::vector<std::string>{"0", "1"}));
}

TEST(Flatten, UnknownTensorsAreNamed) {
  std::string quantized = py_call(py_global("torch._utils", "_rebuild_qtensor"), {py_int(1)});
  EXPECT_EQ(kind_thrown(
                [&] {
                  names_of(py_fields({{"layer", py_fields({{"w", quantized}})}}));
                },
                {"layer.w", "_rebuild_qtensor"}),
            ErrorKind::kUnsupported);
  std::string wrapper = py_call(py_global("torch._tensor", "_rebuild_from_type_v2"),
                                {py_global("torch._utils", "_rebuild_wrapper_subclass"),
                                 py_global("torchao", "Float8Tensor"), py_tuple({}), py_fields({})});
  EXPECT_EQ(kind_thrown(
                [&] {
                  names_of(py_fields({{"w", wrapper}}));
                },
                {"\"w\"", "torchao.Float8Tensor"}),
            ErrorKind::kUnsupported);
}

TEST(Flatten, CyclesAndDepthAreCorrupt) {
  // A dict that holds itself; a list likewise.
  EXPECT_EQ(kind_thrown([] { names_of("}q\1" + py_text("self") + "h\1s"); }), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_thrown([] { names_of("]q\1h\1a"); }), ErrorKind::kCorrupt);
  std::string deep;
  for (int i = 0; i < 300; ++i) deep += "}" + py_text("k");
  deep += py_int(1) + std::string(300, 's');
  EXPECT_EQ(kind_thrown([&] { names_of(deep); }), ErrorKind::kCorrupt);
}

TEST(Flatten, SharedPartsCannotGrowWithoutEnd) {
  // d0 = {a: 1, b: 1}, d1 = {a: d0, b: d0}, ...: 2^40 names.
  std::string bomb = py_fields({{"a", py_int(1)}, {"b", py_int(1)}}) + "q\1";
  for (int i = 0; i < 40; ++i) bomb = bomb + "0}(" + py_text("a") + "h\1" + py_text("b") + "h\1uq\1";
  EXPECT_EQ(kind_thrown([&] { names_of(bomb); }, {"shared"}), ErrorKind::kCorrupt);
  // One long list under many keys.
  std::string list = "](";
  for (int i = 0; i < 20'000; ++i) list += "K\1";
  list +=
      "eq\1"
      "0}(";
  for (int i = 0; i < 20'000; ++i) list += "J" + little(i) + "h\1";
  EXPECT_EQ(kind_thrown([&] { names_of(list + "u"); }, {"shared"}), ErrorKind::kCorrupt);
  // One class with a long name, in many places.
  std::string globals = py_global(std::string(1000, 'm'), "C") + "q\1" + "0](";
  for (int i = 0; i < 20'000; ++i) globals += "h\1";
  EXPECT_EQ(kind_thrown([&] { names_of(globals + "e"); }, {"shared"}), ErrorKind::kCorrupt);
}

TEST(Flatten, PlainValuesAreNeverTooMany) {
  std::string list = "](";
  for (int i = 0; i < 200'000; ++i) list += i % 2 == 0 ? "N" : "\x88";
  EXPECT_EQ(names_of(list + "e").values.size(), 1u);
  std::string objects = py_global("a.module.with.quite_a_long_name", "AndAClassToo") + "q\1" + "0](";
  for (int i = 0; i < 200'000; ++i) objects += "h\1)\x81";
  EXPECT_EQ(names_of(objects + "e").values.size(), 1u);
}

}  // namespace
}  // namespace spolia
