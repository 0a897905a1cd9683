#include "spolia/plan/ownership.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

constexpr int64_t kSmallShard = int64_t{64} << 10;  // smaller ones stay together
constexpr int64_t kRunBytes = int64_t{512} << 10;   // and so many bytes of them have one owner
constexpr int64_t kLeastUneven = int64_t{1} << 20;  // what loads may differ by, or
constexpr int64_t kUnevenShare = 20;                // this part of their mean

using Ranks = std::vector<int64_t>;  // rising

// Who holds what.

/// The distinct layouts and shapes of the tensors, and of the ranks that were asked for what they hold.
class HolderTable {
 public:
  struct Group {
    Ranks ranks;
    std::vector<uint32_t> sets;  // for the caller: numbers of the sets that share its ownership
  };
  struct Shared {
    const Layout* layout = nullptr;
    int64_t lowest = 0;               // of the mesh's ranks
    std::map<int64_t, Group> groups;  // by shard id, of the ranks asked for
    std::vector<size_t> shapes;
  };

  HolderTable(std::span<const SharedTensor> tensors, int64_t ranks) {
    std::map<const Layout*, size_t> layouts;
    std::map<std::pair<size_t, std::vector<int64_t>>, size_t> shapes;
    for (const SharedTensor& tensor : tensors) {
      shape_of_.push_back(kListed);
      if (tensor.layout == nullptr) continue;
      const auto [layout, new_layout] = layouts.try_emplace(tensor.layout.get());
      if (new_layout) layout->second = number_of(*tensor.layout, ranks);
      const auto [shape, new_shape] =
          shapes.try_emplace({layout->second, {tensor.shape.begin(), tensor.shape.end()}}, shapes_.size());
      if (new_shape) {
        layouts_[layout->second].shapes.push_back(shapes_.size());
        shapes_.push_back({layout->second, tensor.shape, 0, {}});
      }
      ShapeEntry& entry = shapes_[shape->second];
      entry.element_bytes = std::max(entry.element_bytes, element_bytes(tensor.dtype));
      shape_of_.back() = shape->second;
    }
  }

  size_t layouts() const { return layouts_.size(); }
  Shared& layout(size_t number) { return layouts_[number]; }
  Shared& layout_of(size_t tensor) { return layouts_[shapes_[shape_of_[tensor]].layout]; }

  /// The shard that `rank` holds by a layout; its holders are known from then on.
  std::optional<int64_t> ask(size_t number, int64_t rank) {
    Shared& shared = layouts_[number];
    const std::optional<int64_t> shard = shared.layout->shard_id(rank);
    if (!shard) return shard;
    const auto [group, is_new] = shared.groups.try_emplace(*shard);
    if (is_new) {
      group->second.ranks = shared.layout->replicas(rank);
      std::ranges::sort(group->second.ranks);
    }
    return shard;
  }

  /// A tensor's shard, in the order of the local buffer.
  std::span<const Box> boxes_of(size_t tensor, int64_t shard) {
    return boxes_of_shape(shape_of_[tensor], shard);
  }

  /// Whether that shard has so many bytes for any tensor of the layout.
  bool holds(size_t number, int64_t shard, int64_t bytes) {
    return std::ranges::any_of(layouts_[number].shapes, [&](size_t shape) {
      int64_t elements = 0;
      for (const Box& box : boxes_of_shape(shape, shard)) elements += box.numel();
      return elements >= ceil_div(bytes, shapes_[shape].element_bytes);
    });
  }

 private:
  struct ShapeEntry {
    size_t layout;
    Dims shape;
    int64_t element_bytes;  // of the widest dtype
    std::map<int64_t, std::vector<Box>> boxes;
  };
  static constexpr size_t kListed = ~size_t{0};

  /// Layouts that are equal are one.
  size_t number_of(const Layout& layout, int64_t ranks) {
    auto known = std::ranges::find_if(layouts_, [&](const Shared& s) { return *s.layout == layout; });
    if (known != layouts_.end()) return static_cast<size_t>(known - layouts_.begin());
    if (layout.is_partial()) {
      throw InvalidArgumentError("the layout {} holds operands of a reduction; reduce them first",
                                 layout.text());
    }
    const auto [lowest, highest] = std::ranges::minmax(layout.mesh().ranks());
    if (highest >= ranks) {
      throw InvalidArgumentError("the layout {} has rank {}, but there are {}", layout.text(), highest,
                                 ranks);
    }
    layouts_.push_back({&layout, lowest, {}, {}});
    return layouts_.size() - 1;
  }

