// A zip archive: its directory, the headers of its records, their bytes.
#include "fuzz/fuzzing.h"
#include "spolia/format/torch/zip.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  constexpr int64_t kMostBytes = int64_t{1} << 20;
  auto source = bytes_in_memory({bytes.begin(), bytes.end()}, "memory");
  accepts([&] {
    Zip zip(*source);
    int64_t end = 0;
    for (const ZipRecord& record : zip.records()) {
      require(zip.find(record.name) == &record);
      require(record.header >= end && record.packed_size >= 0 && record.size >= 0);
      end = record.header;
      accepts([&] {
        int64_t start = zip.data_start(record);
        require(start > end && record.packed_size <= source->size() - start);
        end = start + record.packed_size;
      });
      accepts([&] { require(std::ssize(zip.read(record, kMostBytes)) == record.size); });
    }
  });
}

}  // namespace spolia::fuzzing
