#include "spolia/optim/mesh_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

int64_t host_of(std::span<const int64_t> hosts, int64_t rank) {
  return rank < std::ssize(hosts) ? hosts[static_cast<size_t>(rank)] : 0;
}

/// The rows and columns of a mesh.
MeshGroup make_group(const Layout& layout, const MeshPlanOptions& options) {
  MeshGroup group{.layout = layout, .replicated_dims = {}, .rows = {}, .replica_groups = {}, .batches = {}};
  const DeviceMesh& mesh = layout.mesh();
  size_t rows = 1;
  for (size_t d = 0; d < mesh.ndim(); ++d) {
    if (!is_replicate(layout.placements()[d])) continue;
    group.replicated_dims.push_back(d);
    rows *= static_cast<size_t>(mesh.shape()[d]);
  }
  group.rows.resize(rows);
  const Dims strides = row_major_strides(mesh.shape());
  for (size_t at = 0; at < mesh.ranks().size(); ++at) {
    int64_t row = 0;
    for (size_t d : group.replicated_dims)
      row = row * mesh.shape()[d] + static_cast<int64_t>(at) / strides[d] % mesh.shape()[d];
    group.rows[static_cast<size_t>(row)].push_back(mesh.ranks()[at]);
  }
  group.replica_groups = split_replicas(group.rows, options.hosts, options.replica_groups);
  return group;
}

Layout normalised_layout(const MeshTensor& tensor) {
  if (!tensor.layout) throw InvalidArgumentError("no layout");
  if (tensor.layout->is_partial())
    throw InvalidArgumentError("{} has ranks that hold parts of a sum: reduce first", tensor.layout->text());
  std::vector<Placement> placements;
  for (const Placement& placement : tensor.layout->placements())
    placements.push_back(normalized(placement, tensor.shape.size()));
  return Layout(tensor.layout->mesh(), std::move(placements));
}

/// What the planner knows of a tensor besides.
struct Draft {
  size_t group = 0;
  int64_t work = 0;
  std::vector<MatrixUnit> units;
  std::vector<std::optional<size_t>> holders;  // of each unit, the place that has all of it
  std::vector<Dims> shards;                    // by place, their shapes
  LeadingCut cut;                              // for the owning rows
  std::vector<size_t> unit_parts;              // of each unit, the part that has it
  int64_t fills_up = 0;  // where its parts may have any sizes: the indices of each shard that has some
};

/// Whether a placement cuts the leading dim of a tensor.
bool cuts_leading(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim == 0;
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim == 0;
  return std::holds_alternative<RaggedShard>(placement);
}

/// Whether each matrix is in one part, however many parts of the shards' leading dim there are.
bool can_be_cut(const MeshTensor& tensor, const Layout& layout) {
  if (!tensor.matrices) return true;
  if (tensor.matrices->kind != MatrixKind::kBatch) return false;
  const auto placements = layout.placements();
  return std::none_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    const auto* ragged = std::get_if<RaggedShard>(&placement);
    // Parts of a leading dim that shards cut too are not the same on all ranks of a row, as moments there
    // are.
    return (ragged && ragged->dims.size() > 1) || (tensor.moments_travel() && cuts_leading(placement));
  });
}

/// The part that has each index of the leading dim.
std::vector<size_t> parts_of_leading(const MeshGroup& group, int64_t size, const LeadingCut& cut) {
  std::vector<Placement> placements;
  for (const Placement& placement : group.layout.placements())
    placements.push_back(cuts_leading(placement) ? placement : Replicate{});
  const Layout leading(group.layout.mesh(), std::move(placements));
  std::vector<size_t> parts(static_cast<size_t>(size));
  for (int64_t rank : group.rows[0]) {
    const RankShard shard = leading.shard(Dims{size}, rank);
    const int64_t held = shard.local_shape[0];
    for (const LocalBox& box : shard.boxes)
      for (int64_t i = 0; i < box.global.sizes[0]; ++i) {
        const int64_t local = box.local_offset + i * box.local_strides[0];
        size_t& part = parts[static_cast<size_t>(box.global.offsets[0] + i)];
        for (part = 0; cut.begin(part + 1, held) <= local;) ++part;
      }
  }
  return parts;
}

