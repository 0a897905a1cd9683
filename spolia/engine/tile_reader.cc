#include "spolia/engine/tile_reader.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/text.h"
#include "spolia/store/read_ahead.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

// Runs that are read one by one, this far apart at most, are read ahead with what lies between them: so far,
// and so much at a time.
constexpr int64_t kClose = int64_t{64} << 10, kAhead = int64_t{2} << 20, kHint = int64_t{128} << 10;
constexpr int64_t kFreeGap = int64_t{8} << 10;  // reading over less costs a disk less than a second read

Dims byte_strides(std::span<const int64_t> sizes, int64_t width) {
  Dims strides = row_major_strides(sizes);
  for (int64_t& stride : strides) stride *= width;
  return strides;
}

/// Where, in bytes, the element at `offsets` lies in a block whose first element is that at `origin`.
int64_t byte_offset(std::span<const int64_t> offsets, std::span<const int64_t> origin,
                    std::span<const int64_t> strides) {
  int64_t sum = 0;
  for (size_t d = 0; d < offsets.size(); ++d) sum += (offsets[d] - origin[d]) * strides[d];
  return sum;
}

}  // namespace

TileReader::TileReader(ReadContext& context) : context_(context), scratch_(context.plan.scratch_bytes) {}

void TileReader::plan(std::span<const TileRegion> regions, std::span<std::byte> out) {
  uses_.clear();
  use_of_.clear();
  reads_.clear();
  for (const TileRegion& region : regions) add_wanted(region, out.data() + region.offset);
  for (size_t use = 0; use < uses_.size(); ++use) {
    const ChunkUse& chunk = uses_[use];
    const TensorEntry& tensor = context_.source.catalog().tensors[chunk.tensor];
    plan_reads(chunk.payload, use, tensor.dtype, addressable_box(tensor, chunk.chunk), chunk.wanted,
               scratch_.size(), reads_);
  }
  auto place = [&](const ReadOp& op) {
    const Payload& payload = uses_[op.payload].payload;
    return std::tuple(payload.stored.file, payload.codec == Codec::kNone ? 0 : payload.stored.offset + 1,
                      position(op));
  };
  std::ranges::sort(reads_.ops, {}, place);
}

void TileReader::read() {
  const std::span<const ReadOp> ops = reads_.ops;
  // Plain reads that are near each other become one, as long as scratch holds them.
  for (size_t begin = 0; begin < ops.size();) {
    size_t end = begin + 1;
    const Payload& first = uses_[ops[begin].payload].payload;
    int64_t until = position(ops[begin]) + ops[begin].length;
    auto joins = [&](const ReadOp& op) {
      const Payload& payload = uses_[op.payload].payload;
      return payload.codec == Codec::kNone && payload.stored.file == first.stored.file && op.runs == 1 &&
             op.length < kLongRead && position(op) <= until + kFreeGap &&
             std::max(until, position(op) + op.length) - position(ops[begin]) <= scratch_.size();
    };
    if (first.codec == Codec::kNone && ops[begin].runs == 1 && ops[begin].length < kLongRead) {
      for (; end < ops.size() && joins(ops[end]); ++end)
        until = std::max(until, position(ops[end]) + ops[end].length);
    }
    if (end - begin == 1) {
      run_alone(ops[begin]);
    } else {
      run_together(ops.subspan(begin, end - begin));
    }
    begin = end;
  }
}

bool TileReader::is_plain_copy() const {
  return std::ranges::all_of(reads_.ops, [&](const ReadOp& op) {
    return op.in_place && op.length >= kLongRead && uses_[op.payload].payload.codec == Codec::kNone;
  });
}

void TileReader::for_each_copy(const std::function<void(const InputFile& file, int64_t offset,
                                                        const std::byte* place, int64_t length)>& copy) {
  for (const ReadOp& op : reads_.ops) {
    const InputFile& file = context_.source.file(uses_[op.payload].payload.stored.file);
    copy(file, position(op), reads_.pieces_of(op).front().target.data, op.length);
    bytes_read_ += op.length;
  }
}