  std::span<const Box> boxes_of_shape(size_t number, int64_t shard) {
    ShapeEntry& entry = shapes_[number];
    const auto [at, is_new] = entry.boxes.try_emplace(shard);
    if (is_new) {
      const Shared& shared = layouts_[entry.layout];
      const int64_t holder = shared.groups.at(shard).ranks.front();
      for (LocalBox& local : shared.layout->shard(entry.shape, holder).boxes) {
        at->second.push_back(std::move(local.global));
      }
    }
    return at->second;
  }

  std::vector<Shared> layouts_;
  std::vector<ShapeEntry> shapes_;
  std::vector<size_t> shape_of_;  // of each tensor
};

// Sharing out.

/// Shares of `bytes`, in the order of `levels`, that raise the lowest levels to one height; those that there
/// are have at least `least`. All go to the lowest where they do not do for two.
std::vector<int64_t> pour(int64_t bytes, std::span<const int64_t> levels, int64_t least) {
  std::vector<size_t> order(levels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return levels[i]; });
  const int64_t lowest = levels[order.front()];
  int64_t used = 1, below = 0;  // how many levels, and what they have above the lowest
  for (; used < std::ssize(order); ++used) {
    const int64_t next = levels[order[static_cast<size_t>(used)]] - lowest;
    if (checked_mul(used + 1, checked_add(next, least)) > checked_add(checked_add(below, next), bytes)) break;
    below += next;
  }
  const int64_t height = (below + bytes) / used, left = (below + bytes) % used;
  std::vector<int64_t> shares(levels.size());
  for (int64_t i = 0; i < used; ++i) {
    const size_t at = order[static_cast<size_t>(i)];
    shares[at] = height - (levels[at] - lowest) + (i < left ? 1 : 0);
  }
  return shares;
}

/// `bytes` in equal shares for as many of the lowest levels as get `least` each.
std::vector<int64_t> share_evenly(int64_t bytes, std::span<const int64_t> levels, int64_t least) {
  std::vector<size_t> order(levels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return levels[i]; });
  order.resize(static_cast<size_t>(std::clamp<int64_t>(bytes / least, 1, std::ssize(order))));
  std::ranges::sort(order);
  std::vector<int64_t> shares(levels.size());
  const int64_t parts = std::ssize(order);
  for (int64_t i = 0; i < parts; ++i) {
    shares[order[static_cast<size_t>(i)]] = bytes / parts + (i < bytes % parts ? 1 : 0);
  }
  return shares;
}

/// How many leading dims of a box have to be walked so that a step has at most `bytes`, if it can be.
struct Steps {
  size_t dims = 0;
  int64_t bytes = 0;  // of a step
};

Steps steps_of(const Box& box, int64_t element, int64_t bytes) {
  Steps steps{0, box.numel() * element};
  for (; steps.dims < box.ndim() && steps.bytes > bytes; ++steps.dims) steps.bytes /= box.sizes[steps.dims];
  return steps;
}

struct OwnedBox {
  int64_t owner;
  Box box;
};

/// Cuts boxes, end to end, into shares of about as many bytes, in the holders' order.
std::vector<OwnedBox> cut(std::span<const Box> boxes, int64_t element, int64_t step, const Ranks& holders,
                          std::span<const int64_t> shares) {
  std::vector<OwnedBox> owned;
  size_t share = 0;
  while (shares[share] == 0) ++share;
  int64_t due = shares[share], before = 0;  // where the share ends, and where the box starts
  for (const Box& box : boxes) {
    const Steps steps = steps_of(box, element, step);
    const std::span<const int64_t> leading(box.sizes.data(), steps.dims);
    const int64_t count = numel(leading);
    for (int64_t at = 0; at < count;) {
      const int64_t end = std::clamp((due - before) / steps.bytes, at, count);
      for (const Box& piece : boxes_of_flat_range(leading, at, end)) {
        Box whole_piece = box;
        for (size_t d = 0; d < steps.dims; ++d) {
          whole_piece.offsets[d] += piece.offsets[d];
          whole_piece.sizes[d] = piece.sizes[d];
        }
        owned.push_back({holders[share], std::move(whole_piece)});
      }
      at = end;
      if (at == count) break;
      do ++share;
      while (shares[share] == 0);
      due += shares[share];
    }
    before += count * steps.bytes;
  }
  return owned;
}

