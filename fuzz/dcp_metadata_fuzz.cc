// A `.metadata` file: its catalog keeps its promises, and can be written and read again.
#include "fuzz/fuzzing.h"
#include "spolia/base/checked.h"
#include "spolia/format/torch/dcp_metadata.h"
#include "spolia/format/torch/dcp_metadata_writer.h"
#include "spolia/state/tiling.h"

namespace spolia::fuzzing {
namespace {

const std::filesystem::path kPath = "/fuzz/.metadata";

void check_promises(const Catalog& catalog) {
  auto check_extent = [&](const Extent& extent) {
    require(extent.file < catalog.files.size() && extent.offset >= 0 && extent.length >= 0);
    require(try_add(extent.offset, extent.length).has_value());
  };
  for (const TensorEntry& tensor : catalog.tensors) {
    require(tensor.boxes.size() == tensor.chunks());
    for (size_t c = 0; c < tensor.chunks(); ++c) {
      require(fits(tensor.boxes.offsets(c), tensor.boxes.sizes(c), tensor.shape));
      check_extent(tensor.extents[c]);
    }
    find_tiling_fault(tensor);
  }
  for (const ValueEntry& value : catalog.values) {
    require(value.extent.has_value());
    check_extent(*value.extent);
  }
}

void check_same(const Catalog& a, const Catalog& b) {
  auto same_extent = [&](const Extent& x, const Extent& y) {
    return a.files[x.file] == b.files[y.file] && x.offset == y.offset && x.length == y.length;
  };
  require(a.tensors.size() == b.tensors.size() && a.values.size() == b.values.size());
  for (size_t t = 0; t < a.tensors.size(); ++t) {
    const TensorEntry &x = a.tensors[t], &y = b.tensors[t];
    require(x.name == y.name && x.dtype == y.dtype && x.shape == y.shape && x.boxes == y.boxes &&
            x.requires_grad == y.requires_grad && x.memory_format == y.memory_format);
    require(std::ranges::equal(x.extents, y.extents, same_extent));
  }
  for (size_t v = 0; v < a.values.size(); ++v) {
    require(a.values[v].name == b.values[v].name);
    require(same_extent(*a.values[v].extent, *b.values[v].extent));
  }
}

}  // namespace

void run(Bytes bytes) {
  Catalog catalog;
  if (!accepts([&] { catalog = read_dcp_metadata(bytes, kPath); })) return;
  check_promises(catalog);
  for (auto protocol : {pickle::Writer::Protocol::k2, pickle::Writer::Protocol::k4}) {
    Catalog again;
    std::string written = write_dcp_metadata(catalog, protocol);
    require(accepts([&] { again = read_dcp_metadata(bytes_of(written), kPath); }));
    check_same(catalog, again);
  }
  auto store = std::make_shared<MemoryStore>();
  put_file(*store, kPath, bytes);
  read_checkpoint(store, "/fuzz");
  auto ranks = std::make_shared<MemoryStore>();
  put_file(*ranks, "/fuzz/__0.metadata", bytes);
  put_file(*ranks, "/fuzz/__1.metadata", bytes);
  read_checkpoint(ranks, "/fuzz");
}

}  // namespace spolia::fuzzing