class Planner {
 public:
  Planner(std::vector<MeshTensor> tensors, const MeshPlanOptions& options) : options_(options) {
    if (options.batch_bytes < 1) throw InvalidArgumentError("batches of {} bytes", options.batch_bytes);
    plan_.tensors = std::move(tensors);
    plan_.assignments.resize(plan_.tensors.size());
    std::set<std::string_view> names;
    for (const MeshTensor& tensor : plan_.tensors) {
      if (!names.insert(tensor.name).second)
        throw InvalidArgumentError("the parameter {} is given twice", quote(tensor.name));
      try {
        drafts_.push_back(draft(tensor));
      } catch (const Error& error) {
        rethrow_with_context(error, "the parameter " + quote(tensor.name));
      }
    }
  }

  MeshPlan run() {
    order_groups();
    cut_large_tensors();
    for (bool filling_up : {false, true})
      for (size_t g = 0; g < plan_.groups.size(); ++g)
        for (size_t t : members_of(g))
          if ((drafts_[t].fills_up > 0) == filling_up) assign(t);
    for (size_t g = 0; g < plan_.groups.size(); ++g)
      for (size_t t : members_of(g)) add_to_batch(t);
    return std::move(plan_);
  }

 private:
  Draft draft(const MeshTensor& tensor) {
    Draft draft;
    const Layout layout = normalised_layout(tensor);
    const auto found = std::find_if(plan_.groups.begin(), plan_.groups.end(),
                                    [&](const MeshGroup& group) { return group.layout == layout; });
    draft.group = static_cast<size_t>(found - plan_.groups.begin());
    if (found == plan_.groups.end()) {
      plan_.groups.push_back(make_group(layout, options_));
      const auto ranks = layout.mesh().ranks();
      const auto needed = static_cast<size_t>(*std::max_element(ranks.begin(), ranks.end()) + 1);
      if (plan_.loads.size() < needed) plan_.loads.resize(needed);
    }
    if (tensor.matrices) draft.units = matrix_units(*tensor.matrices, tensor.shape);
    draft.work = tensor.matrices ? 0 : numel(tensor.shape);
    for (const MatrixUnit& unit : draft.units) draft.work = checked_add(draft.work, unit.work);
    draft.holders.resize(draft.units.size());
    const std::vector<RankShard>& shards = shards_of(draft.group, tensor.shape);
    for (const RankShard& shard : shards) draft.shards.push_back(shard.local_shape);
    draft.unit_parts.resize(draft.units.size());
    for (size_t u = 0; u < draft.units.size(); ++u)
      for (size_t place = 0; place < shards.size(); ++place) {
        int64_t held = 0;
        for (const UnitPiece& piece : unit_pieces(draft.units[u], shards[place])) held += numel(piece.sizes);
        if (held == draft.units[u].rows * draft.units[u].columns) draft.holders[u] = place;
        if (held > 0) break;  // nobody else has all of it
      }
    return draft;
  }

  /// What each place of a row holds.
  const std::vector<RankShard>& shards_of(size_t group, const Dims& shape) {
    std::vector<RankShard>& shards = shards_[{group, {shape.begin(), shape.end()}}];
    if (shards.empty())
      for (int64_t rank : plan_.groups[group].rows[0])
        shards.push_back(plan_.groups[group].layout.shard(shape, rank));
    return shards;
  }

