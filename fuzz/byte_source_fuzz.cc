// Compressed streams, read whole and at random. The first byte picks the codec and where to read.
#include "fuzz/fuzzing.h"
#include "spolia/format/byte_source.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  if (bytes.empty()) return;
  constexpr int64_t kMostBytes = int64_t{4} << 20;
  auto choice = static_cast<int64_t>(bytes[0]);
  BytesFile file(bytes.subspan(1));
  Codec codec = choice % 2 == 0 ? Codec::kZstd : Codec::kDeflate;
  auto decoded = [&] { return open_bytes(file, 0, file.size(), codec, kMostBytes); };
  accepts([&] {
    auto stream = decoded();
    auto whole = read_all(*stream);
    require(std::ssize(whole) <= kMostBytes);

    int64_t from = std::ssize(whole) * (choice / 2) / 128;
    int64_t middle = (from + std::ssize(whole)) / 2;
    auto part = [&](int64_t begin, int64_t end) {
      return Bytes(whole).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    };
    auto again = decoded();  // knows nothing of its size yet
    std::vector<std::byte> room;
    for (auto [begin, end] : {std::pair(middle, std::ssize(whole)), std::pair(from, middle)}) {
      room.resize(static_cast<size_t>(end - begin));
      again->read(begin, room);
      require(std::ranges::equal(room, part(begin, end)));
    }
    require(!accepts([&] { again->read(middle, whole); }) || middle == 0);
  });
}

}  // namespace spolia::fuzzing
