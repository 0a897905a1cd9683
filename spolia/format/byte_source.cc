#include "spolia/format/byte_source.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

constexpr int64_t kWholeBytes = int64_t{1} << 20;    // decoded streams up to here are kept whole
constexpr int64_t kEndBytes = int64_t{64} << 10;     // of longer ones, this much of each end
constexpr int64_t kPieceBytes = int64_t{256} << 10;  // what is decoded at once while looking for the end
constexpr int64_t kInputBytes = int64_t{128} << 10;  // what is read at once from a compressed stream
constexpr int kWindowLog = 27;                       // zstd windows up to 128 MiB

bool is_inside(int64_t offset, int64_t length, int64_t size) {
  return offset >= 0 && length >= 0 && length <= size && offset <= size - length;
}

[[noreturn]] void throw_outside(int64_t offset, int64_t length, int64_t size, const std::string& where) {
  throw CorruptError("{}: bytes {} to {} + {} were asked for, but there are only {}", where, offset, offset,
                     length, size);
}

/// The first and last bytes of a source of known size.
struct Ends {
  int64_t size = 0;
  std::vector<std::byte> head;
  std::vector<std::byte> tail;

  /// Whether the range was kept; then `out` has it.
  bool read(int64_t offset, std::span<std::byte> out) const {
    int64_t length = std::ssize(out);
    if (is_inside(offset, length, std::ssize(head))) {
      std::copy_n(head.begin() + offset, length, out.begin());
      return true;
    }
    int64_t in_tail = offset - (size - std::ssize(tail));
    if (!is_inside(in_tail, length, std::ssize(tail))) return false;
    std::copy_n(tail.begin() + in_tail, length, out.begin());
    return true;
  }
};

class FileRange final : public ByteSource {
 public:
  FileRange(const InputFile& file, int64_t offset, int64_t length)
      : file_(file), offset_(offset), length_(length) {
    if (!is_inside(offset, length, file.size())) {
      throw CorruptError("{}: {} bytes at offset {} were expected, but the file has only {}",
                         quote(file.path().string()), length, offset, file.size());
    }
  }

  int64_t size() override { return length_; }
  void read(int64_t offset, std::span<std::byte> out) override {
    if (!is_inside(offset, std::ssize(out), length_)) {
      throw_outside(offset, std::ssize(out), length_, where());
    }
    file_.read(offset_ + offset, out);
  }
  std::string where() const override {
    return fmt::format("{}, from byte {}", quote(file_.path().string()), offset_);
  }

 private:
  const InputFile& file_;
  int64_t offset_;
  int64_t length_;
};

class SubRange final : public ByteSource {
 public:
  SubRange(ByteSource& outer, int64_t offset, int64_t length)
      : outer_(outer), offset_(offset), length_(length) {
    if (!is_inside(offset, length, outer.size())) {
      throw_outside(offset, length, outer.size(), outer.where());
    }
  }

  int64_t size() override { return length_; }
  void read(int64_t offset, std::span<std::byte> out) override {
    if (!is_inside(offset, std::ssize(out), length_)) {
      throw_outside(offset, std::ssize(out), length_, where());
    }
    outer_.read(offset_ + offset, out);
  }
  std::string where() const override { return fmt::format("{} + {}", outer_.where(), offset_); }

 private:
  ByteSource& outer_;
  int64_t offset_;
  int64_t length_;
};

class MemoryBytes final : public ByteSource {
 public:
  MemoryBytes(std::vector<std::byte> bytes, std::string where)
      : bytes_(std::move(bytes)), where_(std::move(where)) {}

  int64_t size() override { return std::ssize(bytes_); }
  void read(int64_t offset, std::span<std::byte> out) override {
    if (!is_inside(offset, std::ssize(out), size())) throw_outside(offset, std::ssize(out), size(), where_);
    std::copy_n(bytes_.begin() + offset, out.size(), out.begin());
  }
  std::string where() const override { return where_; }

 private:
  std::vector<std::byte> bytes_;
  std::string where_;
};

class EndsKept final : public ByteSource {
 public:
  EndsKept(std::unique_ptr<ByteSource> bytes, int64_t ends) : bytes_(std::move(bytes)) {
    ends_.size = bytes_->size();
    bool whole = ends_.size / 8 <= ends;
    ends_.head.resize(whole ? ends_.size : ends);
    bytes_->read(0, ends_.head);
    if (whole) return;
    ends_.tail.resize(ends);
    bytes_->read(ends_.size - ends, ends_.tail);
  }

