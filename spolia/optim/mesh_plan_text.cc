// A mesh plan as text and JSON.
#include <algorithm>
#include <map>
#include <span>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "spolia/base/text.h"
#include "spolia/optim/mesh_plan.h"

namespace spolia {

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
          for (size_t row : owner.rows)
            out += fmt::format("{} row {} at {}", row == owner.rows[0] ? "" : " and", row,
                               list_text(group.coordinates(row)));
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
    const size_t row = groups[assignments[t]->group].position_of(rank)->row;
    out += fmt::format("{}: row {}", quote(tensors[t].name), row);
    if (owner.rows.size() > 1) out += fmt::format(", part {} of {}", *owner.part_of(row), owner.rows.size());
    if (!owner.units.empty())
      out += fmt::format(", {} of {} matrices", std::count(owner.units.begin(), owner.units.end(), rank),
                         owner.units.size());
    out += '\n';
  }
  return out;
}

nlohmann::ordered_json MeshPlan::json() const {
  using Json = nlohmann::ordered_json;
  auto numbers = [](std::span<const int64_t> list) { return std::vector<int64_t>(list.begin(), list.end()); };
  Json all = Json::object(), owned = Json::object(), by_group = Json::array();
  std::map<int64_t, std::vector<std::string>> by_rank;
  for (size_t t = 0; t < tensors.size(); ++t) {
    Json& entry =
        all[tensors[t].name] = {{"dtype", name_of(tensors[t].dtype)}, {"shape", numbers(tensors[t].shape)}};
    if (!assignments[t]) continue;
    const MeshGroup& group = groups[assignments[t]->group];
    entry["group"] = assignments[t]->group;
    entry["batch"] = assignments[t]->batch;
    for (const MeshOwner& owner : assignments[t]->owners) {
      Json coordinates = Json::array();
      for (size_t row : owner.rows) {
        coordinates.push_back(numbers(group.coordinates(row)));
        for (int64_t rank : group.rows[row]) by_rank[rank].push_back(tensors[t].name);
      }
      entry["owners"].push_back(
          {{"rows", owner.rows}, {"coordinates", std::move(coordinates)}, {"matrices", owner.units}});
    }
  }
  for (auto& [rank, names] : by_rank) owned[std::to_string(rank)] = std::move(names);
  for (const MeshGroup& group : groups) {
    Json rows = Json::array(), batches = Json::array();
    for (size_t row = 0; row < group.rows.size(); ++row)
      rows.push_back({{"coordinates", numbers(group.coordinates(row))}, {"ranks", group.rows[row]}});
    for (const MeshBatch& batch : group.batches) {
      std::vector<std::string> names;
      for (size_t t : batch.tensors) names.push_back(tensors[t].name);
      batches.push_back(
          {{"bytes", batch.bytes}, {"exchanges", batch.exchanges}, {"tensors", std::move(names)}});
    }
    by_group.push_back({{"layout", group.layout.text()},
                        {"rows", std::move(rows)},
                        {"replica_groups", group.replica_groups},
                        {"batches", std::move(batches)}});
  }
  return {{"all", std::move(all)},
          {"owned", std::move(owned)},
          {"groups", std::move(by_group)},
          {"loads", loads}};
}

}  // namespace spolia
