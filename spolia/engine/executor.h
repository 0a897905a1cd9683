// The executor: runs a transfer plan. Reads what each tile is made of, checks it, transforms it, hands the
// tile to a sink.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/engine/tile.h"
#include "spolia/format/source.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

/// Where finished tiles go.
class TileSink {
 public:
  virtual ~TileSink() = default;
  /// Takes one tile: the elements of `regions`, each at its offset in `bytes`, in the target's dtypes. The
  /// bytes are the sink's to change until it returns. Called from several threads at once, with different
  /// tiles; `worker` < plan.threads tells which one it is. What it throws ends the execution.
  virtual void put(size_t worker, std::span<const TileRegion> regions, std::span<std::byte> bytes) = 0;
  /// The memory in which the elements of a tile's regions belong, one after the other as they would lie in
  /// its buffer: they are then read straight into it, and put() is called with it. Nothing where there is
  /// none such.
  virtual std::optional<std::span<std::byte>> memory_of(std::span<const TileRegion> /*regions*/) {
    return std::nullopt;
  }
  /// Where a region's elements belong, for a sink that need not see them on their way: they may be copied
  /// there inside the kernel, and put_copied() is called instead of put(). Nothing where they have to come.
  struct Place {
    OutputFile* file = nullptr;
    int64_t offset = 0;
  };
  virtual std::optional<Place> place_of(const TileRegion& /*region*/) const { return std::nullopt; }
  virtual void put_copied(size_t /*worker*/, std::span<const TileRegion> /*regions*/) {}
  /// Whether the tiles of one tensor must come in their order, one at a time. (Those of different tensors
  /// still come side by side.)
  virtual bool in_order() const { return false; }
};

struct ExecuteOptions {
  /// Compare stored checksums with the bytes read. Without, long runs of bytes that stay as they are do not
  /// pass through memory where the sink allows that.
  bool check_crcs = true;
  const CancelToken* cancel = nullptr;
  ProgressSink progress;
};

/// Runs the plan over `source` (whose catalog it was made from) on plan.threads threads. Memory: the plan's
/// buffers, the catalog's indices, and decoders of compressed items. Throws the first failure of any thread;
/// the sink has then had an unknown part of the tiles.
///
/// Where stored CRCs are checked, each touched payload is read to its end, so that none is used unchecked.
Report execute(const TransferPlan& plan, const Source& source, const Catalog& target, TileSink& sink,
               const ExecuteOptions& options);

}  // namespace spolia
