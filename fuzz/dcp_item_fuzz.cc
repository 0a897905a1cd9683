// A data file of DCP that is one item: that of a tensor, and that of a value.
#include "fuzz/fuzzing.h"
#include "spolia/format/torch/dcp_metadata_writer.h"

namespace spolia::fuzzing {
namespace {

/// The metadata of a tensor and a value that both are the first `length` bytes of a file.
std::string metadata(int64_t length, DType dtype, const Dims& shape) {
  Catalog catalog;
  catalog.files = {"__0_0.distcp"};
  TensorEntry tensor;
  tensor.name = "w";
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.boxes = BoxList(shape.size());
  tensor.boxes.add(whole(shape));
  tensor.extents = {{0, 0, length}};
  catalog.tensors.push_back(std::move(tensor));
  catalog.values.push_back({.name = "v", .extent = Extent{0, 0, length}, .value = {}, .path = {}});
  return write_dcp_metadata(catalog);
}

}  // namespace

void run(Bytes bytes) {
  // Some of the chunks that the seeds hold.
  const std::pair<DType, Dims> kChunks[] = {
      {DType::kFloat32, {4, 5}}, {DType::kFloat32, {7}}, {DType::kBFloat16, {3, 3, 7}}};
  for (const auto& [dtype, shape] : kChunks) {
    auto store = std::make_shared<MemoryStore>();
    put_file(*store, "/fuzz/.metadata", bytes_of(metadata(std::ssize(bytes), dtype, shape)));
    put_file(*store, "/fuzz/__0_0.distcp", bytes);
    read_checkpoint(store, "/fuzz");
  }
}

}  // namespace spolia::fuzzing
