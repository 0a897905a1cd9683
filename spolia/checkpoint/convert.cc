#include "spolia/checkpoint/convert.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/checkpoint/write_together.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/engine/file_sink.h"
#include "spolia/format/native/native_target.h"
#include "spolia/format/safetensors/safetensors_target.h"
#include "spolia/format/torch/dcp_target.h"
#include "spolia/plan/distribution.h"
#include "spolia/plan/reading_order.h"
#include "spolia/state/copy_index.h"

namespace spolia {
namespace {

/// The tensor as it will be called and typed; without chunks.
TensorEntry target_tensor(const TensorEntry& source, SelectedEntry&& selected, std::optional<DType> dtype) {
  TensorEntry tensor;
  tensor.name = std::move(selected.name);
  tensor.path = std::move(selected.path);
  tensor.dtype = dtype && info(source.dtype).kind == DTypeKind::kFloat ? *dtype : source.dtype;
  tensor.shape = source.shape;
  tensor.boxes = BoxList(tensor.shape.size());
  tensor.requires_grad = source.requires_grad;
  tensor.memory_format = source.memory_format;
  return tensor;
}

SelectedEntries select_sorted(const Catalog& source, const Selection& selection) {
  SelectedEntries selected = select_entries(source, selection);
  std::ranges::sort(selected.tensors, {}, &SelectedEntry::name);
  std::ranges::sort(selected.values, {}, &SelectedEntry::name);
  return selected;
}

/// What will be written, without chunks and writers. `sources`: gets the source's tensor for each of them.
TargetContents contents_of(SelectedEntries selected, const Catalog& source, const ConvertOptions& options,
                           std::vector<size_t>& sources) {
  TargetContents contents;
  contents.checksums = options.checksums;
  contents.catalog.tensors.reserve(selected.tensors.size());
  for (SelectedEntry& s : selected.tensors) {
    sources.push_back(s.index);
    contents.catalog.tensors.push_back(target_tensor(source.tensors[s.index], std::move(s), options.dtype));
  }
  for (SelectedEntry& s : selected.values) {
    contents.values.push_back({std::move(s.name), std::move(s.path), s.index});
  }
  contents.order = order_of_reading(sources, source);
  return contents;
}

/// Whether every value of `from` is one of `to`.
bool is_exact(DType to, DType from) {
  return to == from || to == DType::kFloat64 || (to == DType::kFloat32 && from != DType::kFloat64);
}

/// The last cast: of the tensors that a mapping makes to `dtype`. Two casts are done as one, so that the
/// first may not round.
void cast_mapped(MappedTensors& mapped, DType dtype, const Catalog& source) {
  for (const RegionCopy& copy : mapped.copies) {
    const DType from = source.tensors[copy.source].dtype, between = mapped.tensors[copy.target].dtype;
    if (info(between).kind != DTypeKind::kFloat || between == dtype || is_exact(between, from)) continue;
    fail_at(mapped.positions[copy.target],
            "{} is cast from {} to {}, and should then be cast to {}; leave out one of the casts",
            quote(mapped.tensors[copy.target].name), name_of(from), name_of(between), name_of(dtype));
  }
  for (TensorEntry& tensor : mapped.tensors) {
    if (info(tensor.dtype).kind == DTypeKind::kFloat) tensor.dtype = dtype;
  }
}

void require_distinct(const std::vector<TensorEntry>& tensors, const std::vector<TargetValue>& values) {
  for (const TargetValue& value : values) {
    const auto found = std::ranges::lower_bound(tensors, value.name, {}, &TensorEntry::name);
    if (found == tensors.end() || found->name != value.name) continue;
    throw InvalidArgumentError("the mapping makes a tensor {}, and there is a value of this name",
                               quote(value.name));
  }
}

/// The same of tensors that a mapping makes. `source`: what their copies count.
TargetContents contents_of(MappedTensors& mapped, std::vector<SelectedEntry> values, const Catalog& source,
                           const ConvertOptions& options) {
  if (mapped.tensors.empty())
    throw InvalidArgumentError("the mapping drops every tensor: nothing would be left");
  if (options.dtype) cast_mapped(mapped, *options.dtype, source);
  TargetContents contents;
  contents.checksums = options.checksums;
  contents.catalog.tensors = std::move(mapped.tensors);
  for (SelectedEntry& s : values) {
    contents.values.push_back({std::move(s.name), std::move(s.path), s.index});
  }
  require_distinct(contents.catalog.tensors, contents.values);
  std::vector<size_t> firsts(
      contents.catalog.tensors.size());  // what each begins with; any for one without elements
  for (size_t c = mapped.copies.size(); c-- > 0;) firsts[mapped.copies[c].target] = mapped.copies[c].source;
  contents.order = order_of_reading(firsts, source);
  return contents;
}

int64_t most_in_a_file(const Catalog& catalog, const ConvertOptions& options) {
  if (options.files <= 1) return options.max_shard_bytes;
  int64_t bytes = 0;
  for (const TensorEntry& tensor : catalog.tensors) bytes = checked_add(bytes, tensor.bytes());
  return std::clamp<int64_t>(ceil_div(bytes, options.files), 1, options.max_shard_bytes);
}

std::unique_ptr<Target> make_target(TargetContents contents, const ConvertOptions& options) {
  if (options.to == TargetFormat::kSafetensors) {
    if (options.layout) {
      throw InvalidArgumentError(
          "a Hugging Face folder holds whole tensors, so that no layout can be given; ranks' shards are "
          "written "
          "as dcp or spolia");
    }
    return make_safetensors_target(std::move(contents), most_in_a_file(contents.catalog, options));
  }
  contents.writers = options.layout
                         ? distribute(contents.catalog, *options.layout)
                         : pack(contents.catalog, contents.order, most_in_a_file(contents.catalog, options));
  return options.to == TargetFormat::kDcp ? make_dcp_target(std::move(contents))
                                          : make_spolia_target(std::move(contents));
}

/// The dim along which a large tensor's elements lie closest together in the source, where it is not the
/// last: it was transposed when it was saved. Its chunks are taken to be alike.
int fastest_dim(const Source& source, size_t tensor) {
  constexpr int64_t kLarge = int64_t{1} << 20;
  const TensorEntry& entry = source.catalog().tensors[tensor];
  const Dims shape = addressable_shape(entry.dtype, entry.shape);
  if (entry.bytes() < kLarge || shape.size() < 2 || entry.chunks() == 0) return -1;
  const Dims strides = source.payload(tensor, 0).strides;
  int fastest = -1;
  for (int d = 0; d < std::ssize(shape); ++d) {
    const auto at = static_cast<size_t>(d);
    if (shape[at] < 2 || strides[at] == 0) continue;
    if (fastest < 0 || strides[at] <= strides[static_cast<size_t>(fastest)]) fastest = d;
  }
  return fastest + 1 == std::ssize(shape) ? -1 : fastest;
}

/// Notes for each copy how its source is stored (RegionCopy::fastest_dim).
void add_fastest_dims(std::vector<RegionCopy>& copies, const Source& source) {
  std::vector<std::optional<int>> known(source.catalog().tensors.size());
  for (RegionCopy& copy : copies) {
    std::optional<int>& fastest = known[copy.source];
    if (!fastest) fastest = fastest_dim(source, copy.source);
    if (*fastest < 0 || copy.region == nullptr) {
      copy.fastest_dim = *fastest;
      continue;
    }
    for (size_t d = 0; d < copy.region->target.ndim(); ++d) {
      if (source_dim(*copy.region, d) == *fastest) copy.fastest_dim = static_cast<int>(d);
    }
  }
}

/// Seconds since it was made or last asked.
class Stopwatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(start_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Compares what lies in the folder with what the plan makes of the source.
void read_back(const Source& source, const Conversion& conversion, Store& store,
               const std::filesystem::path& folder, const RunOptions& options) {
  const std::shared_ptr<const Store> borrowed(std::shared_ptr<const Store>(), &store);
  const auto written = open_source(borrowed, folder);
  const Catalog target = whole_tensors(conversion.target->catalog());
  const PlanOptions plan{std::max(conversion.plan.cost.buffer_bytes, kLeastMemory), conversion.plan.threads};
  const std::vector<std::string> expected =
      digest_copies(source, conversion.plan.copies, target, {plan, options.cancel, {}});
  const std::vector<std::string> found = digest_tensors(*written, {plan, options.cancel, {}});
  const std::vector<TensorEntry>& tensors = written->catalog().tensors;
  for (size_t t = 0; t < target.tensors.size(); ++t) {
    if (tensors.size() == expected.size() && found[t] == expected[t] &&
        tensors[t].name == target.tensors[t].name) {
      continue;
    }
    throw CorruptError(
        "tensor {} reads back from {} with other bytes than were written: do not trust this disk or memory",
        quote(target.tensors[t].name), quote(folder.string()));
  }
}

/// The rank that writes each file: the largest first, to the rank with the least.
std::vector<int64_t> writers_of_files(const Catalog& target, int64_t ranks) {
  std::vector<int64_t> bytes(target.files.size());
  for (const TensorEntry& tensor : target.tensors) {
    for (const Extent& extent : tensor.extents) bytes[extent.file] += extent.length;
  }
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t file) { return bytes[file]; });
  std::vector<int64_t> writers(bytes.size()), loads(static_cast<size_t>(ranks));
  for (size_t file : order) {
    // Place 0 writes DCP's values into the first file.
    const auto least = file == 0 ? loads.begin() : std::ranges::min_element(loads);
    writers[file] = least - loads.begin();
    *least += bytes[file];
  }
  return writers;
}

/// The copies that fill the box of a target's tensor, as copies that fill a target of its own. `indices`: of
/// the plan's copies.
void add_copies_of(const TransferPlan& plan, CopyIndices& indices, const Catalog& source,
                   const Catalog& target, size_t tensor, const Box& box, size_t piece,
                   std::vector<RegionCopy>& copies) {
  const TensorEntry& entry = target.tensors[tensor];
  for (size_t c : indices.overlapping(tensor, box)) {
    const RegionCopy& copy = plan.copies[c];
    const Box all = whole(addressable_shape(entry.dtype, entry.shape));
    const Region region = copy.region != nullptr
                              ? *copy.region
                              : Region{whole(addressable_shape(source.tensors[copy.source].dtype,
                                                               source.tensors[copy.source].shape)),
                                       all,
                                       {}};
    const Box common = intersect(region.target, box);
    if (common.empty()) continue;
    Region part = narrowed(region, common);
    for (size_t d = 0; d < box.ndim(); ++d) part.target.offsets[d] -= box.offsets[d];
    copies.push_back(copy_region(copy.source, piece, std::move(part)));
    copies.back().fastest_dim = copy.fastest_dim;
  }
}

/// Sums of all ranks.
void add_up(Group& group, Report& report) {
  const std::vector<int64_t> own = {report.bytes_read, report.bytes_written, report.crcs_checked,
                                    report.decoders_reopened, report.buffer_bytes};
  std::vector<int64_t> sums(own.size());
  for (const std::vector<int64_t>& of_rank : all_gather_lists(group, own)) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_rank[i];
  }
  report.bytes_read = sums[0];
  report.bytes_written = sums[1];
  report.crcs_checked = sums[2];
  report.decoders_reopened = sums[3];
  report.buffer_bytes = sums[4];
}

}  // namespace

