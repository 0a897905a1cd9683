#include "spolia/format/torch/tensor_pickle.h"

#include <limits>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"

namespace spolia {
namespace {

using namespace testing;

/// An archive in memory with its pickle read.
struct Read {
  explicit Read(const std::string& value,
                const std::map<std::string, std::string>& storages = {{"0", std::string(96, 'x')}})
      : file(make_archive(value, storages)),
        bytes(open_bytes(file, 0, file.size(), Codec::kNone)),
        archive(*bytes, file.size()),
        pickle(archive) {}
  const PickledTensor& root() { return *pickle.tensor(pickle.root()); }

  MemoryFile file;
  std::unique_ptr<ByteSource> bytes;
  TorchArchive archive;
  TensorPickle pickle;
};

std::optional<ErrorKind> kind_of(const std::string& value, const std::vector<std::string>& words = {}) {
  return kind_thrown([&] { Read read(value); }, words);
}

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::string floats(int64_t numel = 24) { return py_storage("FloatStorage", "0", numel); }

TEST(TensorPickle, ReadsAPlainTensor) {
  Read read(py_tensor(floats(), 2, {2, 3}, {10, 2}, true));
  const PickledTensor& tensor = read.root();
  EXPECT_EQ(tensor.dtype, DType::kFloat32);
  EXPECT_EQ(tensor.shape, (Dims{2, 3}));
  EXPECT_EQ(tensor.strides, (Dims{10, 2}));
  EXPECT_EQ(tensor.first, 2);
  EXPECT_TRUE(tensor.requires_grad);
  EXPECT_EQ(read.pickle.storage_of(tensor).key, "0");
  EXPECT_EQ(read.pickle.storage_of(tensor).location, "cpu");
  EXPECT_EQ(read.pickle.storage_of(tensor).bytes, 96);
}

TEST(TensorPickle, ReadsTheOtherForms) {
  std::string hooks = py_call(py_global("collections", "OrderedDict"), {});
  std::string plain = py_tensor(floats(), 0, {24}, {1});
  EXPECT_EQ(Read(py_call(py_global("torch._utils", "_rebuild_tensor"),
                         {floats(), py_int(0), py_ints(std::vector<int64_t>{24}),
                          py_ints(std::vector<int64_t>{1})}))
                .root()
                .shape,
            Dims{24});
  Read v3(py_call(
      py_global("torch._utils", "_rebuild_tensor_v3"),
      {py_storage("UntypedStorage", "0", 96), py_int(0), py_ints(std::vector<int64_t>{96}),
       py_ints(std::vector<int64_t>{1}), py_bool(false), hooks, py_global("torch", "float8_e4m3fn")}));
  EXPECT_EQ(v3.root().dtype, DType::kFloat8E4M3FN);
  for (const char* function : {"_rebuild_parameter", "_rebuild_parameter_with_state"}) {
    std::vector<std::string> args{plain, py_bool(true), hooks, py_fields({})};
    if (function == std::string("_rebuild_parameter")) args.pop_back();
    EXPECT_TRUE(Read(py_call(py_global("torch._utils", function), args)).root().requires_grad);
  }
  // A subclass that is a plain tensor underneath.
  std::string args = py_tuple({floats(), py_int(0), py_ints(std::vector<int64_t>{4}),
                               py_ints(std::vector<int64_t>{1}), py_bool(false), hooks});
  Read subclass(py_call(
      py_global("torch._tensor", "_rebuild_from_type_v2"),
      {py_global("torch._utils", "_rebuild_tensor_v2"), py_global("my", "Tensor"), args, py_fields({})}));
  EXPECT_EQ(subclass.root().shape, Dims{4});
}

TEST(TensorPickle, TensorsStayInsideTheirStorages) {
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {4, 6}, {6, 1})), std::nullopt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 1, {4, 6}, {6, 1}), {"storage \"0\"", "96 bytes"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {4, 6}, {7, 1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {1000}, {0})), std::nullopt);  // expanded
  EXPECT_EQ(kind_of(py_tensor(floats(), 24, {0, 4}, {4, 1})), std::nullopt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {4}, {6, 1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), -1, {4}, {1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {-4}, {1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {4}, {-1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), kMax, {4}, {1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {3}, {kMax})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {kMax, kMax}, {0, 0})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, {0, kMax, kMax}, {0, 0, 0})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(kMax), 0, {4}, {1})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tensor(floats(-1), 0, {4}, {1})), ErrorKind::kCorrupt);
}

TEST(TensorPickle, ShapesHaveAtMost64Dims) {
  const std::vector<int64_t> most(64, 1), more(65, 1);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, most, most)), std::nullopt);
  EXPECT_EQ(kind_of(py_tensor(floats(), 0, more, more), {"dims"}), ErrorKind::kUnsupported);
}

