#include "spolia/optim/mesh_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include <fmt/ranges.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/optim/newton_schulz.h"

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
  std::vector<int64_t> elements;               // by place
};

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
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      std::vector<size_t> members;
      for (size_t t = 0; t < drafts_.size(); ++t)
        if (drafts_[t].group == g && !plan_.tensors[t].frozen) members.push_back(t);
      std::stable_sort(members.begin(), members.end(),
                       [&](size_t a, size_t b) { return drafts_[a].work > drafts_[b].work; });
      for (size_t t : members) add_to_batch(t);
    }
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
    for (const RankShard& shard : shards) draft.elements.push_back(numel(shard.local_shape));
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

  void add_to_batch(size_t t) {
    const Draft& draft = drafts_[t];
    const MeshTensor& tensor = plan_.tensors[t];
    MeshGroup& group = plan_.groups[draft.group];
    const int64_t bytes =
        checked_mul(ceil_div(numel(tensor.shape), std::ssize(group.rows[0])), element_bytes(tensor.update));
    if (group.batches.empty() || bytes > options_.batch_bytes - group.batches.back().bytes)
      group.batches.emplace_back();
    MeshBatch& batch = group.batches.back();
    batch.tensors.push_back(t);
    batch.bytes = checked_add(batch.bytes, bytes);
    for (const auto& holder : draft.holders)
      batch.exchanges |= group.rows[0].size() > 1 && (!holder || tensor.row_moments);
    MeshPlan::Assignment& assignment = plan_.assignments[t].emplace();
    assignment.group = draft.group;
    assignment.batch = group.batches.size() - 1;
    for (const auto& rows : group.replica_groups) assignment.owners.push_back(choose(draft, group, rows));
  }

  /// The owner among `rows`, whose work is booked.
  MeshOwner choose(const Draft& draft, const MeshGroup& group, const std::vector<size_t>& rows) {
    const size_t turn = turn_++;
    std::optional<MeshOwner> best;
    std::pair<int64_t, int64_t> best_key;
    std::vector<int64_t> best_loads, loads;
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t row = rows[(turn + i) % rows.size()];
      const std::vector<int64_t>& ranks = group.rows[row];
      std::vector<int64_t> before;
      for (int64_t rank : ranks) before.push_back(plan_.loads[static_cast<size_t>(rank)]);
      loads = before;
      std::vector<size_t> places = place_units(draft, turn / rows.size(), loads);
      // The busiest of those who get something; where that is the same, what the whole row has to do.
      int64_t load = 0, added = 0;
      for (size_t place = 0; place < loads.size(); ++place) {
        if (loads[place] != before[place]) load = std::max(load, loads[place]);
        added += loads[place];
      }
      const std::pair key{load, added};
      if (best && key >= best_key) continue;
      best_key = key;
      best_loads = loads;
      best.emplace(MeshOwner{row, {}});
      for (size_t place : places) best->units.push_back(ranks[place]);
    }
    for (size_t place = 0; place < best_loads.size(); ++place)
      plan_.loads[static_cast<size_t>(group.rows[best->row][place])] = best_loads[place];
    return *best;
  }

  /// The place of each unit in a row with these loads, which grow.
  static std::vector<size_t> place_units(const Draft& draft, size_t turn, std::vector<int64_t>& loads) {
    std::vector<size_t> places(draft.units.size());
    if (draft.units.empty())
      for (size_t place = 0; place < loads.size(); ++place) loads[place] += draft.elements[place];
    std::vector<size_t> free;
    for (size_t u = 0; u < places.size(); ++u) {
      if (!draft.holders[u]) {
        free.push_back(u);
        continue;
      }
      places[u] = *draft.holders[u];
      loads[places[u]] += draft.units[u].work;
    }
    std::stable_sort(free.begin(), free.end(),
                     [&](size_t a, size_t b) { return draft.units[a].work > draft.units[b].work; });
    for (size_t u : free) {
      size_t least = turn % loads.size();
      for (size_t i = 1; i < loads.size(); ++i) {
        const size_t place = (turn + i) % loads.size();
        if (loads[place] < loads[least]) least = place;
      }
      places[u] = least;
      loads[least] += draft.units[u].work;
    }
    return places;
  }

  const MeshPlanOptions& options_;
  MeshPlan plan_;
  std::vector<Draft> drafts_;
  std::map<std::pair<size_t, std::vector<int64_t>>, std::vector<RankShard>> shards_;
  size_t turn_ = 0;
};

}  // namespace

