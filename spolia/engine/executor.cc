#include "spolia/engine/executor.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "spolia/base/threads.h"
#include "spolia/engine/tile_reader.h"

namespace spolia {
namespace {

/// A run of tiles that one thread does in order: [first, end).
struct Lane {
  size_t first;
  size_t end;
};

/// Whether a target tensor is made of compressed items: those are decoded forward, so its tiles should come
/// in order. Writers pack all items of a tensor alike; were they mixed, reading would only be slower.
bool is_compressed(const TransferPlan& plan, const Source& source, size_t target) {
  return std::ranges::any_of(plan.copies_of(target), [&](const RegionCopy& copy) {
    const TensorEntry& tensor = source.catalog().tensors[copy.source];
    return tensor.chunks() > 0 && source.payload(copy.source, 0).codec != Codec::kNone;
  });
}

/// Each tile is a lane, but those of one tensor that must be read in order are one together.
std::vector<Lane> make_lanes(const TransferPlan& plan, const Source& source, bool all_in_order) {
  std::vector<Lane> lanes;
  for (size_t tile = 0; tile < plan.tiles();) {
    const size_t target = plan.tile(tile).front().target;
    size_t end = tile + 1;
    while (end < plan.tiles() && plan.tile(end).front().target == target) ++end;
    if (all_in_order || (end - tile > 1 && is_compressed(plan, source, target))) {
      lanes.push_back({tile, end});
    } else {
      for (size_t t = tile; t < end; ++t) lanes.push_back({t, t + 1});
    }
    tile = end;
  }
  return lanes;
}

/// Copies a tile from file to file, where it is long runs of bytes that stay as they are. False where it is
/// not, or where the sink wants to see it.
bool copy_inside_kernel(TileReader& reader, const TileSink& sink, std::span<const TileRegion> regions,
                        std::span<std::byte> out) {
  if (!reader.is_plain_copy()) return false;
  std::vector<TileSink::Place> places;
  for (const TileRegion& region : regions) {
    const std::optional<TileSink::Place> place = sink.place_of(region);
    if (!place) return false;
    places.push_back(*place);
  }
  reader.for_each_copy([&](const InputFile& file, int64_t from, const std::byte* data, int64_t length) {
    const int64_t at = data - out.data();
    const auto after = std::ranges::upper_bound(regions, at, {}, &TileRegion::offset);
    const size_t region = static_cast<size_t>(after - regions.begin()) - 1;
    const TileSink::Place& place = places[region];
    const int64_t to = place.offset + at - regions[region].offset;
    place.file->copy_from(file, from, to, length);
    place.file->start_writeback(to, length);
  });
  return true;
}

/// Adds up what the threads did and tells the progress sink, one thread at a time.
class ProgressCounter {
 public:
  ProgressCounter(const ProgressSink& sink, int64_t total) : sink_(sink), total_(total) {}
  void add(int64_t bytes) {
    if (!sink_) return;
    std::lock_guard lock(mutex_);
    done_ += bytes;
    sink_(std::min(done_, total_), total_);
  }

 private:
  const ProgressSink& sink_;
  const int64_t total_;
  std::mutex mutex_;
  int64_t done_ = 0;
};

}  // namespace

Report execute(const TransferPlan& plan, const Source& source, const Catalog& target, TileSink& sink,
               const ExecuteOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  ReadContext context(plan, source, target, options.check_crcs);
  ChunkIndices target_chunks(target);
  ProgressCounter progress(options.progress, plan.cost.bytes_written);

  struct Worker {
    TileReader reader;
    Buffer tile;
  };
  std::vector<std::unique_ptr<Worker>> workers(plan.threads);
  auto worker_at = [&](size_t i) -> Worker& {
    if (!workers[i])
      workers[i] = std::make_unique<Worker>(Worker{TileReader(context), Buffer(plan.tile_bytes)});
    return *workers[i];
  };

  const std::vector<Lane> lanes = make_lanes(plan, source, sink.in_order());
  parallel_for(
      plan.threads, lanes.size(),
      [&](size_t w, size_t lane) {
        Worker& worker = worker_at(w);
        for (size_t tile = lanes[lane].first; tile < lanes[lane].end; ++tile) {
          if (options.cancel != nullptr) options.cancel->check();
          const std::vector<TileRegion> regions = regions_of(plan, tile, target, target_chunks);
          const int64_t bytes = bytes_of(regions, target);
          const std::optional<std::span<std::byte>> memory = sink.memory_of(regions);
          const std::span<std::byte> out =
              memory ? *memory : worker.tile.bytes().first(static_cast<size_t>(bytes));
          worker.reader.plan(regions, out);
          if (!options.check_crcs && copy_inside_kernel(worker.reader, sink, regions, out)) {
            sink.put_copied(w, regions);
          } else {
            worker.reader.read();
            sink.put(w, regions, out);
          }
          progress.add(bytes);
        }
        worker.reader.close_decoders();
      },
      options.cancel);

  // What a view or a slice left unread of a payload is read now: its checksum is over all of it.
  const std::vector<CrcLedger::Gap> gaps = context.ledger.gaps();
  parallel_for(
      plan.threads, gaps.size(), [&](size_t w, size_t gap) { worker_at(w).reader.read_for_check(gaps[gap]); },
      options.cancel);

  Report report;
  report.seconds["transfer"] =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& worker : workers) {
    if (!worker) continue;
    report.bytes_read += worker->reader.bytes_read();
    report.decoders_reopened += worker->reader.decoders_reopened();
  }
  report.bytes_written = plan.cost.bytes_written;
  report.tensors = plan.cost.tensors;
  report.crcs_checked = context.ledger.checked();
  report.buffer_bytes = plan.cost.buffer_bytes;
  return report;
}

}  // namespace spolia
