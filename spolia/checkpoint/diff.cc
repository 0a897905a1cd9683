#include "spolia/checkpoint/diff.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/device/buffer.h"
#include "spolia/engine/executor.h"
#include "spolia/engine/tile_reader.h"
#include "spolia/plan/reading_order.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

// ---- Names ----

/// Which names take part.
class NameFilter {
 public:
  explicit NameFilter(const DiffOptions& options) : options_(options) {}

  bool takes(std::string_view name) const {
    return (options_.select.empty() || matches_any(options_.select, name)) &&
           !matches_any(options_.drop, name);
  }

  /// InvalidArgumentError where a pattern matches nothing in either catalog.
  void check(const Catalog& a, const Catalog& b) const {
    for (const auto* patterns : {&options_.select, &options_.drop}) {
      for (const std::string& pattern : *patterns) {
        const auto matches = [&](const auto& entry) { return glob_match(pattern, entry.name); };
        if (std::ranges::any_of(a.tensors, matches) || std::ranges::any_of(b.tensors, matches)) continue;
        if (std::ranges::any_of(a.values, matches) || std::ranges::any_of(b.values, matches)) continue;
        throw InvalidArgumentError("{} matches no name in either checkpoint", quote(pattern));
      }
    }
  }

 private:
  static bool matches_any(const std::vector<std::string>& patterns, std::string_view name) {
    return std::ranges::any_of(patterns, [&](const std::string& p) { return glob_match(p, name); });
  }

  const DiffOptions& options_;
};

struct Pair {
  size_t a, b;  // indices of entries with one name
};

/// Two lists of entries, each sorted by name, told apart by names.
struct Match {
  std::vector<Pair> both;
  std::vector<std::string> only_in_a, only_in_b;
};

template <class Entry>
Match match_names(const std::vector<Entry>& a, const std::vector<Entry>& b, const NameFilter& filter) {
  Match match;
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    const bool a_next = j == b.size() || (i < a.size() && a[i].name <= b[j].name);
    const bool b_next = i == a.size() || (j < b.size() && b[j].name <= a[i].name);
    const std::string& name = a_next ? a[i].name : b[j].name;
    if (filter.takes(name)) {
      if (a_next && b_next)
        match.both.push_back({i, j});
      else
        (a_next ? match.only_in_a : match.only_in_b).push_back(name);
    }
    i += a_next;
    j += b_next;
  }
  return match;
}

// ---- Elements ----

/// The dtype in which the elements of two tensors are compared; nothing where they are not.
std::optional<DType> common_dtype(const TensorEntry& a, const TensorEntry& b) {
  if (a.shape != b.shape) return std::nullopt;
  if (a.dtype == b.dtype) return a.dtype;
  const bool both_cast = can_cast(DType::kFloat64, a.dtype) && can_cast(DType::kFloat64, b.dtype);
  return both_cast ? std::optional(DType::kFloat64) : std::nullopt;
}

/// The index in a tensor of `shape` of element `n` of a box, in row-major order.
Dims index_in(const Box& box, int64_t n) {
  Dims index = box.offsets;
  for (size_t d = box.ndim(); d-- > 0; n /= box.sizes[d]) index[d] += n % box.sizes[d];
  return index;
}

/// What is found out about one tensor while its tiles come, in any order.
class TensorTally {
 public:
  /// Adds a region of the tensor, `dtype` elements at `a` and `b`.
  void add(DType dtype, const Box& box, const std::byte* a, const std::byte* b,
           const ElementDifferences& found) {
    differing_ += found.differing;
    nan_on_one_side_ += found.nan_on_one_side;
    max_absolute_ = std::max(max_absolute_, found.max_absolute);
    max_relative_ = std::max(max_relative_, found.max_relative);
    sums_.emplace_back(box.offsets, found.sum_absolute);
    if (found.first < 0) return;
    Dims index = index_in(box, found.first);
    if (!first_a_.empty() && !std::ranges::lexicographical_compare(index, first_)) return;
    first_ = std::move(index);
    first_a_ = element_text(dtype, a + found.first * element_bytes(dtype));
    first_b_ = element_text(dtype, b + found.first * element_bytes(dtype));
  }