  /// Those with the largest tensor first: small ones then fill up what large ones left uneven.
  void order_groups() {
    std::vector<int64_t> largest(plan_.groups.size());
    for (const Draft& draft : drafts_) largest[draft.group] = std::max(largest[draft.group], draft.work);
    std::vector<size_t> order(plan_.groups.size()), place_in_order(order.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return largest[a] > largest[b]; });
    std::vector<MeshGroup> groups;
    for (size_t at = 0; at < order.size(); ++at) {
      place_in_order[order[at]] = at;
      groups.push_back(std::move(plan_.groups[order[at]]));
    }
    plan_.groups = std::move(groups);
    for (Draft& draft : drafts_) draft.group = place_in_order[draft.group];
  }

  /// Those of which one row would have a tenth of a rank's fair share or more, in as many parts as there are
  /// rows for.
  void cut_large_tensors() {
    std::set<int64_t> ranks;
    double work = 0;
    for (size_t t = 0; t < drafts_.size(); ++t) {
      const auto all = plan_.groups[drafts_[t].group].layout.mesh().ranks();
      ranks.insert(all.begin(), all.end());
      if (!plan_.tensors[t].frozen)
        work += static_cast<double>(drafts_[t].work) *
                static_cast<double>(plan_.groups[drafts_[t].group].replica_groups.size());
    }
    const double share = work / static_cast<double>(std::max<size_t>(ranks.size(), 1));
    for (size_t t = 0; t < drafts_.size(); ++t) {
      const MeshTensor& tensor = plan_.tensors[t];
      Draft& draft = drafts_[t];
      const MeshGroup& group = plan_.groups[draft.group];
      if (draft.work == 0 || tensor.shape.empty() || !can_be_cut(tensor, group.layout) ||
          static_cast<double>(draft.work) * 10 < share * static_cast<double>(group.rows[0].size()))
        continue;
      int64_t most = 0, least = 0;  // indices of a shard that has some
      for (const Dims& shard : draft.shards) {
        most = std::max(most, shard[0]);
        if (shard[0] > 0) least = least == 0 ? shard[0] : std::min(least, shard[0]);
      }
      int64_t parts = most;
      for (const auto& rows : group.replica_groups) parts = std::min(parts, std::ssize(rows));
      if (parts < 2) continue;
      draft.cut.parts = static_cast<size_t>(parts);
      if (tensor.matrices && least == most) draft.fills_up = most;
    }
  }

  /// The tensors of a group, those with the most work first.
  std::vector<size_t> members_of(size_t group) const {
    std::vector<size_t> members;
    for (size_t t = 0; t < drafts_.size(); ++t)
      if (drafts_[t].group == group && !plan_.tensors[t].frozen) members.push_back(t);
    std::stable_sort(members.begin(), members.end(),
                     [&](size_t a, size_t b) { return drafts_[a].work > drafts_[b].work; });
    return members;
  }

  void assign(size_t t) {
    Draft& draft = drafts_[t];
    const MeshTensor& tensor = plan_.tensors[t];
    const MeshGroup& group = plan_.groups[draft.group];
    if (draft.fills_up > 0) share_out(draft, group);
    if (draft.cut.parts > 1 && tensor.matrices) {
      const std::vector<size_t> of_leading = parts_of_leading(group, tensor.shape[0], draft.cut);
      for (size_t u = 0; u < draft.units.size(); ++u)
        draft.unit_parts[u] = of_leading[static_cast<size_t>(draft.units[u].boxes[0].offsets[0])];
    }
    MeshPlan::Assignment& assignment = plan_.assignments[t].emplace();
    assignment.group = draft.group;
    assignment.cut = draft.cut;
    for (const auto& rows : group.replica_groups) assignment.owners.push_back(choose(draft, group, rows));
  }

  /// Gives one index of the shards after the other to the row of the first replica group that is then least
  /// busy: what its busiest rank has to do where matrices stay with who holds them, else its mean.
  void share_out(Draft& draft, const MeshGroup& group) const {
    const bool held = std::any_of(draft.holders.begin(), draft.holders.end(),
                                  [](const auto& holder) { return holder.has_value(); });
    std::vector<std::pair<double, int64_t>> rows;  // the rows' loads and indices
    for (size_t row : group.replica_groups[0]) {
      double sum = 0, most = 0;
      for (int64_t rank : group.rows[row]) {
        const auto load = static_cast<double>(plan_.loads[static_cast<size_t>(rank)]);
        sum += load;
        most = std::max(most, load);
      }
      rows.emplace_back(held ? most : sum / static_cast<double>(group.rows[row].size()), 0);
    }
    std::stable_sort(rows.begin(), rows.end());
    rows.resize(draft.cut.parts);
    const double each =
        static_cast<double>(draft.work) / static_cast<double>(draft.fills_up * std::ssize(draft.shards));
    for (int64_t i = 0; i < draft.fills_up; ++i) {
      auto& [load, indices] = *std::min_element(
          rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      load += each;
      ++indices;
    }
    draft.cut = {};
    for (const auto& [load, indices] : rows)
      if (indices > 0) draft.cut.shares.push_back(indices);
    std::sort(draft.cut.shares.rbegin(), draft.cut.shares.rend());
    draft.cut.parts = draft.cut.shares.size();
  }

  void add_to_batch(size_t t) {
    const Draft& draft = drafts_[t];
    const MeshTensor& tensor = plan_.tensors[t];
    MeshGroup& group = plan_.groups[draft.group];
    const int64_t bytes =
        checked_mul(ceil_div(numel(tensor.shape),
                             checked_mul(std::ssize(group.rows[0]), static_cast<int64_t>(draft.cut.parts))),
                    element_bytes(tensor.update));
    if (group.batches.empty() || bytes > options_.batch_bytes - group.batches.back().bytes)
      group.batches.emplace_back();
    MeshBatch& batch = group.batches.back();
    batch.tensors.push_back(t);
    batch.bytes = checked_add(batch.bytes, bytes);
    for (const auto& holder : draft.holders)
      batch.exchanges |= group.rows[0].size() > 1 && (!holder || tensor.moments_travel());
    plan_.assignments[t]->batch = group.batches.size() - 1;
  }

  /// The owner among `rows`, whose work is booked. Each part, the larger ones first, goes to the row that is
  /// best for it.
  MeshOwner choose(const Draft& draft, const MeshGroup& group, const std::vector<size_t>& rows) {
    MeshOwner owner{{}, std::vector<int64_t>(draft.units.size())};
    for (size_t part = 0; part < draft.cut.parts; ++part) {
      const size_t turn = turn_++;
      std::optional<size_t> best;
      std::pair<int64_t, int64_t> best_key;
      Booking best_booking;
      for (size_t i = 0; i < rows.size(); ++i) {
        const size_t row = rows[(turn + i) % rows.size()];
        if (owner.part_of(row)) continue;
        std::vector<int64_t> before;
        for (int64_t rank : group.rows[row]) before.push_back(plan_.loads[static_cast<size_t>(rank)]);
        Booking booking = book(draft, part, turn / rows.size(), before);
        // The busiest of those who get something; where that is the same, what the whole row has to do.
        std::pair<int64_t, int64_t> key{0, 0};
        for (size_t place = 0; place < before.size(); ++place) {
          const int64_t load = booking.loads[place];
          if (load != before[place]) key.first = std::max(key.first, load);
          key.second += load;
        }
        if (best && key >= best_key) continue;
        best = row;
        best_key = key;
        best_booking = std::move(booking);
      }
      owner.rows.push_back(*best);
      const std::vector<int64_t>& ranks = group.rows[*best];
      for (size_t place = 0; place < ranks.size(); ++place)
        plan_.loads[static_cast<size_t>(ranks[place])] = best_booking.loads[place];
      for (const auto& [unit, place] : best_booking.units) owner.units[unit] = ranks[place];
    }
    return owner;
  }

  /// What a row would have to do by then, and the place of each unit.
  struct Booking {
    std::vector<int64_t> loads;  // by place
    std::vector<std::pair<size_t, size_t>> units;
  };
  static Booking book(const Draft& draft, size_t part, size_t turn, std::vector<int64_t> loads) {
    Booking booking{std::move(loads), {}};
    auto add = [&](size_t unit, size_t place) {
      booking.units.emplace_back(unit, place);
      booking.loads[place] += draft.units[unit].work;
    };
    const size_t places = booking.loads.size();
    if (draft.units.empty())
      for (size_t place = 0; place < places; ++place)
        booking.loads[place] +=
            numel(draft.cut.part(part, draft.shards[place]).shape_of(draft.shards[place]));
    std::vector<size_t> free;
    for (size_t u = 0; u < draft.units.size(); ++u) {
      if (draft.unit_parts[u] != part) continue;
      if (draft.holders[u]) {
        add(u, *draft.holders[u]);
      } else {
        free.push_back(u);
      }
    }
    std::stable_sort(free.begin(), free.end(),
                     [&](size_t a, size_t b) { return draft.units[a].work > draft.units[b].work; });
    for (size_t u : free) {
      size_t least = turn % places;
      for (size_t i = 1; i < places; ++i)
        if (const size_t place = (turn + i) % places; booking.loads[place] < booking.loads[least])
          least = place;
      add(u, least);
    }
    return booking;
  }

  const MeshPlanOptions& options_;
  MeshPlan plan_;
  std::vector<Draft> drafts_;
  std::map<std::pair<size_t, std::vector<int64_t>>, std::vector<RankShard>> shards_;
  size_t turn_ = 0;
};

}  // namespace

