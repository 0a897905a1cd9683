#include "spolia/checkpoint/convert.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/checkpoint/digest.h"
#include "spolia/engine/file_sink.h"
#include "spolia/format/native/native_target.h"
#include "spolia/format/safetensors/safetensors_target.h"
#include "spolia/format/torch/dcp_target.h"
#include "spolia/plan/distribution.h"
#include "spolia/plan/reading_order.h"

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

/// What will be written, without chunks and writers. `sources`: gets the source's tensor for each of them.
TargetContents select_contents(const Catalog& source, const ConvertOptions& options,
                               std::vector<size_t>& sources) {
  SelectedEntries selected = select_entries(source, options.selection);
  std::ranges::sort(selected.tensors, {}, &SelectedEntry::name);
  std::ranges::sort(selected.values, {}, &SelectedEntry::name);

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

std::unique_ptr<Target> make_target(TargetContents contents, const ConvertOptions& options) {
  if (options.to == TargetFormat::kSafetensors) {
    if (options.layout) {
      throw InvalidArgumentError(
          "a Hugging Face folder holds whole tensors, so that no layout can be given; ranks' shards are "
          "written "
          "as dcp or spolia");
    }
    return make_safetensors_target(std::move(contents), options.max_shard_bytes);
  }
  contents.writers = options.layout ? distribute(contents.catalog, *options.layout)
                                    : pack(contents.catalog, contents.order, options.max_shard_bytes);
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

}  // namespace

Conversion plan_conversion(const Source& from, const ConvertOptions& options) {
  const Catalog& source = from.catalog();
  if (options.dtype && info(*options.dtype).kind != DTypeKind::kFloat) {
    throw InvalidArgumentError("tensors are cast to float64, float32, float16 or bfloat16, not to {}",
                               name_of(*options.dtype));
  }
  std::vector<size_t> sources;
  TargetContents contents = select_contents(source, options, sources);

  Conversion conversion;
  conversion.target = make_target(std::move(contents), options);
  std::vector<RegionCopy> copies;
  copies.reserve(sources.size());
  for (size_t t = 0; t < sources.size(); ++t) {
    copies.push_back(copy_whole(sources[t], t));
    copies.back().fastest_dim = fastest_dim(from, sources[t]);
  }
  conversion.plan = plan_transfer(source, conversion.target->catalog(), std::move(copies),
                                  conversion.target->order(), options.plan);
  return conversion;
}

Report run_conversion(const Source& source, const Conversion& conversion, Store& store,
                      const std::filesystem::path& destination, const RunOptions& options) {
  Stopwatch watch;
  const Target& target = *conversion.target;
  StagedFolder folder(store, destination, options.existing);
  std::vector<OutputFile*> files;
  for (const std::string& name : target.catalog().files) files.push_back(&folder.files().create(name));

  BlockChecksums checksums(target.catalog(), target.checksum_block());
  FileSink sink(target, files, checksums, conversion.plan.threads);
  Report report = execute(conversion.plan, source, target.catalog(), sink,
                          {options.check_source, options.cancel, options.progress});
  sink.finish();
  report.left_out = target.finish(source, checksums, files, folder.files());

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

}  // namespace spolia
