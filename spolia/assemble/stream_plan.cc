#include "spolia/assemble/stream_plan.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/layout/box_index.h"

namespace spolia {
namespace {

using Move = StreamPlan::Move;
using Unit = StreamPlan::Unit;

constexpr uint32_t kNoSeat = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostStaging = int64_t{64} << 20;
/// A source of more boxes than this gets an index over them.
constexpr size_t kIndexedBoxes = 16;

int64_t room_of(int64_t bytes) { return align_up(bytes, kUnitAlignment); }

/// The boxes of a source that overlap a box.
class HeldIndex {
 public:
  explicit HeldIndex(const StreamSource& source) : source_(source), list_(source.shape.size()) {
    if (source.boxes.size() <= kIndexedBoxes) return;
    for (const HeldBox& held : source.boxes) list_.add(held.box);
    index_ = std::make_unique<BoxIndex>(list_);
  }
  template <class Use>
  void for_each(const Box& box, const Use& use) const {
    if (index_ != nullptr) {
      for (uint32_t held : index_->overlapping(box)) use(size_t{held});
      return;
    }
    for (size_t held = 0; held < source_.boxes.size(); ++held) {
      if (!intersect(box, source_.boxes[held].box).empty()) use(held);
    }
  }

 private:
  const StreamSource& source_;
  BoxList list_;
  std::unique_ptr<BoxIndex> index_;
};

/// A part of a source, to find out who else uses the same.
using Key = std::vector<int64_t>;
Key key_of(size_t source, const Box& box, DType dtype = DType::kUInt8) {
  Key key = {static_cast<int64_t>(source), static_cast<int64_t>(dtype)};
  key.insert(key.end(), box.offsets.begin(), box.offsets.end());
  key.insert(key.end(), box.sizes.begin(), box.sizes.end());
  return key;
}

DType wire_dtype(DType source, DType target) {
  return element_bytes(target) < element_bytes(source) ? target : source;
}

bool wanted_alike(const StreamOutput& some, const StreamOutput& all) {
  return all.wanted_by == nullptr || all.wanted_by == some.wanted_by ||
         (some.wanted_by != nullptr && *some.wanted_by == *all.wanted_by);
}

class Planner {
 public:
  Planner(const StreamGrid& grid, std::span<const StreamSource> sources,
          std::span<const StreamOutput> outputs, const StreamLimits& limits)
      : grid_(grid), sources_(sources), outputs_(outputs), limits_(limits), indices_(sources.size()) {}

  StreamPlan plan() && {
    plan_.arena.resize(grid_.seats());
    plan_.sent_by.resize(grid_.seats());
    share_memory();
    gather_rounds(cut_outputs(emission_order()));
    for (StreamPlan::Round& round : plan_.rounds) plan_moves(round);
    return std::move(plan_);
  }

 private:
  int64_t bytes_of(const StreamOutput& output) const { return byte_size(output.dtype, output.shape); }

  /// How much of the memory is for what is on its way.
  void share_memory() {
    int64_t largest = 0;
    const StreamOutput* of = nullptr;
    for (const StreamOutput& output : outputs_) {
      const int64_t room = room_of(bytes_of(output));
      if (limits_.pieces && room > limits_.memory - kLeastStaging) continue;
      if (room > largest) {
        largest = room;
        of = &output;
      }
    }
    if (limits_.memory < 2 * kLeastStaging && limits_.pieces) {
      throw UnsupportedError("a stream within {} of memory: it takes {} bytes at the least",
                             human_bytes(limits_.memory), 2 * kLeastStaging);
    }
    const int64_t least = largest + kLeastStaging;
    if (of != nullptr && limits_.memory < least) {
      throw UnsupportedError(
          "a stream within {} of memory: output {} has {}, which takes {} bytes at the least; or take it in "
          "pieces",
          human_bytes(limits_.memory), quote(of->name), human_bytes(largest), least);
    }
    const int64_t wanted = std::clamp(limits_.memory / 4, kLeastStaging, kMostStaging);
    plan_.staging = std::min(wanted, limits_.memory - largest);
    plan_.piece_bytes = plan_.staging / 8 / kUnitAlignment * kUnitAlignment;
    units_room_ = limits_.memory - plan_.staging;
  }