std::vector<std::vector<size_t>> split_replicas(std::span<const std::vector<int64_t>> rows,
                                                std::span<const int64_t> hosts, int64_t count) {
  std::vector<std::vector<size_t>> by_host;  // rows that lie alike on the hosts
  std::map<std::vector<int64_t>, size_t> known;
  for (size_t row = 0; row < rows.size(); ++row) {
    std::vector<int64_t> where;
    for (int64_t rank : rows[row]) where.push_back(host_of(hosts, rank));
    const auto [found, fresh] = known.emplace(std::move(where), by_host.size());
    if (fresh) by_host.emplace_back();
    by_host[found->second].push_back(row);
  }
  std::vector<size_t> all(rows.size());
  std::iota(all.begin(), all.end(), size_t{0});
  if (rows.size() == 1) return {all};
  if (count < 0 || count > std::ssize(rows))
    throw InvalidArgumentError("{} replicas cannot be split into {} groups", rows.size(), count);
  if (count == 0) {
    std::map<int64_t, size_t> on_host;
    for (int64_t host : hosts) ++on_host[host];
    size_t largest = hosts.empty() ? rows.size() : 0;
    for (const auto& [host, ranks] : on_host) largest = std::max(largest, ranks);
    if (rows.size() <= largest) return {all};
    return by_host;
  }
  const auto wanted = static_cast<size_t>(count);
  std::vector<std::vector<size_t>> groups;
  if (wanted <= by_host.size()) {
    groups.resize(wanted);
    for (size_t host = 0; host < by_host.size(); ++host) {
      std::vector<size_t>& group = groups[host * wanted / by_host.size()];
      group.insert(group.end(), by_host[host].begin(), by_host[host].end());
    }
    return groups;
  }
  // More groups than hosts: the host whose groups would be the largest is cut once more.
  std::vector<size_t> cuts(by_host.size(), 1);
  for (size_t made = by_host.size(); made < wanted; ++made) {
    size_t most = 0;
    for (size_t host = 1; host < cuts.size(); ++host)
      if (by_host[host].size() * cuts[most] > by_host[most].size() * cuts[host]) most = host;
    ++cuts[most];
  }
  for (size_t host = 0; host < cuts.size(); ++host)
    for (size_t cut = 0; cut < cuts[host]; ++cut) {
      const size_t size = by_host[host].size(), begin = size * cut / cuts[host],
                   end = size * (cut + 1) / cuts[host];
      groups.emplace_back(by_host[host].begin() + static_cast<ptrdiff_t>(begin),
                          by_host[host].begin() + static_cast<ptrdiff_t>(end));
    }
  return groups;
}

