#include "spolia/plan/distribution.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

/// The ranks that hold each shard of a layout: owners[shard][replica], shards by their ids.
using Owners = std::vector<std::vector<int64_t>>;

Owners owners_of(const Layout& layout) {
  Owners owners;
  for (int64_t rank : layout.mesh().ranks()) {
    const size_t shard = static_cast<size_t>(*layout.shard_id(rank));
    if (shard >= owners.size()) owners.resize(shard + 1);
    if (owners[shard].empty()) owners[shard] = layout.replicas(rank);
  }
  return owners;
}

/// A shape cut by a layout.
struct Shards {
  const Owners* owners = nullptr;
  std::vector<BoxList> boxes;     // of each shard, in the order of its local buffer
  std::vector<int64_t> elements;  // likewise
  size_t chunks = 0;              // boxes of all shards

  size_t replicas() const { return owners->front().size(); }
};

Shards cut(const Layout& layout, const Owners& owners, std::span<const int64_t> shape) {
  Shards shards{&owners, {}, {}, 0};
  for (const std::vector<int64_t>& ranks : owners) {
    BoxList boxes(shape.size());
    int64_t elements = 0;
    for (const LocalBox& box : layout.shard(shape, ranks.front()).boxes) {
      boxes.add(box.global);
      elements += box.global.numel();
    }
    shards.chunks += boxes.size();
    shards.boxes.push_back(std::move(boxes));
    shards.elements.push_back(elements);
  }
  return shards;
}

/// Cuts each shape by each layout once: a model has many tensors, but few shapes.
class ShardTable {
 public:
  /// Both the layout and the table must outlive the answer.
  const Shards& shards_of(const Layout& layout, std::span<const int64_t> shape) {
    auto [owners, is_new] = owners_.try_emplace(&layout);
    if (is_new) owners->second = owners_of(layout);
    auto [found, missing] = shards_.try_emplace({&layout, {shape.begin(), shape.end()}});
    if (missing) found->second = cut(layout, owners->second, shape);
    return found->second;
  }

 private:
  std::map<const Layout*, Owners> owners_;
  std::map<std::pair<const Layout*, std::vector<int64_t>>, Shards> shards_;
};

void check_addressable(const TensorEntry& tensor, const Shards& shards) {
  if (is_sub_byte(tensor.dtype) && shards.chunks > 1) {
    throw UnsupportedError(
        "elements of {} are finer than a byte; only a whole tensor can be written: replicate it",
        name_of(tensor.dtype));
  }
}

/// The bytes of each shard.
std::vector<int64_t> shard_bytes(const TensorEntry& tensor, const Shards& shards) {
  std::vector<int64_t> bytes;
  for (int64_t elements : shards.elements) bytes.push_back(byte_size(tensor.dtype, {&elements, 1}));
  return bytes;
}

/// The replica whose ranks' largest load is smallest when they have written these shards too.
size_t lightest_replica(const Owners& owners, std::span<const int64_t> bytes,
                        std::span<const int64_t> loads) {
  size_t best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t replica = 0; replica < owners.front().size(); ++replica) {
    int64_t most = 0;
    for (size_t s = 0; s < owners.size(); ++s) {
      most = std::max(most, checked_add(loads[static_cast<size_t>(owners[s][replica])], bytes[s]));
    }
    if (most < least) best = replica;
    least = std::min(least, most);
  }
  return best;
}

/// Lists the shards' boxes as the tensor's chunks, written by the ranks that hold replica number `replica`.
void set_chunks(TensorEntry& tensor, const Shards& shards, size_t replica) {
  std::vector<std::pair<int64_t, size_t>> writers;  // rank and shard
  for (size_t s = 0; s < shards.boxes.size(); ++s) writers.emplace_back((*shards.owners)[s][replica], s);
  std::ranges::sort(writers);

  tensor.replica = static_cast<uint32_t>(replica);
  tensor.boxes = BoxList(tensor.shape.size());
  tensor.extents.clear();
  tensor.boxes.reserve(std::max<size_t>(shards.chunks, 1));
  tensor.extents.reserve(std::max<size_t>(shards.chunks, 1));
  auto add = [&](int64_t rank, const Box& box) {
    tensor.boxes.add(box);
    tensor.extents.push_back({static_cast<uint32_t>(rank), 0, byte_size(tensor.dtype, box.sizes)});
  };
  for (auto [rank, s] : writers) {
    for (size_t i = 0; i < shards.boxes[s].size(); ++i) add(rank, shards.boxes[s][i]);
  }
  if (shards.chunks == 0) add(writers.front().first, whole(tensor.shape));
}

}  // namespace

size_t distribute(Catalog& catalog, const LayoutRules& rules) {
  std::vector<std::string_view> names;
  for (const TensorEntry& tensor : catalog.tensors) names.push_back(tensor.name);
  rules.check_patterns(names);

  ShardTable table;
  std::vector<const Shards*> shards;
  std::vector<int64_t> largest_shard;  // of each tensor, in bytes
  for (TensorEntry& tensor : catalog.tensors) {
    tensor.layout = rules.layout_of(tensor.name, tensor.shape);
    try {
      shards.push_back(&table.shards_of(*tensor.layout, tensor.shape));
      check_addressable(tensor, *shards.back());
      largest_shard.push_back(std::ranges::max(shard_bytes(tensor, *shards.back())));
    } catch (const Error& error) {
      rethrow_with_context(error, rules.context(tensor.name, tensor.shape));
    }
  }

  std::vector<size_t> order(catalog.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(
      order, {}, [&](size_t t) { return std::tuple(shards[t]->replicas() > 1, -largest_shard[t]); });
  std::vector<int64_t> loads(static_cast<size_t>(rules.ranks()));
  for (size_t t : order) {
    const Owners& owners = *shards[t]->owners;
    const std::vector<int64_t> bytes = shard_bytes(catalog.tensors[t], *shards[t]);
    const size_t replica = lightest_replica(owners, bytes, loads);
    for (size_t s = 0; s < owners.size(); ++s) loads[static_cast<size_t>(owners[s][replica])] += bytes[s];
    set_chunks(catalog.tensors[t], *shards[t], replica);
  }
  return loads.size();
}

size_t pack(Catalog& catalog, std::span<const size_t> order, int64_t max_bytes) {
  size_t writers = 0;
  int64_t used = 0;
  for (size_t t : order) {
    TensorEntry& tensor = catalog.tensors[t];
    const int64_t bytes = tensor.bytes();
    used = checked_add(used, bytes);
    if (writers == 0 || used > max_bytes) {
      used = bytes;
      ++writers;
    }
    tensor.boxes = BoxList(tensor.shape.size());
    tensor.boxes.add(whole(tensor.shape));
    tensor.extents = {{static_cast<uint32_t>(writers - 1), 0, bytes}};
    tensor.layout = nullptr;
    tensor.replica = 0;
  }
  return writers;
}

}  // namespace spolia