std::vector<MatrixUnit> matrix_units(const MatrixRule& rule, std::span<const int64_t> shape) {
  const MatrixShape matrices = matrix_shape(rule, shape);
  std::vector<MatrixUnit> units;
  if (numel(shape) == 0) return units;
  const std::vector<RowPart> parts =
      rule.parts.empty() ? std::vector<RowPart>{{{0, matrices.rows}}} : rule.parts;
  const size_t row_dim = rule.kind == MatrixKind::kBatch ? shape.size() - 2 : 0;
  const Dims batch_strides = row_major_strides(shape.first(row_dim));
  for (int64_t number = 0; number < matrices.batch; ++number) {
    Box matrix = whole(shape);
    for (size_t d = 0; d < row_dim; ++d) {
      matrix.offsets[d] = number / batch_strides[d] % shape[d];
      matrix.sizes[d] = 1;
    }
    for (const RowPart& part : parts) {
      MatrixUnit unit;
      unit.columns = matrices.columns;
      for (const RowRange& range : part) {
        if (range.begin == range.end) continue;
        Box box = matrix;
        box.offsets[row_dim] = range.begin;
        box.sizes[row_dim] = range.end - range.begin;
        unit.boxes.push_back(std::move(box));
        unit.rows += range.end - range.begin;
        unit.moment_rows.push_back(
            {number * matrices.rows + range.begin, number * matrices.rows + range.end});
      }
      if (unit.rows == 0) continue;
      unit.work = newton_schulz_work(unit.rows, unit.columns);
      units.push_back(std::move(unit));
    }
  }
  return units;
}

std::vector<UnitPiece> unit_pieces(const MatrixUnit& unit, const RankShard& shard) {
  std::vector<UnitPiece> pieces;
  int64_t before = 0;  // elements of the boxes before
  for (const Box& box : unit.boxes) {
    const Dims strides = row_major_strides(box.sizes);
    for (const LocalBox& local : shard.boxes) {
      const Box common = intersect(box, local.global);
      if (common.empty()) continue;
      UnitPiece piece{common.sizes, local.local_offset, local.local_strides, before, strides};
      for (size_t d = 0; d < common.ndim(); ++d) {
        piece.local_offset += (common.offsets[d] - local.global.offsets[d]) * local.local_strides[d];
        piece.unit_offset += (common.offsets[d] - box.offsets[d]) * strides[d];
      }
      pieces.push_back(std::move(piece));
    }
    before += box.numel();
  }
  return pieces;
}

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

bool MeshPlan::has_state(size_t tensor, int64_t rank) const {
  const MeshOwner* owner = owner_for(tensor, rank);
  return owner && groups[assignments[tensor]->group].position_of(rank)->row == owner->row;
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
  for (const MeshOwner& owner : assignment.owners)
    ranks.insert(ranks.end(), group.rows[owner.row].begin(), group.rows[owner.row].end());
  return std::make_shared<const Layout>(DeviceMesh(std::move(shape), {}, std::move(ranks)),
                                        std::move(placements));
}

std::string MeshPlan::text() const {
  std::string out;
  for (size_t g = 0; g < groups.size(); ++g) {
    const MeshGroup& group = groups[g];
    out += fmt::format("group {}: {}\n", g, group.layout.text());
    for (size_t row = 0; row < group.rows.size(); ++row)
      out += fmt::format("  row {} at {}: ranks {}\n", row, list_text(group.coordinates(row)),
                         list_text(group.rows[row]));
    for (size_t r = 0; r < group.replica_groups.size() && group.replica_groups.size() > 1; ++r)
      out += fmt::format("  replica group {}: rows [{}]\n", r, fmt::join(group.replica_groups[r], ", "));
    for (size_t b = 0; b < group.batches.size(); ++b) {
      const MeshBatch& batch = group.batches[b];
      out += fmt::format("  batch {}: {}{}\n", b, human_bytes(batch.bytes),
                         batch.exchanges ? ", gathered within rows" : "");
      for (size_t t : batch.tensors) {
        out += fmt::format("    {} {} {}:", quote(tensors[t].name), name_of(tensors[t].dtype),
                           shape_text(tensors[t].shape));
        for (const MeshOwner& owner : assignments[t]->owners) {
          out += fmt::format(" row {} at {}", owner.row, list_text(group.coordinates(owner.row)));
          if (!owner.units.empty()) out += fmt::format(", matrices on {}", list_text(owner.units));
          out += ';';
        }
        out.back() = '\n';
      }
    }
  }
  for (const MeshTensor& tensor : tensors)
    if (tensor.frozen) out += fmt::format("frozen: {}\n", quote(tensor.name));
  out += fmt::format("loads: {}\n", list_text(loads));
  return out;
}

std::string MeshPlan::owned_text(int64_t rank) const {
  std::string out;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (!has_state(t, rank)) continue;
    const MeshOwner& owner = *owner_for(t, rank);
    out += fmt::format("{}: row {}", quote(tensors[t].name), owner.row);
    if (!owner.units.empty())
      out += fmt::format(", {} of {} matrices", std::count(owner.units.begin(), owner.units.end(), rank),
                         owner.units.size());
    out += '\n';
  }
  return out;
}

MeshPlan plan_mesh(std::vector<MeshTensor> tensors, const MeshPlanOptions& options) {
  return Planner(std::move(tensors), options).run();
}

}  // namespace spolia