  void finish(TensorDiff& diff) {
    diff.differing = differing_;
    diff.nan_on_one_side = nan_on_one_side_;
    diff.first = first_;
    diff.first_a = first_a_;
    diff.first_b = first_b_;
    diff.max_absolute = max_absolute_;
    diff.max_relative = max_relative_;
    // Rounding depends on the order of a sum: threads must not.
    std::ranges::sort(sums_, [](const auto& x, const auto& y) {
      return std::ranges::lexicographical_compare(x.first, y.first);
    });
    double sum = 0;
    for (const auto& [place, part] : sums_) sum += part;
    diff.mean_absolute = diff.elements == 0 ? 0 : sum / static_cast<double>(diff.elements);
  }

 private:
  int64_t differing_ = 0, nan_on_one_side_ = 0;
  double max_absolute_ = 0, max_relative_ = 0;
  std::vector<std::pair<Dims, double>> sums_;  // of the regions with differences, by their corners
  Dims first_;
  std::string first_a_, first_b_;
};

/// Takes the tiles of A, reads the same elements of B beside them, and compares.
class CompareSink final : public TileSink {
 public:
  CompareSink(const Catalog& common, const Source& b, const TransferPlan& plan_b, const DiffOptions& options)
      : common_(common),
        tolerance_(options.tolerance),
        b_(plan_b, b, common, /*check=*/true),
        workers_(plan_b.threads),
        tallies_(common.tensors.size()),
        in_order_(has_long_compressed()) {}

  bool in_order() const override { return in_order_; }

  void put(size_t worker, std::span<const TileRegion> regions, std::span<std::byte> bytes) override {
    Worker& reader = worker_at(worker);
    const std::span<std::byte> others = reader.tile.bytes().first(bytes.size());
    if (reader.last_target != regions.front().target) reader.reader.close_decoders();
    reader.last_target = regions.back().target;
    reader.reader.read(regions, others);
    for (const TileRegion& region : regions) compare(region, bytes.data(), others.data());
  }

  /// Reads what is missing for checksums of B, once all tiles are through.
  void check_rest(const CancelToken* cancel) {
    const std::vector<CrcLedger::Gap> gaps = b_.ledger.gaps();
    parallel_for(
        workers_.size(), gaps.size(),
        [&](size_t w, size_t gap) { worker_at(w).reader.read_for_check(gaps[gap]); }, cancel);
  }

  void finish(size_t tensor, TensorDiff& diff) { tallies_[tensor].finish(diff); }

  void add_to(Report& report) const {
    for (const auto& worker : workers_) {
      if (!worker) continue;
      report.bytes_read += worker->reader.bytes_read();
      report.decoders_reopened += worker->reader.decoders_reopened();
    }
    report.crcs_checked += b_.ledger.checked();
    report.buffer_bytes += b_.plan.cost.buffer_bytes;
  }

 private:
  struct Worker {
    TileReader reader;
    Buffer tile;
    size_t last_target = 0;
  };

  /// Whether B has a tensor of several tiles that is compressed: it is decoded forward.
  bool has_long_compressed() const {
    return std::ranges::any_of(b_.plan.copies, [&](const RegionCopy& copy) {
      return common_.tensors[copy.target].bytes() > b_.plan.tile_bytes &&
             b_.source.payload(copy.source, 0).codec != Codec::kNone;
    });
  }

  Worker& worker_at(size_t i) {
    if (!workers_[i])
      workers_[i] = std::make_unique<Worker>(Worker{TileReader(b_), Buffer(b_.plan.tile_bytes)});
    return *workers_[i];
  }

  void compare(const TileRegion& region, const std::byte* tile_a, const std::byte* tile_b) {
    const DType dtype = common_.tensors[region.target].dtype;
    const std::byte *a = tile_a + region.offset, *b = tile_b + region.offset;
    const ElementDifferences found = compare_elements(dtype, a, b, region.box.numel(), tolerance_);
    if (found.differing == 0 && found.sum_absolute == 0) return;
    std::lock_guard lock(mutex_);
    tallies_[region.target].add(dtype, region.box, a, b, found);
  }

  const Catalog& common_;
  const Tolerance tolerance_;
  ReadContext b_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::mutex mutex_;
  std::vector<TensorTally> tallies_;
  const bool in_order_;
};

/// The plan of reading one side; errors say which.
TransferPlan plan_side(const Source& source, const Catalog& common, std::vector<RegionCopy> copies,
                       std::span<const size_t> order, const PlanOptions& options) {
  try {
    return plan_transfer(source.catalog(), common, std::move(copies), order, options);
  } catch (const Error& error) {
    rethrow_with_context(error, quote(source.catalog().root.string()));
  }
}

