#include "spolia/plan/transfer_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "spolia/base/checked.h"
#include "spolia/base/inline_vector.h"
#include "spolia/base/text.h"
#include "spolia/layout/coverage.h"
#include "spolia/state/tiling.h"

namespace spolia {
namespace {

Box whole_box(const TensorEntry& tensor) { return whole(addressable_shape(tensor.dtype, tensor.shape)); }

/// What the copy of a part or of all of `from` is, in boxes.
Region region_of(const RegionCopy& copy, const TensorEntry& from) {
  return copy.region != nullptr ? *copy.region : Region{whole_box(from), whole_box(from), {}};
}

/// Whether every dim of the target is a dim of the source, each of one at most and of its size, and whatever
/// is a dim of one side alone has size 1.
bool have_same_sizes(const Region& region) {
  const Box &source = region.source, &target = region.target;
  const size_t dims = region.permute.empty() ? source.ndim() : region.permute.size();
  if (dims != target.ndim() && target.ndim() > 0) return false;
  Dims left = source.sizes;  // sizes of the source's dims that are no dims of the target so far
  InlineVector<bool, 5> taken(source.ndim(), false);
  for (size_t d = 0; d < target.ndim(); ++d) {
    const int64_t from = source_dim(region, d);
    if (from < -1 || from >= std::ssize(left)) return false;
    if (from >= 0 && std::exchange(taken[static_cast<size_t>(from)], true)) return false;
    const int64_t size = from < 0 ? 1 : std::exchange(left[static_cast<size_t>(from)], 1);
    if (size != target.sizes[d]) return false;
  }
  return std::ranges::all_of(left, [](int64_t size) { return size == 1; });
}

void check_region(const Region& region, const TensorEntry& from, const TensorEntry& to) {
  const Dims from_shape = addressable_shape(from.dtype, from.shape);
  const Box &source = region.source, &target = region.target;
  if (!fits(source.offsets, source.sizes, from_shape)) {
    throw InvalidArgumentError("the box {} lies outside of tensor {} of shape {}", box_text(source),
                               quote(from.name), list_text(from_shape));
  }
  const bool same_sizes = have_same_sizes(region);
  if (!same_sizes) {
    throw InvalidArgumentError(
        "the box {} of tensor {} cannot become the box {} of tensor {}: their sizes differ", box_text(source),
        quote(from.name), box_text(target), quote(to.name));
  }
  bool castable = info(from.dtype).kind == DTypeKind::kFloat && info(to.dtype).kind == DTypeKind::kFloat;
  if (from.dtype != to.dtype && !castable) {
    throw UnsupportedError("tensor {} cannot be cast from {} to {}; only floating-point types are cast",
                           quote(from.name), name_of(from.dtype), name_of(to.dtype));
  }
}

void check_covered(const Catalog& source, const Catalog& target, const TransferPlan& plan) {
  std::vector<bool> used(source.tensors.size());
  for (const RegionCopy& copy : plan.copies) used[copy.source] = true;
  for (size_t s = 0; s < used.size(); ++s) {
    if (used[s]) require_tiled(source.tensors[s]);
  }
  for (size_t t = 0; t < target.tensors.size(); ++t) {
    const TensorEntry& tensor = target.tensors[t];
    require_tiled(tensor);
    const Dims shape = addressable_shape(tensor.dtype, tensor.shape);
    BoxList boxes(shape.size());
    for (const RegionCopy& copy : plan.copies_of(t)) {
      boxes.add(region_of(copy, source.tensors[copy.source]).target);
    }
    if (const Coverage coverage = check_coverage(boxes, shape); coverage.fault) {
      throw InvalidArgumentError("tensor {} would not be filled exactly: {}", quote(tensor.name),
                                 fault_text(*coverage.fault, shape));
    }
  }
}

/// The target's dim along which the source of its first copy runs fastest.
size_t fastest_dim(const TransferPlan& plan, size_t target, size_t ndim) {
  if (plan.copies_of(target).empty()) return ndim - 1;
  const RegionCopy& copy = plan.copies_of(target).front();
  if (copy.fastest_dim >= 0) return static_cast<size_t>(copy.fastest_dim);
  if (copy.region == nullptr || copy.region->permute.empty()) return ndim - 1;
  const Dims& permute = copy.region->permute;
  return static_cast<size_t>(std::ranges::max_element(permute) - permute.begin());
}

/// Whether a tensor's tiles are to be blocks, as long in the dim `fastest` as in the last.
bool lies_across(const Box& all, size_t fastest, bool row_major) {
  return !row_major && fastest + 1 < all.ndim();
}

/// Appends the tiles' parts, tensor by tensor. A tensor that must be cut has its tiles to itself; small ones
/// share.
void cut_into_tiles(TransferPlan& plan, const Catalog& target, std::span<const size_t> order, bool row_major,
                    int64_t block_bytes) {
  const int64_t tile_bytes = plan.tile_bytes;
  int64_t used = 0;  // bytes of the tile being filled
  auto close_tile = [&] {
    if (used > 0) plan.first_part.push_back(plan.parts.size());
    used = 0;
  };
  plan.first_part.push_back(0);
  auto add_part = [&](TilePart part, int64_t bytes) {
    if (used + bytes > tile_bytes) close_tile();
    plan.parts.push_back(part);
    used += bytes;
  };
  for (size_t t : order) {
    const TensorEntry& tensor = target.tensors[t];
    const int64_t width = element_bytes(tensor.dtype);
    const Box all = whole_box(tensor);
    if (all.empty()) continue;
    if (all.numel() <= tile_bytes / width) {
      add_part({.target = t}, all.numel() * width);
      continue;
    }
    close_tile();
    const size_t fastest = fastest_dim(plan, t, all.ndim());
    const bool across = lies_across(all, fastest, row_major);
    const int64_t most = (across ? block_bytes : tile_bytes) / width;
    if (across) plan.tile_bytes = std::max(plan.tile_bytes, std::min(block_bytes, all.numel() * width));
    for (Box& box :
         across&& all.numel() > most ? split_in_blocks(all, fastest, most) : split_row_major(all, most)) {
      const int64_t bytes = box.numel() * width;
      plan.boxes.push_back(std::move(box));
      add_part({t, plan.boxes.size() - 1}, bytes);
    }
    close_tile();
  }
  close_tile();
}

/// The files that hold a tensor's chunks, each once, in their order.
std::vector<std::string> files_of(const TensorEntry& tensor, const Catalog& target) {
  std::set<uint32_t> numbers;
  for (const Extent& extent : tensor.extents) numbers.insert(extent.file);
  std::vector<std::string> files;
  for (uint32_t file : numbers) files.push_back(target.files[file]);
  return files;
}

/// The sources of a target, each once, in the order in which its copies first name them.
std::vector<size_t> sources_of(const TransferPlan& plan, size_t target) {
  std::vector<size_t> sources;
  std::set<size_t> seen;
  for (const RegionCopy& copy : plan.copies_of(target)) {
    if (seen.insert(copy.source).second) sources.push_back(copy.source);
  }
  return sources;
}

std::string made_of(const TransferPlan& plan, const Catalog& source, const Catalog& target, size_t t) {
  std::string text;
  for (size_t s : sources_of(plan, t)) {
    const TensorEntry& from = source.tensors[s];
    text += fmt::format("{}{} ({} chunk{})", text.empty() ? "" : " + ", printable(from.name), from.chunks(),
                        from.chunks() == 1 ? "" : "s");
    if (from.dtype != target.tensors[t].dtype) text += fmt::format(" cast from {}", name_of(from.dtype));
  }
  return text;
}

}  // namespace

Box TransferPlan::box_of(const TilePart& part, const Catalog& target) const {
  return part.box == TilePart::kWhole ? whole_box(target.tensors[part.target]) : boxes[part.box];
}

size_t threads_within(int64_t memory, size_t wanted) {
  // Each thread has a tile and scratch; under a mebibyte each, threads cost more than they bring.
  constexpr int64_t kLeastPerThread = int64_t{2} << 20;
  return std::clamp<size_t>(static_cast<size_t>(memory / kLeastPerThread), 1, std::max<size_t>(wanted, 1));
}

TransferPlan plan_transfer(const Catalog& source, const Catalog& target, std::vector<RegionCopy> copies,
                           std::span<const size_t> order, const PlanOptions& options) {
  if (options.memory < kLeastMemory) {
    throw InvalidArgumentError("a memory budget of {} is too small; give {} or more",
                               human_bytes(options.memory), human_bytes(kLeastMemory));
  }
  TransferPlan plan;
  plan.threads = threads_within(options.memory, options.threads);
  // Three quarters of a thread's share are for its tile and its scratch, the rest is for decoders.
  constexpr int64_t kDecoderBytes = int64_t{3}
                                    << 20;  // the window and buffers of a frame by zstd's default level
  const int64_t share = options.memory / static_cast<int64_t>(plan.threads),
                room = share / 8 * 3 / 4096 * 4096;
  plan.tile_bytes = plan.scratch_bytes = std::min(options.largest_tile, room);
  // The larger a block, the longer the runs that it is read and written in.
  const int64_t block_bytes = std::min(8 * options.largest_tile, 2 * room - plan.scratch_bytes);
  plan.decoders = static_cast<size_t>(std::max<int64_t>(1, share / 4 / kDecoderBytes));

  if (!std::ranges::is_sorted(copies, {}, &RegionCopy::target)) {  // sorting takes as much memory again
    std::ranges::stable_sort(copies, {}, &RegionCopy::target);
  }
  plan.copies = std::move(copies);
  plan.first_copy.assign(target.tensors.size() + 1, 0);
  for (const RegionCopy& copy : plan.copies) {
    const TensorEntry &from = source.tensors[copy.source], &to = target.tensors[copy.target];
    const Region region = region_of(copy, from);
    check_region(region, from, to);
    ++plan.first_copy[copy.target + 1];
    plan.cost.bytes_read += region.source.numel() * element_bytes(from.dtype);
  }
  for (size_t t = 0; t < target.tensors.size(); ++t) plan.first_copy[t + 1] += plan.first_copy[t];
  check_covered(source, target, plan);

  cut_into_tiles(plan, target, order, options.row_major, block_bytes);
  plan.cost.tensors = static_cast<int64_t>(order.size());
  for (size_t t : order) plan.cost.bytes_written += target.tensors[t].bytes();
  plan.cost.buffer_bytes = (plan.tile_bytes + plan.scratch_bytes) * static_cast<int64_t>(plan.threads);
  return plan;
}

std::string plan_text(const TransferPlan& plan, const Catalog& source, const Catalog& target) {
  std::string text = fmt::format(
      "{} tensors, {} to read, {} to write, {} tiles of at most {} on {} threads, {} of buffers\n",
      plan.cost.tensors, human_bytes(plan.cost.bytes_read), human_bytes(plan.cost.bytes_written),
      plan.tiles(), human_bytes(plan.tile_bytes), plan.threads, human_bytes(plan.cost.buffer_bytes));
  for (size_t t = 0; t < target.tensors.size(); ++t) {
    const TensorEntry& tensor = target.tensors[t];
    text += fmt::format("{}  {}  {}  {} <- {}\n", fmt::join(files_of(tensor, target), ", "),
                        name_of(tensor.dtype), shape_text(tensor.shape), printable(tensor.name),
                        made_of(plan, source, target, t));
  }
  return text;
}

nlohmann::ordered_json plan_json(const TransferPlan& plan, const Catalog& source, const Catalog& target) {
  nlohmann::ordered_json::object_t tensors;
  tensors.reserve(target.tensors.size());
  for (size_t t = 0; t < target.tensors.size(); ++t) {
    const TensorEntry& tensor = target.tensors[t];
    nlohmann::ordered_json from = nlohmann::ordered_json::array();
    for (size_t s : sources_of(plan, t)) from.push_back(source.tensors[s].name);
    nlohmann::ordered_json entry = {{"dtype", name_of(tensor.dtype)},
                                    {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
                                    {"chunks", tensor.chunks()},
                                    {"files", files_of(tensor, target)},
                                    {"from", std::move(from)}};
    tensors.emplace_back(tensor.name, std::move(entry));  // operator[] would search for the name
  }
  return {{"bytes_read", plan.cost.bytes_read},
          {"bytes_written", plan.cost.bytes_written},
          {"buffer_bytes", plan.cost.buffer_bytes},
          {"tile_bytes", plan.tile_bytes},
          {"tiles", plan.tiles()},
          {"threads", plan.threads},
          {"tensors", std::move(tensors)}};
}

}  // namespace spolia