Conversion plan_conversion(const Source& from, const ConvertOptions& options, const Source* base) {
  if (options.dtype && info(*options.dtype).kind != DTypeKind::kFloat) {
    throw InvalidArgumentError("tensors are cast to float64, float32, float16 or bfloat16, not to {}",
                               name_of(*options.dtype));
  }
  SelectedEntries selected = select_sorted(from.catalog(), options.selection);
  Conversion conversion;
  std::vector<RegionCopy> copies;
  if (options.mapping) {
    MappedTensors mapped = map_tensors(from, selected.tensors, *options.mapping, base);
    conversion.joined = std::move(mapped.joined);
    conversion.mapping = std::move(mapped.report);
    TargetContents contents =
        contents_of(mapped, std::move(selected.values), conversion.read_from(from).catalog(), options);
    copies = std::move(mapped.copies);
    conversion.target = make_target(std::move(contents), options);
  } else {
    std::vector<size_t> sources;
    TargetContents contents = contents_of(std::move(selected), from.catalog(), options, sources);
    conversion.target = make_target(std::move(contents), options);
    copies.reserve(sources.size());
    for (size_t t = 0; t < sources.size(); ++t) copies.push_back(copy_whole(sources[t], t));
  }
  const Source& source = conversion.read_from(from);
  add_fastest_dims(copies, source);
  conversion.plan = plan_transfer(source.catalog(), conversion.target->catalog(), std::move(copies),
                                  conversion.target->order(), options.plan);
  return conversion;
}

