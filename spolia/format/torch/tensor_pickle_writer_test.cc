#include "spolia/format/torch/tensor_pickle_writer.h"

#include <set>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/format/torch/dcp_source.h"
#include "spolia/format/torch/tensor_pickle.h"
#include "spolia/format/torch/testing.h"
#include "spolia/format/torch/testing_zip.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

/// What PyTorch cannot hold, or not by its elements alone.
bool is_refused(DType dtype) {
  using enum DType;
  return is_sub_byte(dtype) || (dtype >= kUInt1 && dtype <= kQUInt2x4);
}

/// An archive of the pickle and a storage "0" of so many bytes.
std::string archive_of(const std::string& pickle, int64_t bytes) {
  return make_zip({{.name = "archive/data.pkl", .data = pickle},
                   {.name = "archive/data/0", .data = std::string(static_cast<size_t>(bytes), 'x')}});
}

TEST(TensorPickleWriter, EveryDTypeIsReadBackOrRefusedByName) {
  for (size_t d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    SCOPED_TRACE(name_of(dtype));
    const Dims shape{2, 3, 4, 1};
    if (is_refused(dtype)) {
      EXPECT_EQ(kind_thrown([&] { write_tensor_pickle(dtype, shape); }, {std::string(name_of(dtype))}),
                ErrorKind::kUnsupported);
      continue;
    }
    for (bool requires_grad : {false, true}) {
      const std::string zip =
          archive_of(write_tensor_pickle(dtype, shape, requires_grad), byte_size(dtype, shape));
      auto bytes = bytes_in_memory(to_bytes(zip), "an archive");
      TorchArchive archive(*bytes, std::ssize(zip));
      TensorPickle pickle(archive);
      const PickledTensor* tensor = pickle.tensor(pickle.root());
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->dtype, dtype);
      EXPECT_EQ(tensor->shape, shape);
      EXPECT_EQ(tensor->strides, row_major_strides(shape));
      EXPECT_EQ(tensor->first, 0);
      EXPECT_EQ(tensor->requires_grad, requires_grad);
      EXPECT_EQ(pickle.storage_of(*tensor).key, "0");
      EXPECT_EQ(pickle.storage_of(*tensor).bytes, byte_size(dtype, shape));
    }
  }
}

TEST(TensorPickleWriter, BytesAreThoseOfPyTorch) {
  std::set<DType> compared;
  for (const char* fixture : {"dtypes-1", "muon-1", "nested-1"}) {
    auto source = open_dcp(posix_store(), kData / "torch-2.14" / fixture / "checkpoint");
    for (size_t t = 0; t < source->catalog().tensors.size(); ++t) {
      const TensorEntry& entry = source->catalog().tensors[t];
      const Extent item = source->payload(t, 0).stored;
      if (source->payload(t, 0).strides != row_major_strides(entry.shape)) continue;
      auto bytes = open_bytes(source->file(item.file), item.offset, item.length, Codec::kNone);
      const auto pickle = TorchArchive(*bytes, item.length).pickle();
      EXPECT_EQ(to_bytes(write_tensor_pickle(entry.dtype, entry.boxes.sizes(0))), pickle) << entry.name;
      compared.insert(entry.dtype);
    }
  }
  EXPECT_EQ(compared.size(), 20U);
}

TEST(TensorPickleWriter, LargeNumbers) {
  const Dims shape{int64_t{1} << 33, 0, 5};
  const std::string zip = archive_of(write_tensor_pickle(DType::kFloat32, shape), 0);
  auto bytes = bytes_in_memory(to_bytes(zip), "an archive");
  TorchArchive archive(*bytes, std::ssize(zip));
  TensorPickle pickle(archive);
  EXPECT_EQ(pickle.tensor(pickle.root())->shape, shape);
}

}  // namespace
}  // namespace spolia