  int64_t size() override { return ends_.size; }
  void read(int64_t offset, std::span<std::byte> out) override {
    if (!ends_.read(offset, out)) bytes_->read(offset, out);
  }
  std::string where() const override { return bytes_->where(); }

 private:
  std::unique_ptr<ByteSource> bytes_;
  Ends ends_;
};

/// What one call of a decoder did.
struct Step {
  size_t consumed = 0;
  size_t produced = 0;
  bool finished = false;
};

/// A compression library's streaming decoder. Its errors do not say where.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void restart() = 0;
  virtual Step step(std::span<const std::byte> in, std::span<std::byte> out) = 0;
};

class ZstdDecoder final : public Decoder {
 public:
  ZstdDecoder() : context_(ZSTD_createDCtx()) {
    if (context_ == nullptr) throw std::bad_alloc();
    ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kWindowLog);
  }

  void restart() override { ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only); }

  Step step(std::span<const std::byte> in, std::span<std::byte> out) override {
    ZSTD_inBuffer input{in.data(), in.size(), 0};
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    size_t code = ZSTD_decompressStream(context_.get(), &output, &input);
    if (ZSTD_isError(code)) {
      if (ZSTD_getErrorCode(code) == ZSTD_error_frameParameter_windowTooLarge) {
        throw UnsupportedError("the zstd frame wants a window of more than {}",
                               human_bytes(int64_t{1} << kWindowLog));
      }
      throw CorruptError("damaged zstd frame: {}", ZSTD_getErrorName(code));
    }
    return {input.pos, output.pos, code == 0};
  }

 private:
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  std::unique_ptr<ZSTD_DCtx, Free> context_;
};

class DeflateDecoder final : public Decoder {
 public:
  DeflateDecoder() {
    if (inflateInit2(&stream_, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~DeflateDecoder() override { inflateEnd(&stream_); }

  void restart() override { inflateReset(&stream_); }

  Step step(std::span<const std::byte> in, std::span<std::byte> out) override {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(in.data()));
    stream_.avail_in = static_cast<uInt>(std::min<size_t>(in.size(), kInputBytes));
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min<size_t>(out.size(), kPieceBytes));
    size_t given = stream_.avail_in;
    size_t room = stream_.avail_out;
    int code = inflate(&stream_, Z_NO_FLUSH);
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
      throw CorruptError("damaged deflate stream: {}",
                         stream_.msg == nullptr ? "no reason given" : stream_.msg);
    }
    return {given - stream_.avail_in, room - stream_.avail_out, code == Z_STREAM_END};
  }

 private:
  z_stream stream_{};
};

std::unique_ptr<Decoder> make_decoder(Codec codec) {
  if (codec == Codec::kZstd) return std::make_unique<ZstdDecoder>();
  return std::make_unique<DeflateDecoder>();
}

class DecodedBytes final : public ByteSource {
 public:
  DecodedBytes(std::unique_ptr<ByteSource> packed, Codec codec, int64_t limit)
      : packed_(std::move(packed)), decoder_(make_decoder(codec)), limit_(limit) {}

  int64_t size() override {
    if (!ends_) find_ends();
    return ends_->size;
  }

  void read(int64_t offset, std::span<std::byte> out) override {
    if (offset < 0) throw_outside(offset, std::ssize(out), ends_ ? ends_->size : 0, where());
    if (ends_ && ends_->read(offset, out)) return;
    if (offset < position_) restart();
    skip(offset - position_);
    if (decode(out) < out.size()) throw_outside(offset, std::ssize(out), position_, where());
  }

  std::string where() const override { return packed_->where() + ", decoded"; }

 private:
  void restart() {
    decoder_->restart();
    position_ = 0;
    packed_position_ = 0;
    pending_ = {};
    finished_ = false;
  }

