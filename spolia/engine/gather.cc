#include "spolia/engine/gather.h"

#include <algorithm>
#include <utility>

namespace spolia {
namespace {

constexpr int64_t kFreeOverRead = int64_t{64} << 10;
constexpr int64_t kShortRun = int64_t{1} << 10;  // from here on a run is worth a read of its own

/// Whether elements at these strides (in bytes) lie one after the other in row-major order.
bool is_dense(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t width) {
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != width) return false;
    width *= sizes[d];
  }
  return true;
}

/// The payload's strides are the same for all boxes; what differs is where a box starts and how large it is.
class Gatherer {
 public:
  Gatherer(const Payload& payload, size_t payload_number, DType dtype, const Box& chunk,
           int64_t scratch_bytes, ReadPlan& plan)
      : payload_number_(payload_number),
        dtype_(dtype),
        width_(element_bytes(dtype)),
        first_(payload.first * width_),
        origin_(chunk.offsets),
        strides_(payload.strides),
        scratch_bytes_(scratch_bytes),
        plan_(plan) {
    for (int64_t& stride : strides_) stride *= width_;
  }

  void add(std::vector<WantedBox> wanted) {
    std::erase_if(wanted, [&](const WantedBox& want) {
      const bool alone = is_in_place(want) && bytes_of(want) >= kLongRead;
      if (alone) push({&want, 1});
      return alone;
    });
    if (!wanted.empty()) read_together(std::move(wanted));
  }

 private:
  int64_t bytes_of(const WantedBox& want) const {
    int64_t bytes = width_;
    for (size_t d = 0; d < strides_.size(); ++d) bytes *= strides_[d] == 0 ? 1 : want.box.sizes[d];
    return bytes;
  }
  int64_t begin_of(const WantedBox& want) const {
    int64_t begin = first_;
    for (size_t d = 0; d < strides_.size(); ++d) begin += (want.box.offsets[d] - origin_[d]) * strides_[d];
    return begin;
  }
  int64_t end_of(const WantedBox& want) const {
    int64_t end = begin_of(want) + width_;
    for (size_t d = 0; d < strides_.size(); ++d) end += (want.box.sizes[d] - 1) * strides_[d];
    return end;
  }
  bool is_in_place(const WantedBox& want) const {
    return want.target.dtype == dtype_ && is_dense(want.box.sizes, strides_, width_) &&
           is_dense(want.box.sizes, want.target.strides, width_);
  }

  void read_together(std::vector<WantedBox> wanted) {
    int64_t begin = begin_of(wanted.front()), end = begin, useful = 0;
    for (const WantedBox& want : wanted) {
      begin = std::min(begin, begin_of(want));
      end = std::max(end, end_of(want));
      useful += bytes_of(want);
    }
    const int64_t span = end - begin;
    const bool fits = span <= scratch_bytes_ && (span <= 2 * useful || span <= kFreeOverRead);
    if (fits || (wanted.size() == 1 && is_in_place(wanted.front()))) {
      push(wanted);
    } else if (wanted.size() > 1 || !push_runs(wanted.front())) {
      cut(std::move(wanted));
    }
  }

  /// Where the box is runs at even distances that fit the scratch, and are not too short: those, without what
  /// lies between. Else false.
  bool push_runs(const WantedBox& want) {
    std::vector<size_t> dims;
    for (size_t d = 0; d < strides_.size(); ++d) {
      if (want.box.sizes[d] > 1 && strides_[d] > 0) dims.push_back(d);
    }
    std::ranges::sort(dims, {}, [&](size_t d) { return strides_[d]; });
    int64_t run = width_;
    size_t inner = 0;
    for (; inner < dims.size() && strides_[dims[inner]] == run; ++inner) run *= want.box.sizes[dims[inner]];
    if (inner + 1 != dims.size()) return false;
    const size_t outer = dims.back();
    const int64_t runs = want.box.sizes[outer];
    if (run < kShortRun || run > strides_[outer] || runs > scratch_bytes_ / run) return false;
    ReadOp& op = plan_.ops.emplace_back();
    op.payload = payload_number_;
    op.offset = begin_of(want);
    op.length = run;
    op.runs = runs;
    op.distance = strides_[outer];
    op.first_piece = plan_.pieces.size();
    Dims packed = strides_;
    packed[outer] = run;
    plan_.pieces.push_back({0, want.box.sizes, packed, want.target});
    op.end_piece = plan_.pieces.size();
    return true;
  }

  /// Cuts where the boxes reach furthest in the payload, at half their indices, and reads each half.
  void cut(std::vector<WantedBox> wanted) {
    size_t widest = 0;
    int64_t middle = 0, widest_reach = -1;
    for (size_t d = 0; d < strides_.size(); ++d) {
      int64_t low = wanted.front().box.offsets[d], high = low;
      for (const WantedBox& want : wanted) {
        low = std::min(low, want.box.offsets[d]);
        high = std::max(high, want.box.offsets[d] + want.box.sizes[d]);
      }
      const int64_t reach = high - low > 1 ? strides_[d] : -1;
      if (reach > widest_reach) {
        widest = d;
        widest_reach = reach;
        middle = low + (high - low) / 2;
      }
    }
    std::vector<WantedBox> lower, upper;
    for (WantedBox& want : wanted) {
      const int64_t begin = want.box.offsets[widest], end = begin + want.box.sizes[widest];
      if (end <= middle) {
        lower.push_back(std::move(want));
      } else if (begin >= middle) {
        upper.push_back(std::move(want));
      } else {
        WantedBox low = want;
        low.box.sizes[widest] = middle - begin;
        lower.push_back(std::move(low));
        want.box.offsets[widest] = middle;
        want.box.sizes[widest] = end - middle;
        want.target.data += (middle - begin) * want.target.strides[widest];
        upper.push_back(std::move(want));
      }
    }
    wanted = {};
    read_together(std::move(lower));
    read_together(std::move(upper));
  }

  void push(std::span<const WantedBox> wanted) {
    ReadOp op;
    op.payload = payload_number_;
    op.offset = begin_of(wanted.front());
    int64_t end = op.offset;
    for (const WantedBox& want : wanted) {
      op.offset = std::min(op.offset, begin_of(want));
      end = std::max(end, end_of(want));
    }
    op.length = end - op.offset;
    op.in_place = wanted.size() == 1 && is_in_place(wanted.front());
    op.first_piece = plan_.pieces.size();
    for (const WantedBox& want : wanted) {
      plan_.pieces.push_back({begin_of(want) - op.offset, want.box.sizes, strides_, want.target});
    }
    op.end_piece = plan_.pieces.size();
    plan_.ops.push_back(op);
  }

  const size_t payload_number_;
  const DType dtype_;
  const int64_t width_;
  const int64_t first_;  // in bytes
  const Dims origin_;
  Dims strides_;  // in bytes
  const int64_t scratch_bytes_;
  ReadPlan& plan_;
};

}  // namespace

void plan_reads(const Payload& payload, size_t payload_number, DType dtype, const Box& chunk,
                std::span<const WantedBox> wanted, int64_t scratch_bytes, ReadPlan& plan) {
  Gatherer(payload, payload_number, dtype, chunk, scratch_bytes, plan).add({wanted.begin(), wanted.end()});
}

}  // namespace spolia
