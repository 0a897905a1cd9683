#include "spolia/checkpoint/verify.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

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
      if (auto fault = find_tiling_fault(catalog_.tensors[t])) add_fault({0, t, 0}, *fault);
    }
    const std::vector<ChunkRef> chunks = chunks_by_place(catalog_);
    for (const TensorEntry& tensor : catalog_.tensors) {
      for (const Extent& extent : tensor.extents) total_ += extent.length;
    }
    parallel_for(
        buffers_.size(), chunks.size(),
        [&](size_t worker, size_t i) {
          collecting({0, chunks[i].tensor, chunks[i].chunk + 1}, [&] { check_chunk(worker, chunks[i]); });
        },
        options_.cancel);
    for (size_t v = 0; v < catalog_.values.size(); ++v) {
      collecting({1, v, 0}, [&] { source_.value(v); });
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
  /// Where a fault belongs among the others: tensors (0) by number and chunk, then values (1).
  using Place = std::array<size_t, 3>;

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
      if (!seen_.insert(key_of(payload)).second) return;  // tied tensors share their bytes
    }
    const uint32_t crc = crc_of(worker, payload);
    if (payload.crc32 && crc != *payload.crc32)
      throw_crc_mismatch(catalog_, ref.tensor, ref.chunk, payload, crc);
    std::lock_guard lock(mutex_);
    ++(payload.crc32 ? report_.crcs_checked : report_.crcs_absent);
    report_.bytes_read += payload.length;
    done_ += payload.stored.length;
    if (options_.progress) options_.progress(std::min(done_, total_), total_);
  }

  /// Reads the payload to its end.
  uint32_t crc_of(size_t worker, const Payload& payload) {
    Buffer& buffer = buffers_[worker];
    if (buffer.size() == 0) buffer = Buffer(kPiece);
    const auto bytes = open_bytes(source_.file(payload.stored.file), payload.stored.offset,
                                  payload.stored.length, payload.codec);
    uint32_t crc = 0;
    for (int64_t done = 0; done < payload.length; done += kPiece) {
      if (options_.cancel != nullptr) options_.cancel->check();
      const auto piece = buffer.bytes().first(static_cast<size_t>(std::min(kPiece, payload.length - done)));
      bytes->read(payload.offset + done, piece);
      if (payload.crc32) crc = crc32(crc, piece);
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
  std::set<PayloadKey> seen_;
  Report report_;
  int64_t done_ = 0;
};

}  // namespace

Verdict verify(const Source& source, const VerifyOptions& options) { return Verifier(source, options).run(); }

}  // namespace spolia