/// What a set of ranks holds of a tensor.
struct Piece {
  size_t tensor = 0;
  size_t shard = 0;
  std::span<const Box> boxes;
  int64_t bytes = 0;
  bool asked = false;           // whether its parts are wanted
  int64_t owner = 0;            // of the whole, unless
  std::vector<OwnedBox> parts;  // it was cut
};

/// Small pieces of one set, that have one owner.
struct SmallRun {
  std::vector<size_t> pieces;
  int64_t bytes = 0;
};

/// Ranks that hold the same pieces.
struct HolderSet {
  const Ranks* ranks = nullptr;
  std::vector<size_t> large;  // pieces
  std::vector<SmallRun> small;
  int64_t bytes = 0;
  std::vector<int64_t> flow;  // the bytes that each rank should own of these

  void add(size_t piece, int64_t size, bool is_small) {
    bytes = checked_add(bytes, size);
    if (!is_small) return large.push_back(piece);
    if (small.empty() || small.back().bytes + size > kRunBytes) small.emplace_back();
    small.back().pieces.push_back(piece);
    small.back().bytes += size;
  }
};

/// Ranks that something large ties together, directly or through others: these are balanced together.
class Components {
 public:
  explicit Components(int64_t ranks) : parent_(static_cast<size_t>(ranks)) {
    std::iota(parent_.begin(), parent_.end(), int64_t{0});
  }
  int64_t of(int64_t rank) {
    int64_t& parent = parent_[static_cast<size_t>(rank)];
    if (parent == rank) return rank;
    return parent = of(parent);
  }
  void unite(const Ranks& ranks) {  // the lowest stands for all
    for (int64_t rank : ranks) {
      const auto [low, high] = std::minmax({of(ranks.front()), of(rank)});
      parent_[static_cast<size_t>(high)] = low;
    }
  }
  bool has_all(const Ranks& ranks) {
    return std::ranges::all_of(ranks, [&](int64_t rank) { return of(rank) == of(ranks.front()); });
  }

 private:
  std::vector<int64_t> parent_;
};

/// At least so many bytes has the busiest of the ranks whatever is done: those with the largest loads share
/// what no others hold. `loads`: by rank, what the flows are part of.
int64_t least_possible(std::span<HolderSet* const> sets, const Ranks& ranks, std::span<const int64_t> loads) {
  Ranks order = ranks;
  std::ranges::stable_sort(order, std::greater(), [&](int64_t r) { return loads[static_cast<size_t>(r)]; });
  std::vector<size_t> place(loads.size());
  std::vector<int64_t> bound(order.size());  // what ranks up to this place have to themselves
  for (size_t i = 0; i < order.size(); ++i) {
    place[static_cast<size_t>(order[i])] = i;
    bound[i] = loads[static_cast<size_t>(order[i])];
  }
  for (const HolderSet* set : sets) {
    size_t last = 0;
    for (size_t i = 0; i < set->ranks->size(); ++i) {
      const size_t at = place[static_cast<size_t>((*set->ranks)[i])];
      bound[at] -= set->flow[i];
      last = std::max(last, at);
    }
    bound[last] += set->bytes;
  }
  int64_t sum = 0, least = 0;
  for (size_t i = 0; i < bound.size(); ++i) {
    sum = checked_add(sum, bound[i]);
    least = std::max(least, sum / (static_cast<int64_t>(i) + 1));
  }
  return least;
}