  /// By name, but those that use the same part of a source follow each other: it is sent once then.
  std::vector<size_t> emission_order() {
    std::vector<size_t> by_name(outputs_.size());
    for (size_t o = 0; o < by_name.size(); ++o) by_name[o] = o;
    std::ranges::stable_sort(by_name, {}, [&](size_t o) -> const std::string& { return outputs_[o].name; });
    std::vector<size_t> uses(sources_.size());
    for (const StreamOutput& output : outputs_) {
      for (const SourceRegion& from : output.regions) ++uses[from.source];
    }
    std::map<Key, std::vector<size_t>> users;
    for (size_t o : by_name) {
      for (const SourceRegion& from : outputs_[o].regions) {
        if (uses[from.source] == 1) continue;
        std::vector<size_t>& of_part = users[key_of(from.source, from.region.source)];
        if (of_part.empty() || of_part.back() != o) of_part.push_back(o);
      }
    }
    std::vector<size_t> order;
    std::vector<bool> emitted(outputs_.size());
    shares_.resize(outputs_.size());
    const auto emit = [&](size_t o) {
      if (!emitted[o]) order.push_back(o);
      emitted[o] = true;
    };
    for (size_t o : by_name) {
      emit(o);
      for (const SourceRegion& from : outputs_[o].regions) {
        if (uses[from.source] == 1) continue;
        const std::vector<size_t>& of_part = users[key_of(from.source, from.region.source)];
        if (of_part.size() > 1) shares_[o] = true;
        for (size_t user : of_part) emit(user);
      }
    }
    return order;
  }

  std::vector<Unit> cut_outputs(std::span<const size_t> order) const {
    std::vector<Unit> units;
    for (size_t o : order) {
      const StreamOutput& output = outputs_[o];
      const Box all = whole(addressable_shape(output.dtype, output.shape));
      if (room_of(bytes_of(output)) <= units_room_) {
        units.push_back({o, all, bytes_of(output)});
        continue;
      }
      const int64_t width = element_bytes(output.dtype);
      const int64_t elements =
          std::min(units_room_ / 2, limits_.round_bytes) / kUnitAlignment * kUnitAlignment / width;
      for (Box& box : split_row_major(all, std::max<int64_t>(1, elements))) {
        const int64_t bytes = box.numel() * width;
        units.push_back({o, std::move(box), bytes});
      }
    }
    return units;
  }

  /// Outputs that the same ranks want wait in one queue; a round takes from each what these have room for.
  void gather_rounds(std::vector<Unit> units) {
    std::map<std::vector<size_t>, std::deque<Unit>> by_wanters;
    std::deque<Unit> for_all;
    for (Unit& unit : units) {
      const StreamOutput& output = outputs_[unit.output];
      const size_t count = output.wanted_by == nullptr ? grid_.seats() : output.wanted_by->size();
      if (count == 0) continue;
      plan_.delivered = checked_add(plan_.delivered, checked_mul(unit.bytes, static_cast<int64_t>(count)));
      std::deque<Unit>& queue = output.wanted_by == nullptr ? for_all : by_wanters[*output.wanted_by];
      queue.push_back(std::move(unit));
    }
    std::vector<size_t> everyone(grid_.seats());
    for (size_t seat = 0; seat < everyone.size(); ++seat) everyone[seat] = seat;
    if (!for_all.empty()) std::ranges::move(for_all, std::back_inserter(by_wanters[everyone]));

    const int64_t enough = std::min(units_room_ / 2, limits_.round_bytes);
    std::vector<int64_t> before(grid_.seats()), loads;
    while (!by_wanters.empty()) {
      loads.assign(grid_.seats(), 0);
      StreamPlan::Round round{.first_unit = plan_.units.size()};
      for (auto queue = by_wanters.begin(); queue != by_wanters.end();) {
        const auto fits = [&](const Unit& unit) {
          return std::ranges::all_of(queue->first, [&](size_t seat) {
            return loads[seat] == 0 || loads[seat] + room_of(unit.bytes) <= enough;
          });
        };
        while (!queue->second.empty() && fits(queue->second.front())) {
          for (size_t seat : queue->first) loads[seat] += room_of(queue->second.front().bytes);
          plan_.units.push_back(std::move(queue->second.front()));
          queue->second.pop_front();
        }
        queue = queue->second.empty() ? by_wanters.erase(queue) : std::next(queue);
      }
      round.end_unit = plan_.units.size();
      if (!plan_.rounds.empty()) {
        bool& ahead = plan_.rounds.back().ahead;
        ahead = true;
        for (size_t seat = 0; seat < loads.size(); ++seat)
          ahead = ahead && before[seat] + loads[seat] <= units_room_;
        for (size_t seat = 0; seat < loads.size() && ahead; ++seat) {
          plan_.arena[seat] = std::max(plan_.arena[seat], before[seat] + loads[seat]);
        }
      }
      for (size_t seat = 0; seat < loads.size(); ++seat)
        plan_.arena[seat] = std::max(plan_.arena[seat], loads[seat]);
      plan_.rounds.push_back(round);
      std::swap(before, loads);
    }
  }

