#include "spolia/engine/executor.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <zstd.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/layout/test_random.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

class BytesFile final : public InputFile {
 public:
  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return std::ssize(bytes); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (offset < 0 || offset + std::ssize(out) > size()) throw CorruptError("read past the end");
    std::memcpy(out.data(), bytes.data() + offset, out.size());
  }
  std::vector<std::byte> bytes;

 private:
  std::filesystem::path path_ = "memory";
};

/// A source made of one file in memory. Chunks are added with any strides and codec.
class FakeSource final : public Source {
 public:
  FakeSource() { catalog_.files = {"memory"}; }

  /// A tensor without chunks yet.
  void add_tensor(const std::string& name, DType dtype, const Dims& shape) {
    TensorEntry tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = shape;
    tensor.boxes = BoxList(shape.size());
    catalog_.tensors.push_back(std::move(tensor));
    payloads_.emplace_back();
  }

  /// A chunk of the last tensor whose payload is `payload`, packed by `codec`, after a few bytes of something
  /// else.
  void add_chunk(const Box& box, std::span<const std::byte> payload, int64_t first, const Dims& strides,
                 Codec codec) {
    std::vector<std::byte> item(5 + payload.size(), std::byte{0xEE});
    std::ranges::copy(payload, item.begin() + 5);
    if (codec == Codec::kZstd) {
      std::vector<std::byte> packed(ZSTD_compressBound(item.size()));
      packed.resize(ZSTD_compress(packed.data(), packed.size(), item.data(), item.size(), 1));
      item = std::move(packed);
    }
    TensorEntry& tensor = catalog_.tensors.back();
    const Extent extent{0, std::ssize(file_.bytes), std::ssize(item)};
    tensor.boxes.add(box);
    tensor.extents.push_back(extent);
    payloads_.back().push_back({extent, codec, 5, std::ssize(payload), first, strides, crc32(0, payload)});
    file_.bytes.insert(file_.bytes.end(), item.begin(), item.end());
  }

  Payload payload(size_t tensor, size_t chunk) const override { return payloads_[tensor][chunk]; }
  Value value(size_t) const override { return Value(); }
  const InputFile& file(uint32_t) const override { return file_; }

  std::vector<std::byte>& bytes() { return file_.bytes; }

 private:
  BytesFile file_;
  std::vector<std::vector<Payload>> payloads_;
};

/// Keeps whole target tensors in memory, and notes whether each tensor's tiles came in order.
class CollectingSink final : public TileSink {
 public:
  CollectingSink(const Catalog& target, bool ordered) : target_(target), ordered_(ordered) {
    for (const TensorEntry& tensor : target.tensors) {
      data.emplace_back(static_cast<size_t>(tensor.bytes()), std::byte{0xCD});
      filled.push_back(0);
    }
  }
  bool in_order() const override { return ordered_; }
  void put(size_t, std::span<const TileRegion> regions, std::span<std::byte> bytes) override {
    std::lock_guard lock(mutex_);
    for (const TileRegion& region : regions) {
      const TensorEntry& tensor = target_.tensors[region.target];
      const int64_t width = element_bytes(tensor.dtype);
      Dims strides = row_major_strides(tensor.shape), region_strides = row_major_strides(region.box.sizes);
      int64_t first = 0;
      for (size_t d = 0; d < strides.size(); ++d) {
        strides[d] *= width;
        region_strides[d] *= width;
        first += region.box.offsets[d] * strides[d];
      }
      in_order_seen = in_order_seen && filled[region.target] == first;
      filled[region.target] += region.box.numel() * width;
      copy_strided(region.box.sizes, width, data[region.target].data() + first, strides,
                   bytes.data() + region.offset, region_strides);
    }
  }
  std::vector<std::vector<std::byte>> data;
  std::vector<int64_t> filled;
  bool in_order_seen = true;

 private:
  const Catalog& target_;
  const bool ordered_;
  std::mutex mutex_;
};

/// A random tiling of a box: cut again and again.
void cut_randomly(const Box& box, int cuts, std::vector<Box>& out) {
  if (cuts > 0 && box.ndim() > 0) {
    const size_t dim = static_cast<size_t>(pick(0, static_cast<int64_t>(box.ndim())));
    if (box.sizes[dim] > 1) {
      Box low = box, high = box;
      low.sizes[dim] = pick(1, box.sizes[dim]);
      high.offsets[dim] += low.sizes[dim];
      high.sizes[dim] -= low.sizes[dim];
      cut_randomly(low, cuts - 1, out);
      cut_randomly(high, cuts - 1, out);
      return;
    }
  }
  out.push_back(box);
}