/// Sets every set's flow so that the largest load is as small as it can be, as if bytes were water: each set
/// in turn is poured over its ranks as the others stand. Where sets lie in one another or apart, smaller ones
/// first, the first round is final. Others come closer with every round, for the loads' squares sum up to
/// less.
void balance(std::span<HolderSet* const> sets, std::span<int64_t> loads) {
  constexpr int64_t kMostWork = int64_t{1} << 24;
  Ranks ranks;
  int64_t work = 0;
  for (HolderSet* set : sets) {
    set->flow.assign(set->ranks->size(), 0);
    ranks.insert(ranks.end(), set->ranks->begin(), set->ranks->end());
  }
  const int64_t round = std::ssize(ranks);
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  while (work < kMostWork) {
    for (HolderSet* set : sets) {
      std::vector<int64_t> levels;
      for (size_t i = 0; i < set->flow.size(); ++i) {
        levels.push_back(loads[static_cast<size_t>((*set->ranks)[i])] -= set->flow[i]);
      }
      set->flow = pour(set->bytes, levels, 0);
      for (size_t i = 0; i < set->flow.size(); ++i) {
        loads[static_cast<size_t>((*set->ranks)[i])] += set->flow[i];
      }
    }
    if (sets.size() == 1) return;
    int64_t most = 0;
    for (int64_t rank : ranks) most = std::max(most, loads[static_cast<size_t>(rank)]);
    const int64_t least = least_possible(sets, ranks, loads);
    if (most - least <= std::max(least / 200, kSmallShard)) return;
    work += round;
  }
}

class Assignment {
 public:
  Assignment(std::span<const SharedTensor> tensors, int64_t ranks, const OwnershipOptions& options,
             std::optional<int64_t> rank)
      : tensors_(tensors),
        ranks_(ranks),
        options_(options),
        rank_(rank),
        table_(tensors, ranks),
        loads_(static_cast<size_t>(ranks)),
        excess_(static_cast<size_t>(ranks)) {
    options_.least_part = std::clamp<int64_t>(options.least_part, 1, int64_t{1} << 60);
    if (options.replicas != Replicas::kBalanced) options_.cut = CutShards::kNever;  // copies are whole
    small_ = kSmallShard;
    if (options_.cut == CutShards::kAlways) small_ = std::min(small_, 2 * options_.least_part);
  }

  std::vector<OwnedPart> run() {
    if (options_.replicas == Replicas::kEachHost && std::ssize(options_.hosts) < ranks_) {
      throw InvalidArgumentError("{} ranks, but {} numbers of hosts", ranks_, options_.hosts.size());
    }
    if (rank_ && (*rank_ < 0 || *rank_ >= ranks_)) {
      throw InvalidArgumentError("rank {}, but there are {}", *rank_, ranks_);
    }
    find_ranks();
    for (size_t t = 0; t < tensors_.size(); ++t) add_pieces(t);
    assign();
    for (const Piece& piece : pieces_) {
      if (piece.asked) emit(piece);
    }
    std::ranges::stable_sort(parts_, {},
                             [](const OwnedPart& p) { return std::tuple(p.tensor, p.shard, p.owner); });
    return std::move(parts_);
  }

 private:
  bool balanced() const {
    return options_.replicas == Replicas::kBalanced || options_.replicas == Replicas::kEachHost;
  }
  int64_t host_of(int64_t rank) const {
    return options_.replicas == Replicas::kEachHost ? options_.hosts[static_cast<size_t>(rank)] : 0;
  }

  /// Which ranks matter: all, or those that something large ties to the one that is asked for.
  void find_ranks() {
    for (const SharedTensor& tensor : tensors_) {
      for (const HeldBox& box : tensor.boxes) check_ranks(box.ranks);
    }
    met_.assign(static_cast<size_t>(ranks_), !rank_);
    if (!rank_) {
      for (size_t l = 0; l < table_.layouts(); ++l) {
        for (int64_t rank : table_.layout(l).layout->mesh().ranks()) table_.ask(l, rank);
      }
      return;
    }
    Ranks queue;
    auto meet = [&](int64_t rank) {
      if (met_[static_cast<size_t>(rank)] || host_of(rank) != host_of(*rank_)) return;
      met_[static_cast<size_t>(rank)] = true;
      queue.push_back(rank);
    };
    meet(*rank_);
    std::set<std::pair<size_t, int64_t>> seen;  // layout and shard
    for (size_t done = 0, before = 1; before > 0;) {
      for (; done < queue.size(); ++done) {
        for (size_t l = 0; l < table_.layouts(); ++l) {
          const std::optional<int64_t> shard = table_.ask(l, queue[done]);
          if (!balanced() || !shard || !seen.emplace(l, *shard).second) continue;
          if (table_.holds(l, *shard, small_)) {
            std::ranges::for_each(table_.layout(l).groups.at(*shard).ranks, meet);
          }
        }
      }
      before = queue.size();
      if (balanced()) meet_through_boxes(meet);
      before = queue.size() - before;
    }
  }

