// The pickle of a torch.save archive, which in a file is guarded by a checksum: put into an archive whose
// storages 0 to 15 are there, it is read as one file and as the files of two ranks, whose DTensors it
// describes.
#include <string>
#include <vector>

#include "fuzz/fuzzing.h"
#include "spolia/format/torch/testing_zip.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  std::string storage;
  for (int64_t i = 0; i < 128; ++i) storage += testing::little(i);  // the ranks of a mesh, too
  std::vector<testing::TestRecord> records{{.name = "a/data.pkl", .data = std::string(text_of(bytes))}};
  for (int i = 0; i < 16; ++i) records.push_back({.name = "a/data/" + std::to_string(i), .data = storage});
  const std::string archive = testing::make_zip(records);

  auto store = std::make_shared<MemoryStore>();
  put_file(*store, "/file/state.pt", bytes_of(archive));
  read_checkpoint(store, "/file/state.pt");
  put_file(*store, "/ranks/rank0.pt", bytes_of(archive));
  put_file(*store, "/ranks/rank1.pt", bytes_of(archive));
  read_checkpoint(store, "/ranks");
}

}  // namespace spolia::fuzzing