std::optional<MeshGroup::Position> MeshGroup::position_of(int64_t rank) const {
  const std::optional<Dims> at = layout.mesh().coordinates_of(rank);
  if (!at) return std::nullopt;
  Position position;
  for (size_t d : replicated_dims)
    position.row =
        position.row * static_cast<size_t>(layout.mesh().shape()[d]) + static_cast<size_t>((*at)[d]);
  const auto& ranks = rows[position.row];
  position.place = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  for (size_t g = 0; g < replica_groups.size(); ++g)
    if (std::find(replica_groups[g].begin(), replica_groups[g].end(), position.row) !=
        replica_groups[g].end())
      position.replica_group = g;
  return position;
}

Dims MeshGroup::coordinates(size_t row) const {
  Dims sizes;
  for (size_t d : replicated_dims) sizes.push_back(layout.mesh().shape()[d]);
  const Dims strides = row_major_strides(sizes);
  Dims at;
  for (size_t d = 0; d < sizes.size(); ++d) at.push_back(static_cast<int64_t>(row) / strides[d] % sizes[d]);
  return at;
}

const MeshOwner* MeshPlan::owner_for(size_t tensor, int64_t rank) const {
  if (!assignments[tensor]) return nullptr;
  const auto position = groups[assignments[tensor]->group].position_of(rank);
  return position ? &assignments[tensor]->owners[position->replica_group] : nullptr;
}

