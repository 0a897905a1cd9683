// The payloads of a catalog's chunks, packed: 24 bytes a chunk for those that lie in their items as usual.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "spolia/format/source.h"

namespace spolia {

/// What is known of each chunk's payload. Thread-safe.
class PayloadTable {
 public:
  /// The catalog must outlive the table and keep its tensors as they are. No memory is taken before the
  /// first set().
  explicit PayloadTable(const Catalog& catalog);

  std::optional<Payload> find(size_t tensor, size_t chunk) const;
  void set(size_t tensor, size_t chunk, const Payload& payload);

 private:
  enum class Form : uint8_t {
    kUnknown,
    kDense,  // `stored` is the chunk's extent, `first` is 0, the strides are row-major
    kOther,  // in others_
  };
  struct Packed {
    int64_t offset = 0;
    int64_t length = 0;
    uint32_t crc32 = 0;
    bool has_crc32 = false;
    Codec codec = Codec::kNone;
    Form form = Form::kUnknown;
  };
  struct Shard {
    mutable std::mutex mutex;
    std::map<size_t, Payload> others;  // by chunk number
  };

  size_t number(size_t tensor, size_t chunk) const { return first_chunk_[tensor] + chunk; }
  bool is_dense(size_t tensor, size_t chunk, const Payload& payload) const;

  const Catalog& catalog_;
  std::vector<size_t> first_chunk_;  // a tensor's first chunk in the numbering of all chunks
  size_t chunks_ = 0;
  mutable std::once_flag allocated_;
  mutable std::vector<Packed> packed_;    // by chunk number; under the shard's mutex
  mutable std::array<Shard, 64> shards_;  // chunk number modulo 64
};

}  // namespace spolia
