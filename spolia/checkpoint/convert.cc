#include "spolia/checkpoint/convert.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <tuple>

#include <fmt/format.h>

#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/checkpoint/staged_folder.h"
#include "spolia/engine/file_sink.h"

namespace spolia {
namespace {

/// Selected tensors in the order in which the source's files hold them, so that files are read front to back.
void sort_by_place(std::vector<SelectedTensor>& selected, const Catalog& source) {
  std::ranges::stable_sort(selected, {}, [&](const SelectedTensor& s) {
    const std::vector<Extent>& extents = source.tensors[s.tensor].extents;
    return extents.empty() ? std::tuple(uint32_t{0}, int64_t{0})
                           : std::tuple(extents[0].file, extents[0].offset);
  });
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

}  // namespace

Conversion plan_conversion(const Catalog& source, const ConvertOptions& options) {
  if (options.dtype && info(*options.dtype).kind != DTypeKind::kFloat) {
    throw InvalidArgumentError("tensors are cast to float64, float32, float16 or bfloat16, not to {}",
                               name_of(*options.dtype));
  }
  std::vector<SelectedTensor> selected = select_tensors(source, options.selection);
  sort_by_place(selected, source);

  std::vector<SafetensorsSpec> specs;
  for (const SelectedTensor& s : selected) {
    const TensorEntry& tensor = source.tensors[s.tensor];
    const bool cast = options.dtype && info(tensor.dtype).kind == DTypeKind::kFloat;
    specs.push_back({s.name, cast ? *options.dtype : tensor.dtype, tensor.shape});
  }
  Conversion conversion;
  conversion.target = lay_out_hugging_face_folder(specs, options.max_shard_bytes);

  const Catalog& target = conversion.target.catalog;
  std::vector<RegionCopy> copies(target.tensors.size());
  for (const SelectedTensor& s : selected) {
    const size_t t = static_cast<size_t>(target.find_tensor(s.name) - target.tensors.data());
    copies[t] = copy_whole(source, s.tensor, t);
  }
  conversion.plan = plan_transfer(source, target, std::move(copies), conversion.target.order, options.plan);
  for (const ValueEntry& value : source.values) {
    if (name_below(options.selection.root, value.name, value.path)) conversion.left_out.push_back(value.name);
  }
  return conversion;
}

Report run_conversion(const Source& source, const Conversion& conversion, Store& store,
                      const std::filesystem::path& destination, const RunOptions& options) {
  Stopwatch watch;
  const HuggingFaceFolder& target = conversion.target;
  StagedFolder folder(store, destination);

  std::vector<std::unique_ptr<OutputFile>> files;
  for (size_t f = 0; f < target.catalog.files.size(); ++f) {
    files.push_back(folder.create(target.catalog.files[f]));
    files.back()->write(0, bytes_of(target.headers[f]));
  }
  FileSink sink(target.catalog, files);
  Report report =
      execute(conversion.plan, source, target.catalog, sink, {true, options.cancel, options.progress});

  watch.lap();
  files.push_back(folder.create(kHuggingFaceIndex));
  files.back()->write(0, bytes_of(target.index));
  parallel_for(
      conversion.plan.threads, files.size(), [&](size_t, size_t f) { files[f]->sync(); }, options.cancel);
  files.clear();
  if (options.cancel != nullptr) options.cancel->check();
  folder.publish();
  report.seconds["sync"] = watch.lap();

  for (const std::string& leftover : folder.leftovers()) {
    report.notes.push_back(
        fmt::format("{} is partial: if no other run is still writing it, it was left by one that was killed "
                    "and can be removed",
                    quote(leftover)));
  }
  return report;
}

}  // namespace spolia