  void plan_moves(StreamPlan::Round& round) {
    round.first_wave = plan_.waves.size();
    plan_.waves.push_back({plan_.moves.size(), plan_.moves.size()});
    staged_ = 0;
    brought_.clear();
    for (size_t u = round.first_unit; u < round.end_unit; ++u) {
      for (const SourceRegion& from : outputs_[plan_.units[u].output].regions) plan_region(u, from);
    }
    plan_.waves.back().end_move = plan_.moves.size();
    round.end_wave = plan_.waves.size();
  }

  void plan_region(size_t u, const SourceRegion& from) {
    const Unit& unit = plan_.units[u];
    const Box target = intersect(from.region.target, unit.box);
    if (target.empty()) return;
    const Region wanted = narrowed(from.region, target);
    const StreamSource& source = sources_[from.source];
    const DType wire = wire_dtype(source.dtype, outputs_[unit.output].dtype);
    std::unique_ptr<HeldIndex>& index = indices_[from.source];
    if (index == nullptr) index = std::make_unique<HeldIndex>(source);
    index->for_each(wanted.source, [&](size_t held) {
      const Region part = narrowed_to_source(wanted, intersect(wanted.source, source.boxes[held].box));
      for (const Box& box :
           split_row_major(part.source, std::max<int64_t>(1, plan_.piece_bytes / element_bytes(wire)))) {
        Move move;
        move.unit = u;
        move.source = from.source;
        move.held = held;
        move.region = narrowed_to_source(part, box);
        move.wire = wire;
        add_move(std::move(move));
      }
    });
  }

  void add_move(Move move) {
    const StreamOutput& output = outputs_[plan_.units[move.unit].output];
    const bool shared = shares_[plan_.units[move.unit].output];
    if (shared) {
      const auto [at, fresh] =
          brought_.try_emplace(key_of(move.source, move.region.source, output.dtype), plan_.moves.size());
      if (!fresh && wanted_alike(output, outputs_[plan_.units[plan_.moves[at->second].unit].output])) {
        move.twin = at->second;
        move.stays = true;
        plan_.moves.push_back(std::move(move));
        return;
      }
    }
    const bool counted =
        !shared || seen_.emplace(key_of(move.source, move.region.source), plan_.moves.size()).second;
    choose_senders(move);
    cost(move, counted);
    const int64_t staged = staged_bytes(move);
    if (staged_ > 0 && staged_ + staged > plan_.stage_bytes()) {
      plan_.waves.back().end_move = plan_.moves.size();
      plan_.waves.push_back({plan_.moves.size(), plan_.moves.size()});
      staged_ = 0;
    }
    staged_ += staged;
    plan_.moves.push_back(std::move(move));
  }

