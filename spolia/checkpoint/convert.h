// Convert: a checkpoint of any readable format into a folder of another, whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/map_tensors.h"
#include "spolia/checkpoint/selection.h"
#include "spolia/checkpoint/staged_folder.h"
#include "spolia/comm/group.h"
#include "spolia/format/source.h"
#include "spolia/format/target.h"
#include "spolia/layout/layout_rules.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/store/store.h"

namespace spolia {

enum class TargetFormat {
  kSafetensors,  // a Hugging Face folder: whole tensors, no values
  kDcp,          // torch.distributed.checkpoint
  kSpolia,       // our own folder
};

struct ConvertOptions {
  Selection selection;
  /// What becomes of the selected tensors, by the names that the selection gives them. Values stay as they
  /// are.
  std::optional<MappingChoice> mapping;
  std::optional<DType> dtype;  // cast floating-point tensors to this, in the end; others stay as they are
  TargetFormat to = TargetFormat::kSafetensors;
  /// How ranks will share the tensors: each rank's boxes are written as that rank would have written them.
  /// Without, tensors are whole.
  std::optional<LayoutRules> layout;
  int64_t max_shard_bytes = 5'000'000'000;  // of tensors in a file, without a layout
  /// The files are to be at least so many, without a layout, where there are tensors enough: one a rank that
  /// writes.
  int64_t files = 1;
  bool checksums = true;  // whether checksums are computed and written
  PlanOptions plan;
};

/// All that is decided before a byte of a tensor is read.
struct Conversion {
  std::unique_ptr<const Target> target;
  TransferPlan plan;
  /// The source with what a mapping makes new, where it does: what `plan` counts. Borrows the source and the
  /// base.
  std::unique_ptr<const Source> joined;
  MappingReport mapping;

  const Source& read_from(const Source& source) const { return joined ? *joined : source; }
};

/// Decides what a conversion will write, from the source's catalog, and from where it says that a large
/// tensor's elements lie (Source::payload()). Checks names, dtypes, layouts and exact coverage; throws where
/// something does not fit. `base`: a checkpoint that has the tensors which the mapping calls new and does not
/// fill, under the names of the result; it outlives the conversion.
Conversion plan_conversion(const Source& source, const ConvertOptions& options, const Source* base = nullptr);

struct RunOptions {
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
  bool check_source = true;  // compare the source's checksums while reading
  bool read_back = false;  // read what was written, from the disk, and compare digests before it is published
  bool durable = true;     // wait until everything is on the disk
  Existing existing = Existing::kRefuse;  // what happens where the destination is there already
};

/// Carries it out: the folder appears under `destination` when everything is written and durable, else
/// nothing does. The source is only read. InvalidArgumentError where `destination` may not be replaced,
/// CorruptError where reading back finds other bytes.
Report run_conversion(const Source& source, const Conversion& conversion, Store& store,
                      const std::filesystem::path& destination, const RunOptions& options);

/// The same from all ranks of a group, each of which writes some of the files: largest first to the one with
/// the least. Collective over the group. `source` and `conversion` are the same on all ranks, and may be
/// shared by those that are threads; `plan` is the rank's part of memory and threads. Without as many files
/// as ranks, some have nothing to do. The report is of all ranks together.
Report convert_together(Group& group, const Source& source, const Conversion& conversion,
                        const PlanOptions& plan, Store& store, const std::filesystem::path& destination,
                        const RunOptions& options);

}  // namespace spolia