/// Adds a tensor of float32 whose element number i (row-major) is i + salt, in random chunks of random
/// strides and codecs.
void add_counting_tensor(FakeSource& source, const std::string& name, const Dims& shape, float salt) {
  source.add_tensor(name, DType::kFloat32, shape);
  const Dims global = row_major_strides(shape);
  std::vector<Box> boxes;
  cut_randomly(whole(shape), static_cast<int>(pick(0, 4)), boxes);
  for (const Box& box : boxes) {
    std::vector<size_t> dims(box.ndim());  // the order in which the payload runs, slowest first
    std::iota(dims.begin(), dims.end(), size_t{0});
    if (pick(0, 3) == 0) std::ranges::reverse(dims);
    const int64_t gap = pick(0, 2);
    Dims strides(box.ndim());
    int64_t stride = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      strides[dims[i]] = stride;
      stride = stride * box.sizes[dims[i]] + gap;
    }
    const int64_t first = gap * 3;
    std::vector<float> payload(static_cast<size_t>(first + stride), -1.0f);
    for (int64_t i = 0; i < box.numel(); ++i) {
      int64_t rest = i, at = first, number = 0;
      for (size_t d = box.ndim(); d-- > 0;) {
        const int64_t index = rest % box.sizes[d];
        rest /= box.sizes[d];
        at += index * strides[d];
        number += (box.offsets[d] + index) * global[d];
      }
      payload[static_cast<size_t>(at)] = static_cast<float>(number) + salt;
    }
    const Codec codec = *rc::gen::element(Codec::kNone, Codec::kNone, Codec::kZstd);
    source.add_chunk(box, std::as_bytes(std::span(payload)), first, strides, codec);
  }
}

struct Case {
  FakeSource source;
  Catalog target;
  std::vector<RegionCopy> copies;
  std::vector<size_t> order;

  void add_target(const std::string& name, DType dtype, const Dims& shape) {
    order.push_back(target.tensors.size());
    target.tensors.push_back(whole_tensor(name, dtype, shape, {0, 0, byte_size(dtype, shape)}));
  }

  /// With small tiles, so that small tensors are cut as large ones are.
  TransferPlan plan(size_t threads, int64_t tile_bytes, bool row_major = true) const {
    PlanOptions options{kLeastMemory, threads};
    options.largest_tile = tile_bytes;
    options.row_major = row_major;
    return plan_transfer(source.catalog(), target, copies, order, options);
  }
};

RC_GTEST_PROP(Executor, EveryElementArrives, ()) {
  Case c;
  c.target.files = {"out"};
  std::vector<Dims> permutes;
  const size_t tensors = static_cast<size_t>(pick(1, 4));
  for (size_t t = 0; t < tensors; ++t) {
    Dims shape;
    for (int64_t d = pick(0, 4); d > 0; --d) shape.push_back(pick(0, 12) == 0 ? 0 : pick(1, 30));
    const std::string name = fmt::format("t{}", t);
    add_counting_tensor(c.source, name, shape, static_cast<float>(t) * 0.5f);
    const bool reversed = *rc::gen::arbitrary<bool>(), cast = *rc::gen::arbitrary<bool>();
    Dims permute, target_shape = shape;
    if (reversed) {
      for (size_t d = shape.size(); d-- > 0;) permute.push_back(static_cast<int64_t>(d));
      std::ranges::reverse(target_shape);
    }
    permutes.push_back(permute);
    c.add_target(name, cast ? DType::kFloat64 : DType::kFloat32, target_shape);
    c.copies.push_back(copy_region(t, t, {whole(shape), whole(target_shape), permute}));
  }
  const size_t threads = static_cast<size_t>(pick(1, 4));
  const bool ordered = *rc::gen::arbitrary<bool>();
  CollectingSink sink(c.target, ordered);
  const int64_t tile_bytes = *rc::gen::element<int64_t>(8, 64, 1000, 1 << 20);
  const TransferPlan plan = c.plan(threads, tile_bytes, ordered);
  const Report report = execute(plan, c.source, c.target, sink, {});
  if (ordered) RC_ASSERT(sink.in_order_seen);

  int64_t chunks_with_bytes = 0;
  for (size_t t = 0; t < tensors; ++t) {
    const TensorEntry &from = c.source.catalog().tensors[t], &to = c.target.tensors[t];
    const Dims from_strides = row_major_strides(from.shape);
    for (int64_t i = 0; i < numel(to.shape); ++i) {
      int64_t rest = i, number = 0;
      for (size_t d = to.shape.size(); d-- > 0;) {
        const size_t from_dim = permutes[t].empty() ? d : static_cast<size_t>(permutes[t][d]);
        number += rest % to.shape[d] * from_strides[from_dim];
        rest /= to.shape[d];
      }
      const double expected = static_cast<double>(number) + static_cast<double>(t) * 0.5;
      double found;
      if (to.dtype == DType::kFloat64) {
        std::memcpy(&found, sink.data[t].data() + i * 8, 8);
      } else {
        float single;
        std::memcpy(&single, sink.data[t].data() + i * 4, 4);
        found = single;
      }
      RC_ASSERT(found == expected);
    }
    for (size_t chunk = 0; chunk < from.chunks(); ++chunk) chunks_with_bytes += !from.boxes[chunk].empty();
  }
  RC_ASSERT(report.crcs_checked == chunks_with_bytes);
}