  /// In each row the rank that has it and sent least; for rows that have none, the one of all that sent
  /// least.
  void choose_senders(Move& move) const {
    const StreamOutput& output = outputs_[plan_.units[move.unit].output];
    const HeldBox& held = sources_[move.source].boxes[move.held];
    move.roots.assign(grid_.rows.size(), kNoSeat);
    uint32_t& sender = move.sender = kNoSeat;
    const auto sent_less = [&](size_t a, uint32_t b) {
      return b == kNoSeat || plan_.sent_by[a] < plan_.sent_by[b];
    };
    for (int64_t rank : held.ranks) {
      const std::optional<size_t> seat = grid_.seat_of(rank);
      if (!seat) continue;
      uint32_t& root = move.roots[grid_.row_of(*seat)];
      if (sent_less(*seat, root)) root = static_cast<uint32_t>(*seat);
      if (sent_less(*seat, sender)) sender = static_cast<uint32_t>(*seat);
    }
    move.stays = true;
    for (size_t row = 0; row < move.roots.size(); ++row) {
      bool needed = false;
      for (size_t column = 0; column < grid_.columns() && !needed; ++column) {
        const size_t seat = grid_.seat(row, column);
        needed = wants(output, seat) && !holds(grid_, sources_[move.source], move.held, seat);
      }
      if (!needed) {
        move.roots[row] = kNoSeat;
        continue;
      }
      move.stays = false;
      if (move.roots[row] == kNoSeat) {
        move.roots[row] = static_cast<uint32_t>(grid_.seat(row, grid_.column_of(sender)));
      }
    }
  }

  void cost(const Move& move, bool counted) {
    if (move.stays) return;
    const int64_t bytes = move.region.source.numel() * element_bytes(move.wire);
    const auto charge = [&](const std::optional<RowRoute>& route, size_t all) {
      if (!route) return;
      const auto receivers = static_cast<int64_t>(route->broadcast ? all - 1 : route->to.size());
      plan_.sent += bytes * receivers;
      plan_.sent_by[route->root] += bytes * receivers;
    };
    charge(column_route(grid_, sources_, plan_, move), grid_.rows.size());
    for (size_t row = 0; row < grid_.rows.size(); ++row) {
      charge(row_route(grid_, sources_, outputs_, plan_, move, row), grid_.columns());
    }
    if (!counted) return;
    const StreamOutput& output = outputs_[plan_.units[move.unit].output];
    for (size_t seat = 0; seat < grid_.seats(); ++seat) {
      if (wants(output, seat) && !holds(grid_, sources_[move.source], move.held, seat)) plan_.least += bytes;
    }
  }

  /// What some rank needs beside its unit while the move is on its way.
  int64_t staged_bytes(const Move& move) const {
    if (move.stays) return 0;
    const StreamOutput& output = outputs_[plan_.units[move.unit].output];
    bool staged = sources_[move.source].dtype != output.dtype;
    for (uint32_t root : move.roots) {
      staged = staged || (root != kNoSeat && !wants(output, root) &&
                          !holds(grid_, sources_[move.source], move.held, root));
    }
    return staged ? room_of(move.region.source.numel() * element_bytes(move.wire)) : 0;
  }

  const StreamGrid& grid_;
  std::span<const StreamSource> sources_;
  std::span<const StreamOutput> outputs_;
  const StreamLimits& limits_;
  StreamPlan plan_;
  int64_t units_room_ = 0;
  int64_t staged_ = 0;             // in the wave
  std::vector<bool> shares_;       // outputs that use a part of a source as others do
  std::map<Key, size_t> brought_;  // what moves of the round bring
  std::map<Key, size_t> seen_;     // what any did, of outputs that share
  std::vector<std::unique_ptr<HeldIndex>> indices_;
};

}  // namespace

std::optional<size_t> StreamGrid::seat_of(int64_t rank) const {
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto at = std::ranges::find(rows[r], rank);
    if (at != rows[r].end()) return seat(r, static_cast<size_t>(at - rows[r].begin()));
  }
  return std::nullopt;
}

int64_t StreamPlan::peak() const { return (arena.empty() ? 0 : std::ranges::max(arena)) + staging; }

StreamPlan plan_stream(const StreamGrid& grid, std::span<const StreamSource> sources,
                       std::span<const StreamOutput> outputs, const StreamLimits& limits) {
  return Planner(grid, sources, outputs, limits).plan();
}

bool wants(const StreamOutput& output, size_t seat) {
  return output.wanted_by == nullptr || std::ranges::binary_search(*output.wanted_by, seat);
}

bool holds(const StreamGrid& grid, const StreamSource& source, size_t held, size_t seat) {
  return std::ranges::binary_search(source.boxes[held].ranks, grid.rank_of(seat));
}

