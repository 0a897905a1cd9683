// A safetensors file: what its header says can be written and read again; its tensors can be read.
#include <vector>

#include "fuzz/fuzzing.h"
#include "spolia/format/safetensors/header.h"

namespace spolia::fuzzing {
namespace {

void check_round_trip(const SafetensorsHeader& header) {
  std::vector<SafetensorsSpec> specs;
  for (const SafetensorsTensor& tensor : header.tensors) {
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  SafetensorsLayout layout = lay_out_safetensors(specs, header.metadata);
  std::string_view json = std::string_view(layout.header).substr(8);
  SafetensorsHeader again = parse_safetensors_header(json, layout.file_size, "again");
  require(again.metadata == header.metadata && again.tensors.size() == header.tensors.size());
  for (const SafetensorsTensor& tensor : header.tensors) {
    auto same = std::ranges::find(again.tensors, tensor.name, &SafetensorsTensor::name);
    require(same != again.tensors.end() && same->dtype == tensor.dtype && same->shape == tensor.shape &&
            same->length == tensor.length);
  }
}

}  // namespace

void run(Bytes bytes) {
  SafetensorsHeader header;
  if (!accepts([&] { header = read_safetensors_header(BytesFile(bytes)); })) return;
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    require(tensor.length == byte_size(tensor.dtype, tensor.shape));
    require(end == 0 || tensor.offset == end);
    end = tensor.offset + tensor.length;
  }
  require(header.tensors.empty() || end == std::ssize(bytes));
  require(accepts([&] { check_round_trip(header); }));

  auto store = std::make_shared<MemoryStore>();
  put_file(*store, "/fuzz/model.safetensors", bytes);
  read_checkpoint(store, "/fuzz/model.safetensors");
  put_file(*store, "/fuzz/again.safetensors", bytes);  // its replica, where it holds parts
  read_checkpoint(store, "/fuzz");
}

}  // namespace spolia::fuzzing