  template <class Meet>
  void meet_through_boxes(const Meet& meet) {
    for (const SharedTensor& tensor : tensors_) {
      for (const HeldBox& held : tensor.boxes) {
        if (byte_size(tensor.dtype, held.box.sizes) >= small_ && is_met(held.ranks)) {
          std::ranges::for_each(held.ranks, meet);
        }
      }
    }
  }

  bool is_met(const Ranks& ranks) const {
    return std::ranges::any_of(ranks, [&](int64_t rank) { return met_[static_cast<size_t>(rank)]; });
  }

  void check_ranks(const Ranks& ranks) const {
    if (ranks.empty()) throw InvalidArgumentError("a box that no rank holds");
    if (ranks.front() < 0 || ranks.back() >= ranks_) {
      throw InvalidArgumentError("a box is held by the ranks {}, but there are {}", list_text(ranks), ranks_);
    }
  }

  void add_pieces(size_t t) {
    const SharedTensor& tensor = tensors_[t];
    if (numel(tensor.shape) == 0) return add_empty(t);
    if (tensor.layout == nullptr) {
      for (size_t b = 0; b < tensor.boxes.size(); ++b) {
        const HeldBox& held = tensor.boxes[b];
        if (!is_met(held.ranks)) continue;
        const bool asked = !rank_ || std::ranges::binary_search(held.ranks, *rank_);
        std::vector<uint32_t> sets;
        add_piece({t, b, {&held.box, 1}, 0, asked, 0, {}}, held.ranks, sets);
      }
      return;
    }
    HolderTable::Shared& shared = table_.layout_of(t);
    const std::optional<int64_t> own = rank_ ? shared.layout->shard_id(*rank_) : std::nullopt;
    for (auto& [shard, group] : shared.groups) {
      add_piece({t, static_cast<size_t>(shard), table_.boxes_of(t, shard), 0, !rank_ || own == shard, 0, {}},
                group.ranks, group.sets);
    }
  }

  /// A tensor without elements has an owner too, so that it is not lost.
  void add_empty(size_t t) {
    const SharedTensor& tensor = tensors_[t];
    if (tensor.layout != nullptr) {
      const HolderTable::Shared& shared = table_.layout_of(t);
      const int64_t shard = *shared.layout->shard_id(shared.lowest);
      if (rank_ && shared.layout->shard_id(*rank_) != shard) return;
      parts_.push_back({t, static_cast<size_t>(shard), whole(tensor.shape), shared.lowest});
    } else if (!tensor.boxes.empty()) {
      const Ranks& ranks = tensor.boxes.front().ranks;
      if (rank_ && !std::ranges::binary_search(ranks, *rank_)) return;
      parts_.push_back({t, 0, whole(tensor.shape), ranks.front()});
    }
  }

  /// `sets`: the numbers of the sets that own copies, filled in where it is empty.
  void add_piece(Piece piece, const Ranks& holders, std::vector<uint32_t>& sets) {
    const SharedTensor& tensor = tensors_[piece.tensor];
    for (const Box& box : piece.boxes) {
      if (is_sub_byte(tensor.dtype) && !box.empty() && box != whole(tensor.shape)) {
        throw UnsupportedError("elements of {} are finer than a byte: only a whole tensor can be owned",
                               name_of(tensor.dtype));
      }
      piece.bytes = checked_add(piece.bytes, byte_size(tensor.dtype, box.sizes));
    }
    if (piece.bytes == 0) return;
    if (!balanced()) {
      if (!piece.asked) return;
      for (int64_t owner : options_.replicas == Replicas::kEvery ? holders : Ranks{holders.front()}) {
        piece.owner = owner;
        emit(piece);
      }
      return;
    }
    if (sets.empty()) sets = sets_of(holders);
    for (uint32_t set : sets) {
      sets_[set].add(pieces_.size(), piece.bytes, piece.bytes < small_);
      pieces_.push_back(piece);
    }
  }