/// A box of `sizes` somewhere in a shape that is a little larger.
Box placed(const Dims& sizes, Dims& shape) {
  Box box{Dims(sizes.size()), sizes};
  shape = sizes;
  for (size_t d = 0; d < sizes.size(); ++d) {
    box.offsets[d] = pick(0, 3);
    shape[d] += box.offsets[d] + pick(0, 3);
  }
  return box;
}

/// A region that fills `target`: from a box whose dims are the target's in a random order, without some of
/// those of size 1, and with some of size 1 of its own. `shape`: gets that of the source.
Region random_region(const Box& target, Dims& shape) {
  std::vector<int64_t> dims;  // of the target, -1: of the source alone
  for (size_t d = 0; d < target.ndim(); ++d) {
    if (target.sizes[d] > 1 || pick(0, 2) == 0) dims.push_back(static_cast<int64_t>(d));
  }
  for (int64_t more = pick(0, 3); more > 0; --more) dims.push_back(-1);
  for (size_t i = dims.size(); i > 1; --i)
    std::swap(dims[i - 1], dims[static_cast<size_t>(pick(0, static_cast<int64_t>(i)))]);
  Dims sizes, permute(target.ndim(), -1);
  for (size_t s = 0; s < dims.size(); ++s) {
    sizes.push_back(dims[s] < 0 ? 1 : target.sizes[static_cast<size_t>(dims[s])]);
    if (dims[s] >= 0) permute[static_cast<size_t>(dims[s])] = static_cast<int64_t>(s);
  }
  const Box source = placed(sizes, shape);
  return {source, target, permute};
}

RC_GTEST_PROP(Executor, EveryElementOfAnyRegionArrives, ()) {
  Case c;
  c.target.files = {"out"};
  Dims shape;
  for (int64_t d = pick(0, 5); d > 0; --d) shape.push_back(pick(0, 3) == 0 ? 1 : pick(1, 12));
  const bool cast = *rc::gen::arbitrary<bool>();
  c.add_target("t", cast ? DType::kFloat64 : DType::kFloat32, shape);
  std::vector<Box> boxes;
  cut_randomly(whole(shape), static_cast<int>(pick(0, 6)), boxes);  // up to 64: looked at, and indexed
  for (size_t s = 0; s < boxes.size(); ++s) {
    Dims source_shape;
    Region region = random_region(boxes[s], source_shape);
    add_counting_tensor(c.source, fmt::format("s{:02}", s), source_shape, 0);
    c.copies.push_back(copy_region(s, 0, std::move(region)));
  }
  const bool ordered = *rc::gen::arbitrary<bool>();
  CollectingSink sink(c.target, ordered);
  const TransferPlan plan =
      c.plan(static_cast<size_t>(pick(1, 4)), *rc::gen::element<int64_t>(8, 64, 1000, 1 << 20), ordered);
  execute(plan, c.source, c.target, sink, {});

  for (const RegionCopy& copy : c.copies) {
    const Region& region = *copy.region;
    const Dims from_strides = row_major_strides(c.source.catalog().tensors[copy.source].shape),
               to_strides = row_major_strides(shape);
    for (int64_t i = 0; i < region.target.numel(); ++i) {
      int64_t rest = i, place = 0, number = 0;
      for (size_t s = 0; s < from_strides.size(); ++s) number += region.source.offsets[s] * from_strides[s];
      for (size_t d = shape.size(); d-- > 0;) {
        const int64_t index = rest % region.target.sizes[d];
        rest /= region.target.sizes[d];
        place += (region.target.offsets[d] + index) * to_strides[d];
        if (region.permute[d] >= 0) number += index * from_strides[static_cast<size_t>(region.permute[d])];
      }
      double found;
      if (cast) {
        std::memcpy(&found, sink.data[0].data() + place * 8, 8);
      } else {
        float single;
        std::memcpy(&single, sink.data[0].data() + place * 4, 4);
        found = single;
      }
      RC_ASSERT(found == static_cast<double>(number));
    }
  }
}

