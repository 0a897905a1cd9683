#include "spolia/engine/tile_reader.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/text.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr int64_t kFreeGap = int64_t{8} << 10;     // reading over less costs a disk less than a second read
constexpr int64_t kLongRead = int64_t{256} << 10;  // long enough to go straight into place, alone

Dims byte_strides(std::span<const int64_t> sizes, int64_t width) {
  Dims strides = row_major_strides(sizes);
  for (int64_t& stride : strides) stride *= width;
  return strides;
}

/// The part of a copy's source that becomes `part`, a box inside its target box.
Box source_of(const RegionCopy& copy, const Box& part) {
  Box box{Dims(part.ndim()), Dims(part.ndim())};
  for (size_t d = 0; d < part.ndim(); ++d) {
    const size_t from = copy.permute.empty() ? d : static_cast<size_t>(copy.permute[d]);
    box.offsets[from] = copy.source_box.offsets[from] + part.offsets[d] - copy.target_box.offsets[d];
    box.sizes[from] = part.sizes[d];
  }
  return box;
}

/// Where, in bytes, the element at `offsets` lies in a block whose first element is that at `origin`.
int64_t byte_offset(std::span<const int64_t> offsets, std::span<const int64_t> origin,
                    std::span<const int64_t> strides) {
  int64_t sum = 0;
  for (size_t d = 0; d < offsets.size(); ++d) sum += (offsets[d] - origin[d]) * strides[d];
  return sum;
}

}  // namespace

std::vector<uint32_t> ChunkIndices::overlapping(size_t tensor, const Box& box) {
  const TensorEntry& entry = catalog_.tensors[tensor];
  if (entry.chunks() == 1) return {0};
  Slot& slot = indices_[tensor];
  std::call_once(slot.once, [&] { slot.index.emplace(entry.boxes); });
  return slot.index->overlapping(box);
}

TileReader::TileReader(ReadContext& context) : context_(context), scratch_(context.plan.scratch_bytes) {}

void TileReader::read(std::span<const TileRegion> regions, std::span<std::byte> out) {
  uses_.clear();
  ops_.clear();
  for (const TileRegion& region : regions) plan_region(region, out.data() + region.offset);

  auto place = [&](const ReadOp& op) {
    const Payload& payload = uses_[op.payload].payload;
    return std::tuple(payload.stored.file, payload.codec == Codec::kNone ? 0 : payload.stored.offset + 1,
                      position(op));
  };
  std::ranges::sort(ops_, {}, place);

  // Plain reads that are near each other become one, as long as scratch holds them.
  for (size_t begin = 0; begin < ops_.size();) {
    size_t end = begin + 1;
    const Payload& first = uses_[ops_[begin].payload].payload;
    int64_t until = position(ops_[begin]) + ops_[begin].length;
    auto joins = [&](const ReadOp& op) {
      const Payload& payload = uses_[op.payload].payload;
      return payload.codec == Codec::kNone && payload.stored.file == first.stored.file &&
             op.length < kLongRead && position(op) <= until + kFreeGap &&
             std::max(until, position(op) + op.length) - position(ops_[begin]) <= scratch_.size();
    };
    if (first.codec == Codec::kNone && ops_[begin].length < kLongRead) {
      for (; end < ops_.size() && joins(ops_[end]); ++end)
        until = std::max(until, position(ops_[end]) + ops_[end].length);
    }
    if (end - begin == 1) {
      run_alone(ops_[begin]);
    } else {
      run_together(std::span(ops_).subspan(begin, end - begin));
    }
    begin = end;
  }
}

void TileReader::plan_region(const TileRegion& region, std::byte* data) {
  const TensorEntry& target = context_.target.tensors[region.target];
  const Dims strides = byte_strides(region.box.sizes, element_bytes(target.dtype));
  for (const RegionCopy& copy : context_.plan.copies_of(region.target)) {
    const Box wanted = intersect(copy.target_box, region.box);
    if (wanted.empty()) continue;
    const TensorEntry& tensor = context_.source.catalog().tensors[copy.source];
    const Box from = source_of(copy, wanted);
    Dims from_strides(strides.size());  // the tile's strides in the order of the source's dims
    for (size_t d = 0; d < strides.size(); ++d) {
      from_strides[copy.permute.empty() ? d : static_cast<size_t>(copy.permute[d])] = strides[d];
    }
    std::byte* wanted_data = data + byte_offset(wanted.offsets, region.box.offsets, strides);

    for (uint32_t chunk : context_.indices.overlapping(copy.source, from)) {
      const Box chunk_box = addressable_box(tensor, chunk);
      const Box part = intersect(chunk_box, from);
      if (part.empty()) continue;
      const size_t use = uses_.size();
      uses_.push_back({copy.source, chunk, context_.source.payload(copy.source, chunk)});
      Block block{wanted_data + byte_offset(part.offsets, from.offsets, from_strides), from_strides,
                  target.dtype};
      plan_reads(uses_.back().payload, use, tensor.dtype, chunk_box, part, block, scratch_.size(), ops_);
    }
  }
}