  /// The holders, or those of each host.
  std::vector<uint32_t> sets_of(const Ranks& holders) {
    std::map<int64_t, Ranks> by_host;
    for (int64_t rank : holders) by_host[host_of(rank)].push_back(rank);
    std::vector<uint32_t> sets;
    for (auto& [host, ranks] : by_host) {
      if (rank_ && host != host_of(*rank_)) continue;
      const auto [at, is_new] =
          set_numbers_.try_emplace(std::move(ranks), static_cast<uint32_t>(sets_.size()));
      if (is_new) sets_.emplace_back().ranks = &at->first;
      sets.push_back(at->second);
    }
    return sets;
  }

  int64_t& load(int64_t rank) { return loads_[static_cast<size_t>(rank)]; }

  void assign() {
    mean_ = mean_bytes();
    uneven_ = std::max(mean_ / kUnevenShare, kLeastUneven);
    Components components(ranks_);
    for (const HolderSet& set : sets_) {
      if (!set.large.empty()) components.unite(*set.ranks);
    }
    std::map<int64_t, std::vector<HolderSet*>> together;
    for (HolderSet& set : sets_) {
      if (set.ranks->size() > 1 && components.has_all(*set.ranks)) {
        together[components.of(set.ranks->front())].push_back(&set);
        continue;
      }
      // One rank, or small shards of ranks that know nothing of each other's loads: in turn.
      for (size_t piece : set.large) own(piece, set.ranks->front());
      for (size_t u = 0; u < set.small.size(); ++u) {
        own(set.small[u], (*set.ranks)[u % set.ranks->size()]);
      }
    }
    for (auto& [lowest, sets] : together) share_out(sets);
  }

  void own(size_t piece, int64_t owner) {
    pieces_[piece].owner = owner;
    load(owner) += pieces_[piece].bytes;
  }
  void own(const SmallRun& run, int64_t owner) {
    for (size_t piece : run.pieces) own(piece, owner);
  }

  /// Turns the flows into owners. Pieces that are larger than the loads may be uneven are cut; where smaller
  /// ones that stay whole still add up to more on some rank that is in several sets, smaller ones are cut
  /// too.
  void share_out(std::vector<HolderSet*>& sets) {
    std::ranges::sort(sets, {}, [](const HolderSet* s) { return std::pair(s->ranks->size(), *s->ranks); });
    balance(sets, loads_);
    Ranks ranks;
    for (const HolderSet* set : sets) ranks.insert(ranks.end(), set->ranks->begin(), set->ranks->end());
    int64_t most = mean_;
    for (int64_t rank : ranks) most = std::max(most, load(rank));
    for (int64_t largest = uneven_;; largest /= 2) {
      for (int64_t rank : ranks) excess_of(rank) = 0;
      for (HolderSet* set : sets) place(*set, largest);
      const bool even = std::ranges::all_of(ranks, [&](int64_t rank) {
        return load(rank) + excess_of(rank) <= checked_add(most, uneven_ - uneven_ / 8);
      });
      if (even || options_.cut != CutShards::kForBalance || largest < options_.least_part) return;
    }
  }

  /// `excess_` is what a rank has more than it should by the sets so far: where the next one gives it room,
  /// that evens out.
  void place(HolderSet& set, int64_t largest) {
    std::vector<int64_t> excess;
    for (size_t i = 0; i < set.flow.size(); ++i) {
      excess.push_back(excess_of((*set.ranks)[i]) - set.flow[i]);
    }
    std::ranges::stable_sort(set.large, std::greater(), [&](size_t p) { return pieces_[p].bytes; });
    for (size_t p : set.large) place(pieces_[p], *set.ranks, largest, excess);
    for (const SmallRun& run : set.small) {
      const size_t least = lowest(excess);
      for (size_t p : run.pieces) pieces_[p].owner = (*set.ranks)[least];
      excess[least] += run.bytes;
    }
    for (size_t i = 0; i < excess.size(); ++i) excess_of((*set.ranks)[i]) = excess[i];
  }

  int64_t& excess_of(int64_t rank) { return excess_[static_cast<size_t>(rank)]; }

  static size_t lowest(std::span<const int64_t> levels) {
    return static_cast<size_t>(std::ranges::min_element(levels) - levels.begin());
  }

