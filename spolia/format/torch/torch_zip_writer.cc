#include "spolia/format/torch/torch_zip_writer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "spolia/base/hash.h"

namespace spolia {
namespace {

constexpr std::string_view kRoot = "archive/";
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kIn64 = 0xFFFFFFFF;  // "the zip64 field has it"
constexpr uint16_t kNamesAreUtf8 = 1 << 11;
constexpr uint16_t kSizesFollow = 1 << 3;

/// Appends numbers of one type, little-endian.
template <class T>
void put(std::string& out, std::initializer_list<T> numbers) {
  static_assert(std::endian::native == std::endian::little);
  for (T number : numbers) {
    std::array<char, sizeof(T)> bytes;
    std::memcpy(bytes.data(), &number, sizeof(T));
    out.append(bytes.data(), bytes.size());
  }
}

uint32_t narrow(uint64_t number) { return static_cast<uint32_t>(std::min(number, kIn64)); }

/// Writes an archive front to back.
class ArchiveWriter {
 public:
  ArchiveWriter() {
    out_.reserve(1024);
    directory_.reserve(512);
  }

  void add(std::string_view name, std::string_view data) {
    begin(name, data.size());
    out_ += data;
    end(crc32(0, bytes_of(data)));
  }

  /// Begins a record of `size` bytes: these come next, then end(). `name` must live until then.
  void begin(std::string_view name, uint64_t size) {
    record_ = {name, position(), size};
    const std::vector<uint64_t> wide = record_.wide_numbers(0);
    const size_t extra = zip64_bytes(wide) + 4;
    const size_t name_bytes = kRoot.size() + name.size();
    const uint64_t data = record_.header + 30 + name_bytes + extra;
    const auto padding = static_cast<size_t>((kAlignment - data % kAlignment) % kAlignment);
    out_ += "PK\3\4";
    put<uint16_t>(out_, {0, record_.flags(), 0, 0, 0});  // version, flags, method, time, date
    put<uint32_t>(out_, {0, 0, 0});                      // CRC and sizes, which follow the data
    put(out_, {static_cast<uint16_t>(name_bytes), static_cast<uint16_t>(extra + padding)});
    out_.append(kRoot).append(name);
    put_zip64(out_, wide);
    out_ += "FB";
    put(out_, {static_cast<uint16_t>(padding)});
    out_.append(padding, 'Z');
  }

  /// Where the bytes of the record that was begun come from elsewhere.
  void skip_data() { taken_ += record_.size; }

  void end(uint32_t crc) {
    if (record_.size > 0) {
      out_ += "PK\7\10";
      put(out_, {crc});
      if (record_.is_long() || record_.is_far()) {
        put(out_, {record_.size, record_.size});
      } else {
        put(out_, {narrow(record_.size), narrow(record_.size)});
      }
    }
    enter_in_directory(crc);
  }

  /// What was written since the last take().
  std::string take() {
    taken_ += out_.size();
    return std::exchange(out_, {});
  }

  /// Adds the records that end every archive, and the zip's directory.
  std::string finish() {
    add("version", "3\n");
    // PyTorch's ids tell archives apart. This one follows from the names, sizes and CRCs.
    add(".data/serialization_id", fmt::format("{:040}", xxh3_64(bytes_of(directory_))));
    const uint64_t begin = position();
    const uint64_t size = directory_.size();
    out_ += directory_;
    out_ += "PK\6\6";
    put<uint64_t>(out_, {44});
    put<uint16_t>(out_, {0x031E, 0x2D});
    put<uint32_t>(out_, {0, 0});
    put<uint64_t>(out_, {records_, records_, size, begin});
    out_ += "PK\6\7";
    put<uint32_t>(out_, {0});
    put<uint64_t>(out_, {begin + size});
    put<uint32_t>(out_, {1});
    out_ += "PK\5\6";
    put<uint16_t>(out_, {0, 0, records_, records_});
    put<uint32_t>(out_, {narrow(size), narrow(begin)});
    put<uint16_t>(out_, {0});
    return take();
  }

 private:
  struct Record {
    std::string_view name;
    uint64_t header = 0;
    uint64_t size = 0;

    bool is_long() const { return size >= kIn64; }
    bool is_far() const { return header >= kIn64; }
    uint16_t flags() const { return kNamesAreUtf8 | (size > 0 ? kSizesFollow : 0); }
    /// What the zip64 field has, in its order.
    std::vector<uint64_t> wide_numbers(uint64_t packed_size) const {
      std::vector<uint64_t> numbers;
      if (is_long()) numbers = {size, packed_size};
      if (is_far()) numbers.push_back(header);
      return numbers;
    }
  };

  uint64_t position() const { return taken_ + out_.size(); }

  static size_t zip64_bytes(const std::vector<uint64_t>& numbers) {
    return numbers.empty() ? 0 : 4 + 8 * numbers.size();
  }
  static void put_zip64(std::string& out, const std::vector<uint64_t>& numbers) {
    if (numbers.empty()) return;
    put<uint16_t>(out, {1, static_cast<uint16_t>(8 * numbers.size())});
    for (uint64_t number : numbers) put(out, {number});
  }

  void enter_in_directory(uint32_t crc) {
    const std::vector<uint64_t> wide = record_.wide_numbers(record_.size);
    const size_t name_bytes = kRoot.size() + record_.name.size();
    directory_ += "PK\1\2";
    put<uint16_t>(directory_, {0, 0, record_.flags(), 0, 0, 0});  // versions, flags, method, time, date
    put<uint32_t>(directory_, {crc, narrow(record_.size), narrow(record_.size)});
    put<uint16_t>(directory_,
                  {static_cast<uint16_t>(name_bytes), static_cast<uint16_t>(zip64_bytes(wide)), 0, 0, 0});
    put<uint32_t>(directory_, {0, narrow(record_.header)});
    directory_.append(kRoot).append(record_.name);
    put_zip64(directory_, wide);
    ++records_;
  }

  std::string out_;
  uint64_t taken_ = 0;  // bytes of the archive before those in out_
  Record record_;       // the one that was begun last
  std::string directory_;
  uint16_t records_ = 0;
};

void add_head(ArchiveWriter& archive, std::string_view pickle) {
  archive.add("data.pkl", pickle);
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", "64");
  archive.add("byteorder", "little");
}

}  // namespace

std::string write_torch_archive(std::string_view pickle) {
  ArchiveWriter archive;
  add_head(archive, pickle);
  return archive.finish();
}

ArchiveFrame frame_torch_archive(std::string_view pickle, int64_t length, uint32_t crc32) {
  ArchiveWriter archive;
  add_head(archive, pickle);
  archive.begin("data/0", static_cast<uint64_t>(length));
  ArchiveFrame frame;
  frame.before = archive.take();
  archive.skip_data();
  archive.end(crc32);
  frame.after = archive.finish();
  return frame;
}

}  // namespace spolia
