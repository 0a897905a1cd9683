#include "spolia/format/torch/payload_table.h"

namespace spolia {

PayloadTable::PayloadTable(const Catalog& catalog) : catalog_(catalog) {
  first_chunk_.reserve(catalog.tensors.size());
  for (const TensorEntry& tensor : catalog.tensors) {
    first_chunk_.push_back(chunks_);
    chunks_ += tensor.chunks();
  }
}

bool PayloadTable::is_dense(size_t tensor, size_t chunk, const Payload& payload) const {
  const TensorEntry& entry = catalog_.tensors[tensor];
  return payload.stored == entry.extents[chunk] && payload.first == 0 &&
         payload.strides == row_major_strides(entry.boxes.sizes(chunk));
}

std::optional<Payload> PayloadTable::find(size_t tensor, size_t chunk) const {
  std::call_once(allocated_, [&] { packed_.resize(chunks_); });
  size_t i = number(tensor, chunk);
  const Shard& shard = shards_[i % shards_.size()];
  std::lock_guard lock(shard.mutex);
  const Packed& packed = packed_[i];
  if (packed.form == Form::kUnknown) return std::nullopt;
  if (packed.form == Form::kOther) return shard.others.at(i);
  Payload payload;
  payload.stored = catalog_.tensors[tensor].extents[chunk];
  payload.codec = packed.codec;
  payload.offset = packed.offset;
  payload.length = packed.length;
  payload.strides = row_major_strides(catalog_.tensors[tensor].boxes.sizes(chunk));
  if (packed.has_crc32) payload.crc32 = packed.crc32;
  return payload;
}

void PayloadTable::set(size_t tensor, size_t chunk, const Payload& payload) {
  std::call_once(allocated_, [&] { packed_.resize(chunks_); });
  size_t i = number(tensor, chunk);
  Shard& shard = shards_[i % shards_.size()];
  std::lock_guard lock(shard.mutex);
  Packed& packed = packed_[i];
  if (!is_dense(tensor, chunk, payload)) {
    shard.others.insert_or_assign(i, payload);
    packed.form = Form::kOther;
    return;
  }
  packed = {payload.offset, payload.length, payload.crc32.value_or(0), payload.crc32.has_value(),
            payload.codec,  Form::kDense};
}

}  // namespace spolia
