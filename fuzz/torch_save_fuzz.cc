// A whole torch.save file: zip, pickle, payloads.
#include "fuzz/fuzzing.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  auto store = std::make_shared<MemoryStore>();
  put_file(*store, "/fuzz/state.pt", bytes);
  read_checkpoint(store, "/fuzz/state.pt");
}

}  // namespace spolia::fuzzing
