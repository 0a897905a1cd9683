#include "spolia/assemble/sinks.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "spolia/assemble/stream_groups.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/format/safetensors/hugging_face_folder.h"
#include "spolia/format/safetensors/safetensors_target.h"

namespace spolia {
namespace {

/// Where a piece begins, in bytes of the whole output.
int64_t byte_offset(const StreamItem& item) {
  if (item.whole) return 0;
  const Dims strides = row_major_strides(addressable_shape(item.dtype, item.shape));
  int64_t first = 0;
  for (size_t d = 0; d < strides.size(); ++d) first += item.box.offsets[d] * strides[d];
  return first * element_bytes(item.memory.dtype);
}

std::span<const std::byte> bytes_of_item(const StreamItem& item) {
  return {item.memory.data, static_cast<size_t>(item.memory.bytes())};
}

/// The files of a folder of these outputs, and who writes each.
struct FolderPlan {
  std::unique_ptr<Target> target;
  std::vector<size_t> writers;  // of each file, a seat

  FolderPlan(std::span<const StreamOutput> outputs, size_t seats, const SafetensorsOptions& how) {
    TargetContents contents;
    contents.catalog.format = "stream";
    int64_t total = 0;
    for (const StreamOutput& output : outputs) {
      const int64_t bytes = byte_size(output.dtype, output.shape);
      total += bytes;
      contents.catalog.tensors.push_back(
          whole_tensor(output.name, output.dtype, output.shape, {0, 0, bytes}));
    }
    sort_entries(contents.catalog);
    contents.order.resize(outputs.size());
    std::iota(contents.order.begin(), contents.order.end(), size_t{0});
    const size_t ranks = how.writers == Writers::kOne ? 1 : seats;
    const int64_t shard =
        std::min(how.max_shard_bytes, std::max<int64_t>(1, total / static_cast<int64_t>(ranks)));
    target = make_safetensors_target(std::move(contents), shard);

    const Catalog& catalog = target->catalog();
    std::vector<int64_t> sizes(catalog.files.size()), loads(ranks);
    for (const TensorEntry& tensor : catalog.tensors)
      sizes[tensor.extents[0].file] += tensor.extents[0].length;
    std::vector<size_t> largest(sizes.size());
    std::iota(largest.begin(), largest.end(), size_t{0});
    std::ranges::stable_sort(largest, std::greater(), [&](size_t file) { return sizes[file]; });
    writers.resize(sizes.size());
    for (size_t file : largest) {
      writers[file] = static_cast<size_t>(std::ranges::min_element(loads) - loads.begin());
      loads[writers[file]] += sizes[file];
    }
  }
};

}  // namespace

std::map<std::string, StreamedTensor> stream_to_memory(Assembler& assembler) {
  std::map<std::string, StreamedTensor> all;
  for_each_item(assembler, [&](const StreamItem& item) {
    const auto [at, fresh] = all.try_emplace(std::string(item.name));
    StreamedTensor& tensor = at->second;
    if (fresh) tensor = {item.dtype, item.shape, Buffer(byte_size(item.dtype, item.shape))};
    const ConstView& from = item.memory;
    if (from.bytes() > 0) {
      std::byte* const to = tensor.memory.data() + byte_offset(item);
      backend_of(from.device).copy_to_host(to, from.data, from.bytes());
    }
    return true;
  });
  return all;
}

Report stream_to_safetensors(const StreamEnds& ends, const StateDict& state, AssemblerOptions options,
                             Store& store, const std::filesystem::path& destination,
                             const SafetensorsOptions& how) {
  const StreamGroups groups =
      ends.column == nullptr ? StreamGroups(*ends.row) : StreamGroups(ends.row, ends.column);
  const bool is_first = groups.seat() == 0;
  std::optional<FolderPlan> plan;
  options.pieces = true;
  options.names.reset();
  options.parts = 1;
  options.device = Device{};
  options.assign = [&](const StreamGrid& grid, std::span<StreamOutput> outputs) {
    plan.emplace(outputs, grid.seats(), how);
    std::vector<std::shared_ptr<const std::vector<size_t>>> only(grid.seats());
    for (StreamOutput& output : outputs) {
      const size_t writer = plan->writers[plan->target->catalog().find_tensor(output.name)->extents[0].file];
      if (only[writer] == nullptr) only[writer] = std::make_shared<const std::vector<size_t>>(1, writer);
      output.wanted_by = only[writer];
    }
  };
  std::unique_ptr<Assembler> assembler;
  if (ends.column == nullptr) {
    assembler = std::make_unique<Assembler>(*ends.row, state, options);
  } else {
    assembler = std::make_unique<Assembler>(ends.row, ends.column, state, options);
  }
  const Catalog& catalog = plan->target->catalog();

  std::optional<StagedFolder> staged;
  std::optional<OutputFolder> own;
  std::vector<OutputFile*> files(catalog.files.size());
  groups.agree("making the folder", [&] {
    if (is_first) staged.emplace(store, destination, how.existing);
  });
  const std::string path = groups.gather(is_first ? staged->path().string() : "").front();
  if (!is_first) own.emplace(store, path);
  OutputFolder& folder = is_first ? staged->files() : *own;
  groups.agree("making files", [&] {
    for (size_t file = 0; file < files.size(); ++file) {
      if (plan->writers[file] == groups.seat()) files[file] = &folder.create(catalog.files[file]);
    }
  });

  Report report;
  for_each_item(*assembler, [&](const StreamItem& item) {
    const Extent& extent = catalog.find_tensor(item.name)->extents[0];
    files[extent.file]->write(extent.offset + byte_offset(item), bytes_of_item(item));
    report.bytes_written += item.memory.bytes();
    if (item.last) ++report.tensors;
    return true;
  });
  report.bytes_sent = assembler->report().sent;
  report.buffer_bytes = assembler->report().peak_bytes;
  report.seconds["stream"] = assembler->report().seconds;

  const auto sync = [&] { how.durable ? folder.sync(1) : folder.close(); };
  groups.agree("writing", [&] {
    for (size_t file = 0; file < files.size(); ++file) {
      if (files[file] != nullptr)
        plan->target->finish_file(static_cast<uint32_t>(file), BlockChecksums(catalog, 0), *files[file],
                                  folder);
    }
    if (!is_first) sync();
  });
  groups.agree("publishing", [&] {
    if (!is_first) return;
    plan->target->finish(*source_in_memory({}, {}), {}, files.empty() ? nullptr : files.front(), folder);
    sync();
    staged->publish(how.durable);
    report.notes = staged->notes();
  });
  return report;
}

}  // namespace spolia