  /// Decodes the stream once, keeping its ends.
  void find_ends() {
    restart();
    Ends ends;
    std::vector<std::byte> previous;
    std::vector<std::byte> piece;
    do {
      std::swap(previous, piece);
      piece.resize(kPieceBytes);
      piece.resize(decode(piece));
      if (position_ <= kWholeBytes) ends.head.insert(ends.head.end(), piece.begin(), piece.end());
    } while (std::ssize(piece) == kPieceBytes);
    ends.size = position_;
    if (ends.size > kWholeBytes) {
      ends.head.resize(kEndBytes);
      ends.head.shrink_to_fit();
      previous.insert(previous.end(), piece.begin(), piece.end());
      ends.tail.assign(previous.end() - kEndBytes, previous.end());
    }
    ends_ = std::move(ends);
  }

  void skip(int64_t count) {
    std::vector<std::byte> scratch(std::min(count, kPieceBytes));
    while (count > 0) {
      size_t wanted = static_cast<size_t>(std::min<int64_t>(count, std::ssize(scratch)));
      size_t got = decode(std::span(scratch).first(wanted));
      if (got == 0) throw_outside(position_ + count, 0, position_, where());
      count -= static_cast<int64_t>(got);
    }
  }

  /// Decodes the next bytes into `out`; fewer than asked for only at the stream's end.
  size_t decode(std::span<std::byte> out) {
    size_t done = 0;
    while (done < out.size() && !finished_) {
      if (pending_.empty()) refill();
      Step step = next_step(out.subspan(done));
      if (step.consumed == 0 && step.produced == 0) {
        throw CorruptError("{}: the compressed stream ends early, after {} bytes", where(), position_);
      }
      pending_ = pending_.subspan(step.consumed);
      done += step.produced;
      position_ += static_cast<int64_t>(step.produced);
      if (position_ > limit_) {
        throw CorruptError("{}: the compressed stream holds more than the {} bytes expected", where(),
                           limit_);
      }
      if (step.finished) finish();
    }
    return done;
  }

  Step next_step(std::span<std::byte> out) {
    try {
      return decoder_->step(pending_, out);
    } catch (const Error& error) {
      rethrow_with_context(error, where());
    }
  }

  void refill() {
    int64_t rest = packed_->size() - packed_position_;
    input_.resize(static_cast<size_t>(std::min(rest, kInputBytes)));
    packed_->read(packed_position_, input_);
    packed_position_ += std::ssize(input_);
    pending_ = input_;
  }

  void finish() {
    finished_ = true;
    int64_t left = std::ssize(pending_) + packed_->size() - packed_position_;
    if (left > 0) throw CorruptError("{}: {} bytes follow the compressed stream's end", where(), left);
  }

  std::unique_ptr<ByteSource> packed_;
  std::unique_ptr<Decoder> decoder_;
  int64_t limit_;
  std::optional<Ends> ends_;  // set by size()

  int64_t position_ = 0;                // of the next byte that decode() gives
  int64_t packed_position_ = 0;         // of the next byte that refill() reads
  std::vector<std::byte> input_;        // the piece of the compressed stream at hand
  std::span<const std::byte> pending_;  // what of it is not decoded yet
  bool finished_ = false;
};

std::unique_ptr<ByteSource> decoded(std::unique_ptr<ByteSource> packed, Codec codec, int64_t limit) {
  if (codec == Codec::kNone) return packed;
  return std::make_unique<DecodedBytes>(std::move(packed), codec, limit);
}

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const InputFile& file, int64_t offset, int64_t length, Codec codec,
                                       int64_t limit) {
  return decoded(std::make_unique<FileRange>(file, offset, length), codec, limit);
}

std::unique_ptr<ByteSource> open_bytes(ByteSource& outer, int64_t offset, int64_t length, Codec codec,
                                       int64_t limit) {
  return decoded(std::make_unique<SubRange>(outer, offset, length), codec, limit);
}

std::unique_ptr<ByteSource> keep_ends(std::unique_ptr<ByteSource> bytes, int64_t ends) {
  return std::make_unique<EndsKept>(std::move(bytes), ends);
}

std::unique_ptr<ByteSource> bytes_in_memory(std::vector<std::byte> bytes, std::string where) {
  return std::make_unique<MemoryBytes>(std::move(bytes), std::move(where));
}

std::vector<std::byte> read_all(ByteSource& source) {
  std::vector<std::byte> bytes(static_cast<size_t>(source.size()));
  source.read(0, bytes);
  return bytes;
}

}  // namespace spolia
