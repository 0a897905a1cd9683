// The JSON text of a Hugging Face index, and a folder that has nothing but it.
#include "fuzz/fuzzing.h"
#include "spolia/format/weight_index.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  WeightIndex index;
  if (!accepts([&] { index = parse_weight_index(text_of(bytes), "index"); })) return;
  const auto files = index.files();
  for (size_t i = 0; i < index.weight_map.size(); ++i) {
    const auto& [tensor, file] = index.weight_map[i];
    require(i == 0 || index.weight_map[i - 1].first < tensor);
    require(index.find(tensor) != nullptr && *index.find(tensor) == file);
    require(std::ranges::binary_search(files, file));
  }
  for (const char* name : {"model.safetensors.index.json", "pytorch_model.bin.index.json"}) {
    auto store = std::make_shared<MemoryStore>();
    put_file(*store, std::filesystem::path("/fuzz") / name, bytes);
    read_checkpoint(store, "/fuzz");
  }
}

}  // namespace spolia::fuzzing
