// The JSON text that says which part of each tensor a rank's safetensors file holds.
#include "fuzz/fuzzing.h"
#include "spolia/format/safetensors/sharding_info.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  accepts([&] {
    for (const auto& [name, offsets] : parse_sharding_info(text_of(bytes), "file")) {
      require(std::ranges::all_of(offsets, [](int64_t offset) { return offset >= 0; }));
    }
  });
}

}  // namespace spolia::fuzzing