/// The elements of the tensors that both have: those of `diffs` with a common dtype.
Report compare_tensors(const Source& a, const Source& b, std::span<const Pair> pairs,
                       std::vector<TensorDiff>& diffs, const DiffOptions& options) {
  Catalog common;  // as whole tensors, in the dtype in which they are compared
  common.files = {""};
  std::vector<RegionCopy> from_a, from_b;
  std::vector<size_t> diff_of, in_source_a;  // of each common tensor
  for (size_t i = 0; i < pairs.size(); ++i) {
    const TensorEntry &in_a = a.catalog().tensors[pairs[i].a], &in_b = b.catalog().tensors[pairs[i].b];
    const std::optional<DType> dtype = common_dtype(in_a, in_b);
    if (!dtype) continue;
    const size_t t = common.tensors.size();
    common.tensors.push_back(
        whole_tensor(in_a.name, *dtype, in_a.shape, {0, 0, byte_size(*dtype, in_a.shape)}));
    from_a.push_back(copy_whole(pairs[i].a, t));
    from_b.push_back(copy_whole(pairs[i].b, t));
    diff_of.push_back(i);
    in_source_a.push_back(pairs[i].a);
    diffs[i].compared = true;
    diffs[i].elements = numel(addressable_shape(*dtype, in_a.shape));
  }
  const std::vector<size_t> order = order_of_reading(in_source_a, a.catalog());
  PlanOptions half = options.plan;
  half.memory /= 2;
  const TransferPlan plan_a = plan_side(a, common, std::move(from_a), order, half);
  const TransferPlan plan_b = plan_side(b, common, std::move(from_b), order, half);
  CompareSink sink(common, b, plan_b, options);
  Report report = execute(plan_a, a, common, sink, {true, options.cancel, options.progress});
  sink.check_rest(options.cancel);
  sink.add_to(report);
  report.bytes_written = 0;
  for (size_t t = 0; t < diff_of.size(); ++t) sink.finish(t, diffs[diff_of[t]]);
  return report;
}

void check_options(const DiffOptions& options) {
  for (double part : {options.tolerance.relative, options.tolerance.absolute}) {
    if (!std::isfinite(part) || part < 0)
      throw InvalidArgumentError("a tolerance is a number from 0 up, not {}", part);
  }
  if (options.plan.memory / 2 < kLeastMemory) {
    throw InvalidArgumentError("a memory budget of {} is too small for two checkpoints; give {} or more",
                               human_bytes(options.plan.memory), human_bytes(2 * kLeastMemory));
  }
}

}  // namespace

bool Difference::is_equal() const {
  return tensors_only_in_a.empty() && tensors_only_in_b.empty() && values_only_in_a.empty() &&
         values_only_in_b.empty() && values.empty() && std::ranges::all_of(tensors, &TensorDiff::is_equal);
}

Difference diff(const Source& a, const Source& b, const DiffOptions& options) {
  check_options(options);
  const NameFilter filter(options);
  filter.check(a.catalog(), b.catalog());

  Difference difference;
  Match tensors = match_names(a.catalog().tensors, b.catalog().tensors, filter);
  for (const Pair& pair : tensors.both) {
    const TensorEntry &in_a = a.catalog().tensors[pair.a], &in_b = b.catalog().tensors[pair.b];
    TensorDiff& tensor = difference.tensors.emplace_back();
    tensor.name = in_a.name;
    tensor.dtype_a = in_a.dtype;
    tensor.dtype_b = in_b.dtype;
    tensor.shape_a = in_a.shape;
    tensor.shape_b = in_b.shape;
  }
  difference.tensors_only_in_a = std::move(tensors.only_in_a);
  difference.tensors_only_in_b = std::move(tensors.only_in_b);
  difference.report = compare_tensors(a, b, tensors.both, difference.tensors, options);
  if (!options.values) return difference;

  Match values = match_names(a.catalog().values, b.catalog().values, filter);
  for (const Pair& pair : values.both) {
    const Value in_a = a.value(pair.a), in_b = b.value(pair.b);
    if (in_a == in_b) continue;
    difference.values.push_back({a.catalog().values[pair.a].name, in_a.text(), in_b.text()});
  }
  difference.values_only_in_a = std::move(values.only_in_a);
  difference.values_only_in_b = std::move(values.only_in_b);
  difference.values_compared = values.both.size();
  return difference;
}

}  // namespace spolia