Report run_conversion(const Source& from, const Conversion& conversion, Store& store,
                      const std::filesystem::path& destination, const RunOptions& options) {
  Stopwatch watch;
  const Source& source = conversion.read_from(from);
  const Target& target = *conversion.target;
  StagedFolder folder(store, destination, options.existing);
  std::vector<OutputFile*> files;
  for (const std::string& name : target.catalog().files) files.push_back(&folder.files().create(name));

  BlockChecksums checksums(target.catalog(), target.checksum_block());
  FileSink sink(target, files, checksums, conversion.plan.threads);
  Report report = execute(conversion.plan, source, target.catalog(), sink,
                          {options.check_source, options.cancel, options.progress});
  sink.finish();
  report.left_out = finish_all(target, source, checksums, files, folder.files());

  watch.lap();
  if (options.durable) folder.files().sync(conversion.plan.threads, options.cancel);
  report.seconds["sync"] = watch.lap();
  if (options.read_back) {
    read_back(source, conversion, store, folder.path(), options);
    report.seconds["read back"] = watch.lap();
  }
  if (options.cancel != nullptr) options.cancel->check();
  folder.publish(options.durable);
  report.seconds["sync"] += watch.lap();

  report.notes.insert(report.notes.end(), folder.notes().begin(), folder.notes().end());
  return report;
}