Case one_large_tensor(Codec codec) {
  Case c;
  c.target.files = {"out"};
  c.source.add_tensor("w", DType::kFloat32, {100, 100});
  std::vector<float> payload(10000);
  std::iota(payload.begin(), payload.end(), 0.0f);
  c.source.add_chunk(whole(Dims{100, 100}), std::as_bytes(std::span(payload)), 0, {100, 1}, codec);
  c.add_target("w", DType::kFloat32, {100, 100});
  c.copies.push_back(copy_whole(0, 0));
  return c;
}

TEST(Executor, FindsAFlippedBit) {
  Case c = one_large_tensor(Codec::kNone);
  c.source.bytes()[20000] ^= std::byte{1};
  CollectingSink sink(c.target, false);
  EXPECT_THROW(execute(c.plan(2, 1000), c.source, c.target, sink, {}), CorruptError);
  EXPECT_NO_THROW(execute(c.plan(2, 1000), c.source, c.target, sink, {.check_crcs = false}));
}

TEST(Executor, ChecksTheRestOfAPayloadThatIsReadInPart) {
  Case c = one_large_tensor(Codec::kNone);
  c.target.tensors.clear();
  c.order.clear();
  c.add_target("w", DType::kFloat32, {10, 100});
  c.copies = {copy_region(0, 0, {Box{{0, 0}, {10, 100}}, whole(Dims{10, 100}), {}})};
  c.source.bytes()[39000] ^= std::byte{1};  // far behind the rows that are wanted
  CollectingSink sink(c.target, false);
  EXPECT_THROW(execute(c.plan(1, 1000), c.source, c.target, sink, {}), CorruptError);
}

TEST(Executor, DecodesACompressedTensorOnceHoweverManyTilesAndThreads) {
  Case c = one_large_tensor(Codec::kZstd);
  CollectingSink sink(c.target, false);
  const Report report = execute(c.plan(4, 1000), c.source, c.target, sink, {});
  EXPECT_EQ(report.bytes_read, 40000);
  EXPECT_TRUE(sink.in_order_seen);
}

TEST(Executor, StopsWhenCancelledAndWhenTheSinkThrows) {
  Case c = one_large_tensor(Codec::kNone);
  CancelToken cancel;
  cancel.cancel();
  CollectingSink sink(c.target, false);
  EXPECT_THROW(execute(c.plan(2, 1000), c.source, c.target, sink, {.cancel = &cancel}), CancelledError);

  struct ThrowingSink final : TileSink {
    void put(size_t, std::span<const TileRegion>, std::span<std::byte>) override {
      throw IoError("disk full");
    }
  } throwing;
  EXPECT_THROW(execute(c.plan(2, 1000), c.source, c.target, throwing, {}), IoError);
}

TEST(Executor, TellsProgressUpToTheTotal) {
  Case c = one_large_tensor(Codec::kNone);
  CollectingSink sink(c.target, false);
  int64_t last = 0;
  ExecuteOptions options;
  options.progress = [&](int64_t done, int64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, 40000);
    last = done;
  };
  execute(c.plan(2, 1000), c.source, c.target, sink, options);
  EXPECT_EQ(last, 40000);
}

}  // namespace
}  // namespace spolia