std::optional<size_t> MeshOwner::part_of(size_t row) const {
  const auto found = std::find(rows.begin(), rows.end(), row);
  return found == rows.end() ? std::nullopt : std::optional(static_cast<size_t>(found - rows.begin()));
}

std::optional<LeadingPart> MeshPlan::owned_part(size_t tensor, int64_t rank) const {
  const MeshOwner* owner = owner_for(tensor, rank);
  if (!owner) return std::nullopt;
  const Assignment& assignment = *assignments[tensor];
  const MeshGroup& group = groups[assignment.group];
  const std::optional<size_t> part = owner->part_of(group.position_of(rank)->row);
  if (!part) return std::nullopt;
  return assignment.cut.part(*part, group.layout.shard(tensors[tensor].shape, rank).local_shape);
}

std::shared_ptr<const Layout> MeshPlan::state_layout(size_t tensor) const {
  const Assignment& assignment = *assignments[tensor];
  const MeshGroup& group = groups[assignment.group];
  const DeviceMesh& mesh = group.layout.mesh();
  Dims shape;
  std::vector<Placement> placements;
  std::vector<int64_t> ranks;
  if (assignment.owners.size() > 1) {
    shape.push_back(std::ssize(assignment.owners));
    placements.push_back(Replicate{});
  }
  for (size_t d = 0; d < mesh.ndim(); ++d) {
    const Placement& placement = group.layout.placements()[d];
    if (is_replicate(placement)) continue;
    shape.push_back(mesh.shape()[d]);
    placements.push_back(placement);
  }
  if (assignment.cut.parts > 1) {
    shape.push_back(static_cast<int64_t>(assignment.cut.parts));
    placements.push_back(assignment.cut.placement());
  }
  for (const MeshOwner& owner : assignment.owners)
    for (size_t place = 0; place < group.rows[0].size(); ++place)
      for (size_t row : owner.rows) ranks.push_back(group.rows[row][place]);
  return std::make_shared<const Layout>(DeviceMesh(std::move(shape), {}, std::move(ranks)),
                                        std::move(placements));
}

MeshPlan plan_mesh(std::vector<MeshTensor> tensors, const MeshPlanOptions& options) {
  return Planner(std::move(tensors), options).run();
}

}  // namespace spolia
