// Convert: a checkpoint of any readable format into a folder of another, whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/selection.h"
#include "spolia/format/safetensors/hugging_face_folder.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"
#include "spolia/store/store.h"

namespace spolia {

struct ConvertOptions {
  Selection selection;
  std::optional<DType> dtype;  // cast floating-point tensors to this; others stay as they are
  int64_t max_shard_bytes = 5'000'000'000;
  PlanOptions plan;
};

/// All that is decided before a byte of a tensor is read.
struct Conversion {
  HuggingFaceFolder target;
  TransferPlan plan;
  std::vector<std::string> left_out;  // values below the root, which safetensors cannot hold
};

/// Decides what a conversion to a safetensors folder will write. Checks names, dtypes and exact coverage;
/// throws where something does not fit.
Conversion plan_conversion(const Catalog& source, const ConvertOptions& options);

struct RunOptions {
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// Carries it out: the folder appears under `destination` when everything is written and durable, else
/// nothing does. The source is only read. InvalidArgumentError where `destination` exists.
Report run_conversion(const Source& source, const Conversion& conversion, Store& store,
                      const std::filesystem::path& destination, const RunOptions& options);

}  // namespace spolia
