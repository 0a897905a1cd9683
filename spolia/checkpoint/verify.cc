#include "spolia/checkpoint/verify.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

#include <fmt/format.h>

#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/device/buffer.h"
#include "spolia/engine/crc_ledger.h"
#include "spolia/format/byte_source.h"
#include "spolia/state/tiling.h"

namespace spolia {
namespace {

constexpr int64_t kPiece = int64_t{512} << 10;  // stays in a core's cache between the read and the checksum

struct ChunkRef {
  size_t tensor;
  size_t chunk;
};

/// All chunks, in the order of their files.
std::vector<ChunkRef> chunks_by_place(const Catalog& catalog) {
  std::vector<ChunkRef> chunks;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    for (size_t c = 0; c < catalog.tensors[t].chunks(); ++c) chunks.push_back({t, c});
  }
  std::ranges::stable_sort(chunks, {}, [&](const ChunkRef& ref) {
    const Extent& extent = catalog.tensors[ref.tensor].extents[ref.chunk];
    return std::pair(extent.file, extent.offset);
  });
  return chunks;
}

class Verifier {
 public:
  Verifier(const Source& source, const VerifyOptions& options)
      : source_(source),
        catalog_(source.catalog()),
        options_(options),
        buffers_(std::max<size_t>(options.threads, 1)) {}

  Verdict run() {
    const auto start = std::chrono::steady_clock::now();
    for (size_t t = 0; t < catalog_.tensors.size(); ++t) {
      if (auto fault = find_tiling_fault(catalog_.tensors[t])) add_fault({kTensors, t, 0, 0}, *fault);
    }
    const std::vector<ChunkRef> chunks = chunks_by_place(catalog_);
    for (const TensorEntry& tensor : catalog_.tensors) {
      for (const Extent& extent : tensor.extents) total_ += extent.length;
    }
    parallel_for(
        buffers_.size(), chunks.size(),
        [&](size_t worker, size_t i) {
          collecting({kTensors, chunks[i].tensor, chunks[i].chunk + 1, 0},
                     [&] { check_chunk(worker, chunks[i]); });
        },
        options_.cancel);
    parallel_for(
        buffers_.size(), catalog_.files.size(),
        [&](size_t, size_t f) {
          collecting({kFiles, f, 0, 0}, [&] { source_.check_file(static_cast<uint32_t>(f)); });
        },
        options_.cancel);
    for (size_t v = 0; v < catalog_.values.size(); ++v) {
      collecting({kValues, v, 0, 0}, [&] { source_.value(v); });
    }
    for (size_t f = 0; f < catalog_.unknown_files.size(); ++f) {
      add_fault(
          {kUnknownFiles, f, 0, 0},
          fmt::format("{}: nothing in the checkpoint refers to this file; it was left by another save, or "
                      "what named it is lost",
                      quote((catalog_.root / catalog_.unknown_files[f]).string())));
    }
    Verdict verdict;
    for (auto& [place, fault] : faults_) verdict.faults.push_back(std::move(fault));
    verdict.report = std::move(report_);
    verdict.report.tensors = static_cast<int64_t>(catalog_.tensors.size());
    verdict.report.seconds["verify"] =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return verdict;
  }

 private:
  enum Subject : size_t { kTensors, kFiles, kValues, kUnknownFiles };
  /// Where a fault belongs among the others: by subject and its number; in a tensor by chunk (0: the tensor
  /// itself) and block.
  using Place = std::array<size_t, 4>;

  template <class Body>
  void collecting(const Place& place, Body body) {
    try {
      body();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kCancelled) throw;
      add_fault(place, error.what());
    }
  }

  void add_fault(const Place& place, std::string fault) {
    std::lock_guard lock(mutex_);
    faults_.emplace(place, std::move(fault));
  }

  void check_chunk(size_t worker, const ChunkRef& ref) {
    const Payload payload = source_.payload(ref.tensor, ref.chunk);
    {
      std::lock_guard lock(mutex_);
      if (!seen_.emplace(key_of(payload), payload.length).second) return;  // tied tensors share their bytes
    }
    const auto bytes = open_bytes(source_.file(payload.stored.file), payload.stored.offset,
                                  payload.stored.length, payload.codec);
    const bool hashed = payload.has_checksums();
    const size_t blocks = hashed ? payload.checksum_blocks() : 0;
    int64_t right = 0;
    if (!hashed) read_to_end(worker, *bytes, payload.offset, payload.length, false);
    for (size_t b = 0; b < blocks; ++b) {
      const ChecksumBlock block = payload.checksum_block(b);
      const uint32_t crc = read_to_end(worker, *bytes, payload.offset + block.offset, block.length, true);
      if (crc == block.crc32) {
        ++right;
        continue;
      }
      collecting({kTensors, ref.tensor, ref.chunk + 1, b},
                 [&] { throw_crc_mismatch(catalog_, ref.tensor, ref.chunk, payload, block, crc); });
    }
    std::lock_guard lock(mutex_);
    report_.crcs_checked += right;
    report_.crcs_absent += !hashed;
    report_.bytes_read += payload.length;
    done_ += payload.stored.length;
    if (options_.progress) options_.progress(std::min(done_, total_), total_);
  }

  /// Reads a range of an item; its CRC-32 where it is to be hashed.
  uint32_t read_to_end(size_t worker, ByteSource& bytes, int64_t offset, int64_t length, bool hashed) {
    Buffer& buffer = buffers_[worker];
    if (buffer.size() == 0) buffer = Buffer(kPiece);
    uint32_t crc = 0;
    for (int64_t done = 0; done < length; done += kPiece) {
      if (options_.cancel != nullptr) options_.cancel->check();
      const auto piece = buffer.bytes().first(static_cast<size_t>(std::min(kPiece, length - done)));
      bytes.read(offset + done, piece);
      if (hashed) crc = crc32(crc, piece);
    }
    return crc;
  }

  const Source& source_;
  const Catalog& catalog_;
  const VerifyOptions& options_;
  std::vector<Buffer> buffers_;  // one a worker
  int64_t total_ = 0;

  std::mutex mutex_;  // guards what follows
  std::map<Place, std::string> faults_;
  std::set<std::pair<PayloadKey, int64_t>>
      seen_;  // with lengths: one without bytes starts where another does
  Report report_;
  int64_t done_ = 0;
};

}  // namespace

Verdict verify(const Source& source, const VerifyOptions& options) { return Verifier(source, options).run(); }

}  // namespace spolia