/// Where the read starts: in its file, or, for a compressed item, in what it decodes to.
int64_t TileReader::position(const ReadOp& op) const {
  const Payload& payload = uses_[op.payload].payload;
  return op.offset + payload.offset + (payload.codec == Codec::kNone ? payload.stored.offset : 0);
}

void TileReader::run_together(std::span<const ReadOp> ops) {
  const int64_t begin = position(ops.front());
  int64_t end = begin;
  for (const ReadOp& op : ops) end = std::max(end, position(op) + op.length);
  const std::span<std::byte> bytes = scratch_.bytes().first(static_cast<size_t>(end - begin));
  context_.source.file(uses_[ops.front().payload].payload.stored.file).read(begin, bytes);
  bytes_read_ += end - begin;
  for (const ReadOp& op : ops) deliver(op, bytes.data() + (position(op) - begin));
}

void TileReader::run_alone(const ReadOp& op) {
  std::byte* bytes = op.in_place ? op.target.data : scratch_.data();
  fetch(uses_[op.payload].payload, op.offset, {bytes, static_cast<size_t>(op.length)});
  deliver(op, bytes);
}

/// Checks the bytes of a read and puts its elements in their places.
void TileReader::deliver(const ReadOp& op, std::byte* bytes) {
  const ChunkUse& use = uses_[op.payload];
  if (context_.check_crcs) {
    context_.ledger.add(context_.source.catalog(), use.tensor, use.chunk, use.payload, op.offset,
                        {bytes, static_cast<size_t>(op.length)});
  }
  if (op.dtype != op.target.dtype) {
    cast_strided(op.sizes, op.target.dtype, op.target.data, op.target.strides, op.dtype, bytes,
                 op.source_strides);
  } else if (op.in_place && bytes != op.target.data) {
    std::memcpy(op.target.data, bytes, static_cast<size_t>(op.length));
  } else if (!op.in_place) {
    copy_strided(op.sizes, element_bytes(op.dtype), op.target.data, op.target.strides, bytes,
                 op.source_strides);
  }
}

void TileReader::fetch(const Payload& payload, int64_t offset, std::span<std::byte> out) {
  if (payload.codec == Codec::kNone) {
    context_.source.file(payload.stored.file).read(payload.stored.offset + payload.offset + offset, out);
  } else {
    decoder_of(payload).read(payload.offset + offset, out);
  }
  bytes_read_ += static_cast<int64_t>(out.size());
}

void TileReader::close_decoders() {
  decoders_.clear();
  opened_.clear();
}

ByteSource& TileReader::decoder_of(const Payload& payload) {
  const PayloadKey key = key_of(payload);
  auto at = std::ranges::find(decoders_, key, &Decoder::key);
  if (at == decoders_.end()) {
    if (decoders_.size() >= context_.plan.decoders) decoders_.erase(decoders_.begin());
    if (!opened_.insert(key).second) ++decoders_reopened_;
    const Extent& stored = payload.stored;
    decoders_.push_back(
        {key, open_bytes(context_.source.file(stored.file), stored.offset, stored.length, payload.codec)});
  } else {
    std::rotate(at, at + 1, decoders_.end());
  }
  return *decoders_.back().bytes;
}

void TileReader::read_for_check(const CrcLedger::Gap& gap) {
  for (int64_t done = 0; done < gap.length; done += scratch_.size()) {
    const int64_t length = std::min(scratch_.size(), gap.length - done);
    const std::span<std::byte> bytes = scratch_.bytes().first(static_cast<size_t>(length));
    fetch(gap.payload, gap.offset + done, bytes);
    context_.ledger.add(context_.source.catalog(), gap.tensor, gap.chunk, gap.payload, gap.offset + done,
                        bytes);
  }
}

}  // namespace spolia