Report convert_together(Group& group, const Source& from, const Conversion& conversion,
                        const PlanOptions& plan, Store& store, const std::filesystem::path& destination,
                        const RunOptions& options) {
  const Source& source = conversion.read_from(from);
  const Target& target = *conversion.target;
  const Catalog& catalog = target.catalog();
  std::unique_ptr<const PieceTarget> pieces;
  TransferPlan transfer;
  std::vector<uint32_t> files;
  agree(group, "planning", [&] {
    const std::vector<int64_t> writers = writers_of_files(catalog, group.size());
    for (uint32_t file = 0; file < writers.size(); ++file) {
      if (writers[file] == group.place()) files.push_back(file);
    }
    CopyIndices indices(conversion.plan.copies, conversion.plan.first_copy);
    std::vector<PieceTarget::Piece> own;
    std::vector<RegionCopy> copies;
    for (size_t t : target.order()) {
      const TensorEntry& tensor = catalog.tensors[t];
      for (size_t c = 0; c < tensor.chunks(); ++c) {
        if (writers[tensor.extents[c].file] != group.place()) continue;
        add_copies_of(conversion.plan, indices, source.catalog(), catalog, t, addressable_box(tensor, c),
                      own.size(), copies);
        own.push_back({t, c});
      }
    }
    pieces = std::make_unique<const PieceTarget>(target, std::move(own));
    transfer = plan_transfer(source.catalog(), pieces->catalog(), std::move(copies), pieces->order(), plan);
  });
  const RankShare share{target, *pieces, transfer, source, source, std::move(files)};
  WriteOptions write{
      options.existing, options.durable, {options.check_source, options.cancel, options.progress}, {}};
  if (options.read_back) {
    write.check = [&](const std::filesystem::path& folder) {
      read_back(source, conversion, store, folder, options);
    };
  }
  Report report = write_together(group, share, store, destination, write);
  report.tensors = std::ssize(catalog.tensors);
  add_up(group, report);
  return report;
}

}  // namespace spolia