/// Notes which boxes of which chunks become the region, whose elements lie at `data`.
void TileReader::add_wanted(const TileRegion& region, std::byte* data) {
  const TensorEntry& target = context_.target.tensors[region.target];
  const Dims strides = byte_strides(region.box.sizes, element_bytes(target.dtype));
  for (size_t c : context_.copies.overlapping(region.target, region.box)) {
    const RegionCopy& copy = context_.plan.copies[c];
    const TensorEntry& tensor = context_.source.catalog().tensors[copy.source];
    const Region* part_of = copy.region.get();
    const Box wanted = part_of == nullptr ? region.box : intersect(part_of->target, region.box);
    if (wanted.empty()) continue;
    const Box from = part_of == nullptr ? wanted : narrowed(*part_of, wanted).source;
    Dims from_strides(from.ndim(), 0);  // the region's strides, in the order of the source's dims
    for (size_t d = 0; d < strides.size(); ++d) {
      const int64_t dim = part_of == nullptr ? static_cast<int64_t>(d) : source_dim(*part_of, d);
      if (dim >= 0) from_strides[static_cast<size_t>(dim)] = strides[d];
    }
    std::byte* wanted_data = data + byte_offset(wanted.offsets, region.box.offsets, strides);

    for (uint32_t chunk : context_.chunks.overlapping(copy.source, from)) {
      Box part = intersect(addressable_box(tensor, chunk), from);
      if (part.empty()) continue;
      std::byte* part_data = wanted_data + byte_offset(part.offsets, from.offsets, from_strides);
      want(copy.source, chunk, {std::move(part), {part_data, from_strides, target.dtype}});
    }
  }
}

void TileReader::want(size_t tensor, uint32_t chunk, WantedBox box) {
  const auto [known, fresh] = use_of_.try_emplace({tensor, chunk}, uses_.size());
  if (fresh) uses_.push_back({tensor, chunk, context_.source.payload(tensor, chunk), {}});
  uses_[known->second].wanted.push_back(std::move(box));
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
  std::byte* bytes = op.in_place ? reads_.pieces_of(op).front().target.data : scratch_.data();
  const Payload& payload = uses_[op.payload].payload;
  // The tiles beside will want what lies between the runs: it comes from the disk once, in one go.
  const bool close = op.runs > 1 && op.distance <= kClose && payload.codec == Codec::kNone;
  const int64_t end = position(op) + (op.runs - 1) * op.distance + op.length;
  int64_t hinted = close ? position(op) / kHint * kHint : end;
  for (int64_t r = 0; r < op.runs; ++r) {
    const int64_t at = op.offset + r * op.distance;
    for (; hinted < std::min(end, position(op) + r * op.distance + kAhead); hinted += kHint) {
      if (context_.is_new_ahead(key_of(payload), hinted)) {
        read_ahead(context_.source.file(payload.stored.file), hinted, std::min(kHint, end - hinted));
      }
    }
    fetch(payload, at, {bytes + r * op.length, static_cast<size_t>(op.length)});
  }
  deliver(op, bytes);
}

/// Checks the bytes of a read and puts its elements in their places.
void TileReader::deliver(const ReadOp& op, const std::byte* bytes) {
  const ChunkUse& use = uses_[op.payload];
  const Catalog& catalog = context_.source.catalog();
  for (int64_t r = 0; context_.check_crcs && r < op.runs; ++r) {
    context_.ledger.add(catalog, use.tensor, use.chunk, use.payload, op.offset + r * op.distance,
                        {bytes + r * op.length, static_cast<size_t>(op.length)});
  }
  const DType dtype = catalog.tensors[use.tensor].dtype;
  for (const ReadPiece& piece : reads_.pieces_of(op)) {
    const Block& to = piece.target;
    const std::byte* from = bytes + piece.offset;
    if (dtype != to.dtype) {
      cast_strided(piece.sizes, to.dtype, to.data, to.strides, dtype, from, piece.strides);
    } else if (!op.in_place) {
      copy_strided(piece.sizes, element_bytes(dtype), to.data, to.strides, from, piece.strides);
    } else if (from != to.data) {
      std::memcpy(to.data, from, static_cast<size_t>(op.length));
    }
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