TEST(TensorPickle, MalformedCallsAreCorrupt) {
  std::string rebuild = py_global("torch._utils", "_rebuild_tensor_v2");
  EXPECT_EQ(kind_of(py_call(rebuild, {})), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_call(rebuild, {floats(), py_int(0), py_int(3), py_int(1), py_bool(false)})),
            ErrorKind::kCorrupt);
  EXPECT_EQ(
      kind_of(py_call(rebuild, {py_text("storage"), py_int(0), py_tuple({}), py_tuple({}), py_bool(false)})),
      ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_text("module") + "Q"), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of(py_tuple({py_text("storage"), py_global("torch", "QInt8Storage"), py_text("0"),
                              py_text("cpu"), py_int(1)}) +
                    "Q"),
            ErrorKind::kUnsupported);
  std::string conjugate = py_fields({{"conj", py_bool(true)}});
  EXPECT_EQ(kind_of(py_call(rebuild, {floats(), py_int(0), py_tuple({}), py_tuple({}), py_bool(false),
                                      py_none(), conjugate}),
                    {"resolve_conj"}),
            ErrorKind::kUnsupported);
}

TEST(TensorPickle, PayloadsAreTheStoragesRecords) {
  Read read(py_tensor(floats(), 2, {2}, {1}));
  Payload payload = payload_of(read.archive, read.pickle.storage_of(read.root()), read.root(),
                               {7, 0, read.file.size()}, Codec::kNone);
  EXPECT_EQ(payload.stored, (Extent{7, 0, read.file.size()}));
  EXPECT_EQ(payload.length, 96);
  EXPECT_EQ(payload.first, 2);
  std::string data(96, '?');
  read.bytes->read(payload.offset, std::as_writable_bytes(std::span(data)));
  EXPECT_EQ(data, std::string(96, 'x'));
  EXPECT_EQ(payload.crc32, crc32(0, bytes_of(data)));
  for (const std::map<std::string, std::string>& storages :
       {std::map<std::string, std::string>{{"0", std::string(95, 'x')}}, {{"1", std::string(96, 'x')}}}) {
    Read damaged(py_tensor(floats(), 0, {2}, {1}), storages);
    EXPECT_EQ(kind_thrown(
                  [&] {
                    payload_of(damaged.archive, damaged.pickle.storage_of(damaged.root()), damaged.root(), {},
                               Codec::kNone);
                  },
                  {"0", "/memory"}),
              ErrorKind::kCorrupt);
  }
}

TEST(TensorPickle, ValuesShowTensors) {
  Read read(py_tuple({py_int(1), py_tensor(floats(), 0, {2, 3}, {3, 1})}));
  Value value = read.pickle.value(read.pickle.root());
  const Record* record = value.get_if<Tuple>()->items[1].record();
  ASSERT_NE(record, nullptr);
  EXPECT_EQ(record->type, (Global{"torch", "Tensor"}));
  EXPECT_EQ(*record->args[0].get_if<std::string>(), "float32");
  EXPECT_EQ(record->args[1].get_if<Tuple>()->items.size(), 2u);
}

TEST(TensorPickle, ValuesCannotShowFarMoreThanThePickleHas) {
  // A tensor of 64 dims in ever more places.
  const std::vector<int64_t> dims(64, 1);
  std::string many = py_tensor(floats(), 0, dims, dims) + "q\1" + "0](";
  for (int i = 0; i < 20'000; ++i) many += "h\1";
  Read read(many + "e");
  EXPECT_EQ(kind_thrown([&] { read.pickle.value(read.pickle.root()); }, {"justifies"}), ErrorKind::kCorrupt);
}

TEST(TensorPickle, UnknownCallsMayLackTheirArguments) {
  // With keyword arguments (NEWOBJ_EX) no hook sees the call.
  Read read(py_global("torch._tensor", "_rebuild_from_type_v2") + ")" + py_fields({{"k", py_int(1)}}) +
            "\x92");
  EXPECT_EQ(TensorPickle::unknown_tensor(read.pickle.root()), "\"torch._tensor._rebuild_from_type_v2\"");
}

TEST(TensorPickle, ReadsIntegersOfAnyStride) {
  Read read(py_tensor(py_storage("LongStorage", "0", 6), 1, {2, 2}, {1, 2}),
            {{"0", raw<int64_t>({0, 1, 2, 3, 4, 5})}});
  EXPECT_EQ(read_integers(read.archive, read.pickle.storage_of(read.root()), read.root()),
            (std::vector<int64_t>{1, 3, 2, 4}));
  Read wrong(py_tensor(floats(), 0, {2}, {1}));
  EXPECT_EQ(
      kind_thrown([&] { read_integers(wrong.archive, wrong.pickle.storage_of(wrong.root()), wrong.root()); }),
      ErrorKind::kCorrupt);
  Read large(py_tensor(py_storage("LongStorage", "0", 6), 1, {1 << 30}, {0}), {{"0", std::string(48, 'x')}});
  EXPECT_EQ(
      kind_thrown([&] { read_integers(large.archive, large.pickle.storage_of(large.root()), large.root()); }),
      ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace spolia
