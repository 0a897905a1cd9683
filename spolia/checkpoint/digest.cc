#include "spolia/checkpoint/digest.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "spolia/base/hash.h"
#include "spolia/engine/executor.h"

namespace spolia {
namespace {

/// Hashes tiles as they come. A tensor's tiles come in order on one thread, so each tensor's state has one
/// user at a time.
class DigestSink final : public TileSink {
 public:
  explicit DigestSink(const Catalog& catalog) : catalog_(catalog), digests_(catalog.tensors.size()) {}

  bool in_order() const override { return true; }

  void put(size_t, std::span<const TileRegion> regions, std::span<std::byte> bytes) override {
    for (const TileRegion& region : regions) {
      const int64_t length = region.box.numel() * element_bytes(catalog_.tensors[region.target].dtype);
      State& state = digests_[region.target];
      if (!state.hash) state.hash.emplace();
      state.hash->update(bytes.subspan(static_cast<size_t>(region.offset), static_cast<size_t>(length)));
      state.hashed += length;
      if (state.hashed < catalog_.tensors[region.target].bytes()) continue;
      state.hex = state.hash->finish_hex();
      state.hash.reset();
    }
  }

  std::vector<std::string> take() {
    std::vector<std::string> hexes;
    for (State& state : digests_)
      hexes.push_back(state.hex.empty() ? Sha256().finish_hex() : std::move(state.hex));
    return hexes;
  }

 private:
  struct State {
    std::optional<Sha256> hash;
    int64_t hashed = 0;
    std::string hex;  // empty for a tensor without elements: no tile came
  };
  const Catalog& catalog_;
  std::vector<State> digests_;
};

}  // namespace

std::vector<std::string> digest_tensors(const Source& source, const DigestOptions& options) {
  const Catalog& catalog = source.catalog();
  std::vector<RegionCopy> copies;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) copies.push_back(copy_whole(t, t));
  return digest_copies(source, std::move(copies), whole_tensors(catalog), options);
}

std::vector<std::string> digest_copies(const Source& source, std::vector<RegionCopy> copies,
                                       const Catalog& target, const DigestOptions& options) {
  // One tensor is hashed by one thread from end to end: the largest go first, so that none is left for last.
  std::vector<size_t> order(target.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t t) { return target.tensors[t].bytes(); });

  PlanOptions row_major = options.plan;
  row_major.row_major = true;
  const TransferPlan plan = plan_transfer(source.catalog(), target, std::move(copies), order, row_major);
  DigestSink sink(target);
  execute(plan, source, target, sink, {true, options.cancel, options.progress});
  return sink.take();
}

}  // namespace spolia