std::optional<RowRoute> row_route(const StreamGrid& grid, std::span<const StreamSource> sources,
                                  std::span<const StreamOutput> outputs, const StreamPlan& plan,
                                  const StreamPlan::Move& move, size_t row) {
  if (move.stays || move.roots[row] == kNoSeat) return std::nullopt;
  const StreamOutput& output = outputs[plan.units[move.unit].output];
  RowRoute route{.root = move.roots[row]};
  bool all_want = true;
  for (size_t column = 0; column < grid.columns(); ++column) {
    const size_t seat = grid.seat(row, column);
    if (seat == route.root) continue;
    const bool wanted = wants(output, seat);
    all_want = all_want && wanted;
    if (wanted && !holds(grid, sources[move.source], move.held, seat)) route.to.push_back(seat);
  }
  if (route.to.empty()) return std::nullopt;
  // A broadcast costs its root less than sends do; a few that have it already may get it again.
  route.broadcast = all_want && 4 * route.to.size() >= 3 * (grid.columns() - 1);
  if (route.broadcast) route.to.clear();
  return route;
}

std::optional<RowRoute> column_route(const StreamGrid& grid, std::span<const StreamSource> sources,
                                     const StreamPlan&, const StreamPlan::Move& move) {
  if (move.stays) return std::nullopt;
  RowRoute route{.root = move.sender};
  for (uint32_t root : move.roots) {
    if (root != kNoSeat && !holds(grid, sources[move.source], move.held, root)) route.to.push_back(root);
  }
  if (route.to.empty()) return std::nullopt;
  route.broadcast = route.to.size() + 1 == grid.rows.size();
  if (route.broadcast) route.to.clear();
  return route;
}

Region narrowed_to_source(const Region& region, const Box& source) {
  Region part{source, region.target, region.permute};
  for (size_t d = 0; d < region.target.ndim(); ++d) {
    const int64_t from = source_dim(region, d);
    if (from < 0) continue;
    part.target.offsets[d] += source.offsets[from] - region.source.offsets[from];
    part.target.sizes[d] = source.sizes[from];
  }
  return part;
}

std::string stream_plan_text(const StreamGrid& grid, std::span<const StreamSource> sources,
                             std::span<const StreamOutput> outputs, const StreamPlan& plan) {
  std::string text = fmt::format(
      "{} outputs in {} units and {} rounds over {}x{} ranks; {} bytes delivered, {} sent, {} at the least; "
      "at most {} "
      "bytes on a rank, {} of them on their way\n",
      outputs.size(), plan.units.size(), plan.rounds.size(), grid.rows.size(), grid.columns(), plan.delivered,
      plan.sent, plan.least, plan.peak(), plan.staging);
  for (size_t r = 0; r < plan.rounds.size(); ++r) {
    const StreamPlan::Round& round = plan.rounds[r];
    text += fmt::format("round {}{}\n", r, round.ahead ? ", the next ahead" : "");
    for (size_t u = round.first_unit; u < round.end_unit; ++u) {
      const Unit& unit = plan.units[u];
      text += fmt::format("  unit {}: {} {}, {} bytes\n", u, printable(outputs[unit.output].name),
                          box_text(unit.box), unit.bytes);
    }
    for (size_t w = round.first_wave; w < round.end_wave; ++w) {
      for (size_t m = plan.waves[w].first_move; m < plan.waves[w].end_move; ++m) {
        const Move& move = plan.moves[m];
        text += fmt::format("  wave {}: {} {} as {} to unit {} {}", w - round.first_wave,
                            printable(sources[move.source].name), box_text(move.region.source),
                            name_of(move.wire), move.unit, box_text(move.region.target));
        if (move.twin) text += fmt::format(", as move {}", *move.twin);
        if (const auto down = column_route(grid, sources, plan, move)) {
          text += fmt::format(", down from {}", grid.rank_of(down->root));
        }
        for (size_t row = 0; row < grid.rows.size(); ++row) {
          const auto route = row_route(grid, sources, outputs, plan, move, row);
          if (!route) continue;
          text += fmt::format(", from {}", grid.rank_of(route->root));
          if (route->broadcast) text += " to all";
          for (size_t to : route->to) text += fmt::format(" to {}", grid.rank_of(to));
        }
        text += "\n";
      }
    }
  }
  return text;
}

}  // namespace spolia
