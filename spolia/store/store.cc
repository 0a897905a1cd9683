#include "spolia/store/store.h"

#include <algorithm>

#include "spolia/store/checks.h"

namespace spolia {

void OutputFile::copy_from(const InputFile& from, int64_t from_offset, int64_t to_offset, int64_t length) {
  check_read_range(from.path(), from_offset, length, from.size());
  check_write_range(path(), to_offset, length);
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(length, kPiece)));
  for (int64_t done = 0; done < length;) {
    const int64_t count = std::min(length - done, kPiece);
    const auto piece = std::span(buffer).first(static_cast<size_t>(count));
    from.read(from_offset + done, piece);
    write(to_offset + done, piece);
    done += count;
  }
}

}  // namespace spolia