  void place(Piece& piece, const Ranks& holders, int64_t largest, std::vector<int64_t>& levels) const {
    piece.parts.clear();
    const DType dtype = tensors_[piece.tensor].dtype;
    const bool may_cut = options_.cut == CutShards::kAlways ||
                         (options_.cut == CutShards::kForBalance && piece.bytes > largest);
    if (may_cut && !is_sub_byte(dtype)) {
      const int64_t element = element_bytes(dtype);
      const int64_t step = options_.least_part / 4;
      int64_t longest = 0;  // a share may be so much smaller than it should be
      for (const Box& box : piece.boxes) longest = std::max(longest, steps_of(box, element, step).bytes);
      const int64_t least = options_.least_part + longest;
      const std::vector<int64_t> shares = options_.cut == CutShards::kAlways
                                              ? share_evenly(piece.bytes, levels, least)
                                              : pour(piece.bytes, levels, least);
      if (std::ranges::count(shares, 0) + 1 < std::ssize(shares)) {
        piece.parts = cut(piece.boxes, element, step, holders, shares);
        for (const OwnedBox& part : piece.parts) {
          const auto at = std::ranges::lower_bound(holders, part.owner) - holders.begin();
          levels[static_cast<size_t>(at)] += part.box.numel() * element;
        }
        return;
      }
    }
    const size_t least = lowest(levels);
    piece.owner = holders[least];
    levels[least] += piece.bytes;
  }

  /// Of all bytes once, a rank's.
  int64_t mean_bytes() const {
    int64_t total = 0;
    for (const SharedTensor& tensor : tensors_) {
      if (tensor.layout != nullptr) total = checked_add(total, byte_size(tensor.dtype, tensor.shape));
      for (const HeldBox& held : tensor.boxes) {
        total = checked_add(total, byte_size(tensor.dtype, held.box.sizes));
      }
    }
    return total / ranks_;
  }

  void emit(const Piece& piece) {
    for (const OwnedBox& part : piece.parts) {
      parts_.push_back({piece.tensor, piece.shard, part.box, part.owner});
    }
    if (!piece.parts.empty()) return;
    for (const Box& box : piece.boxes) {
      if (!box.empty()) parts_.push_back({piece.tensor, piece.shard, box, piece.owner});
    }
  }

  std::span<const SharedTensor> tensors_;
  int64_t ranks_;
  OwnershipOptions options_;
  std::optional<int64_t> rank_;
  int64_t small_;                  // smaller pieces stay together
  int64_t mean_ = 0, uneven_ = 0;  // bytes a rank, and what loads may differ by
  HolderTable table_;
  std::vector<bool> met_;  // by rank
  std::vector<Piece> pieces_;
  std::vector<HolderSet> sets_;
  std::map<Ranks, uint32_t> set_numbers_;
  std::vector<int64_t> loads_, excess_;  // by rank
  std::vector<OwnedPart> parts_;
};

}  // namespace

std::vector<OwnedPart> assign_owners(std::span<const SharedTensor> tensors, int64_t ranks,
                                     const OwnershipOptions& options, std::optional<int64_t> rank) {
  if (ranks <= 0) throw InvalidArgumentError("a job of {} ranks", ranks);
  return Assignment(tensors, ranks, options, rank).run();
}

std::optional<int64_t> replica_number(const Layout& layout, int64_t rank) {
  const std::optional<Dims> coordinates = layout.mesh().coordinates_of(rank);
  if (!coordinates) return std::nullopt;
  int64_t number = 0;
  for (size_t m = 0; m < coordinates->size(); ++m) {
    if (is_replicate(layout.placements()[m])) {
      number = number * layout.mesh().shape()[m] + (*coordinates)[m];
    }
  }
  return number;
}

std::vector<int64_t> owned_bytes(std::span<const SharedTensor> tensors, std::span<const OwnedPart> parts,
                                 int64_t ranks) {
  std::vector<int64_t> bytes(static_cast<size_t>(ranks));
  for (const OwnedPart& part : parts) {
    int64_t& sum = bytes.at(static_cast<size_t>(part.owner));
    sum = checked_add(sum, byte_size(tensors[part.tensor].dtype, part.box.sizes));
  }
  return bytes;
}

}  // namespace spolia
