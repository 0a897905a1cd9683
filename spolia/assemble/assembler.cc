#include "spolia/assemble/assembler.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/assemble/element_copier.h"
#include "spolia/assemble/local_failure.h"
#include "spolia/assemble/stream_groups.h"
#include "spolia/assemble/stream_inputs.h"
#include "spolia/assemble/traffic.h"
#include "spolia/assemble/unit_pool.h"
#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/comm/agree.h"

namespace spolia {
namespace {

using Clock = std::chrono::steady_clock;
using Move = StreamPlan::Move;
using Unit = StreamPlan::Unit;

constexpr size_t kNone = static_cast<size_t>(-1);

/// What cannot be planned alike where it differs.
std::string options_text(const AssemblerOptions& options) {
  return fmt::format("memory {}, pieces {}, rounds of {} bytes, {} mapping", options.memory, options.pieces,
                     options.round_bytes, options.mapping == nullptr ? "no" : "a");
}

void pack(Packer& out, const Box& box) {
  out.numbers(box.offsets);
  out.numbers(box.sizes);
}

void pack(Packer& out, const Region& region) {
  pack(out, region.source);
  pack(out, region.target);
  out.numbers(region.permute);
}

uint64_t hash_of(const StreamOutput& output) {
  Packer out;
  out.text(output.name);
  out.text(name_of(output.dtype));
  out.numbers(output.shape);
  for (const SourceRegion& part : output.regions) {
    out.number(static_cast<int64_t>(part.source));
    pack(out, part.region);
  }
  out.number(output.fill.has_value());
  out.number(std::bit_cast<int64_t>(output.fill.value_or(0)));
  out.number(output.wanted_by != nullptr);
  if (output.wanted_by != nullptr) {
    for (size_t seat : *output.wanted_by) out.number(static_cast<int64_t>(seat));
  }
  return xxh3_64(bytes_of(out.take()));
}

/// What is planned, and what is made: plans of two mappings may be the same.
std::string fingerprint(const StreamPlan& plan, std::span<const StreamOutput> outputs) {
  Packer out;
  for (const StreamOutput& output : outputs) out.number(static_cast<int64_t>(hash_of(output)));
  for (const Unit& unit : plan.units) {
    out.number(static_cast<int64_t>(unit.output));
    pack(out, unit.box);
  }
  for (const Move& move : plan.moves) {
    out.number(static_cast<int64_t>(move.unit));
    out.number(static_cast<int64_t>(move.source));
    out.number(static_cast<int64_t>(move.held));
    pack(out, move.region);
    for (uint32_t root : move.roots) out.number(root);
  }
  return fmt::format("{:016x}", xxh3_64(bytes_of(out.take())));
}

/// Elements finer than a byte travel as bytes.
DType moved_dtype(DType dtype) { return is_sub_byte(dtype) ? DType::kUInt8 : dtype; }

}  // namespace

/// All ranks say how they are (settle) when a round has landed, before its units are handed out: nobody gets
/// what another could not send. The next round then goes on its way, where there is room, a part of it with
/// every pull; where there is none, it waits until this one's units are used, and for a word of its own. What
/// a round needs of memory is there before the word.
class Assembler::Stream {
 public:
  Stream(StreamGroups groups, const StateDict& state, const AssemblerOptions& options)
      : groups_(std::move(groups)), exceptions_(std::uncaught_exceptions()) {
    const auto start = Clock::now();
    prepare(state, options);
    report_.seconds += seconds_since(start);
  }

  std::optional<StreamItem> next() {
    if (end_ != StreamEnd::kNot) return std::nullopt;
    const auto start = Clock::now();
    std::optional<StreamItem> item;
    try {
      while (end_ == StreamEnd::kNot && next_item_ == items_.size()) advance();
      if (end_ == StreamEnd::kNot) item = hand_out();
    } catch (...) {
      give_up(std::current_exception());
      throw;
    }
    report_.seconds += seconds_since(start);
    return item;
  }

  Buffer take() {
    if (next_item_ == 0 || end_ != StreamEnd::kNot) {
      throw InvalidArgumentError("there is no item of the stream to take");
    }
    if (std::exchange(taken_, true)) throw InvalidArgumentError("the item of the stream has been taken");
    Buffer& unit = units_[items_[next_item_ - 1]];
    pool_.forget(unit);
    return std::move(unit);
  }

  void stop() {
    if (end_ == StreamEnd::kNot) leave(true, nullptr);
  }

  [[noreturn]] void fail(const std::exception_ptr& why) {
    if (end_ == StreamEnd::kNot) leave(false, why);
    std::rethrow_exception(why);
  }

  void abandon() noexcept {
    if (end_ != StreamEnd::kNot) return;
    try {
      if (std::uncaught_exceptions() > exceptions_) {
        leave(false,
              std::make_exception_ptr(PeerFailedError("an exception has ended its part of the stream")));
      } else {
        leave(true, nullptr);
      }
    } catch (...) {
      // The others have been told, or cannot be.
    }
  }

  StreamEnd end() const { return end_; }
  int64_t ended_by() const { return ended_by_; }
  const StreamPlan& plan() const { return plan_; }
  std::string plan_text() const { return stream_plan_text(groups_.grid(), sources_, outputs_, plan_); }
  std::span<const StreamOutput> outputs() const { return outputs_; }
  const StreamGrid& grid() const { return groups_.grid(); }
  StreamReport report() const {
    StreamReport report = report_;
    report.peak_bytes = beside_units_ + pool_.peak();
    report.sent = plan_.sent_by.empty() ? 0 : plan_.sent_by[me()];
    return report;
  }

 private:
  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  size_t me() const { return groups_.seat(); }

  // Before anything is sent.

  void prepare(const StateDict& state, const AssemblerOptions& options) {
    const StreamGrid& grid = groups_.grid();
    Description own;
    groups_.agree("describing the state", [&] {
      own = describe(state, grid.rank_of(me()), {});
      own.values.clear();
    });
    groups_.require_equal("the options of a stream", options_text(options));
    const std::vector<std::string> wishes = groups_.gather(encode_wish(options));
    const Descriptions descriptions = exchange_descriptions(groups_, own);
    // What all plan from is the same, so all throw alike; but for memory, and the mapping.
    groups_.agree("planning a stream", [&] {
      const JobState job = join(descriptions, Purpose::kSave);
      sources_ = stream_sources(job);
      outputs_ = stream_outputs(job, options.mapping, options.mapping_options);
      note_wishes(grid, wishes, outputs_);
      if (options.assign) options.assign(grid, outputs_);
      plan_ = plan_stream(grid, sources_, outputs_, {options.memory, options.pieces, options.round_bytes});
    });
    groups_.require_equal("the plan of a stream (from a mapping)", fingerprint(plan_, outputs_));
    groups_.agree("finding the memory for a stream", [&] {
      device_ = options.device.value_or(groups_.device());
      find_own_pieces(state);
      find_last_pieces();
      take_memory();
    });
  }

  void find_own_pieces(const StateDict& state) {
    own_.resize(sources_.size());
    for (size_t s = 0; s < sources_.size(); ++s) {
      find_pieces_of(state, s);
      for (size_t held = 0; held < sources_[s].boxes.size(); ++held) {
        const Box& box = sources_[s].boxes[held].box;
        if (!holds(groups_.grid(), sources_[s], held, me()) || own_[s].contains(key_of(box))) continue;
        throw InvalidArgumentError("tensor {}: its memory has not the box {}", quote(sources_[s].name),
                                   box_text(box));
      }
    }
  }

  static std::vector<int64_t> key_of(const Box& box) { return {box.offsets.begin(), box.offsets.end()}; }

  void find_pieces_of(const StateDict& state, size_t s) {
    const StateDict::Entry* entry = state.find(sources_[s].name);
    if (entry == nullptr) return;
    const LocalTensor& tensor = *entry->tensor();
    if (is_sub_byte(tensor.memory.dtype)) {
      if (!tensor.memory.is_dense()) {
        throw UnsupportedError("tensor {}: elements of {} have to lie densely", quote(sources_[s].name),
                               name_of(tensor.memory.dtype));
      }
      const Dims bytes = {tensor.memory.bytes()};
      own_[s][{0}] = dense_view(tensor.memory.data, DType::kUInt8, bytes, tensor.memory.device);
    } else {
      for (LocalTensor::Piece& piece : tensor.pieces(groups_.grid().rank_of(me()))) {
        own_[s][key_of(piece.global)] = std::move(piece.view);
      }
    }
  }

  bool mine(const Unit& unit) const { return wants(outputs_[unit.output], me()); }

  void find_last_pieces() {
    last_piece_.resize(plan_.units.size());
    std::vector<bool> more(outputs_.size());
    for (size_t u = plan_.units.size(); u-- > 0;) {
      last_piece_[u] = !more[plan_.units[u].output];
      more[plan_.units[u].output] = true;
    }
  }

  /// Everything but the units.
  void take_memory() {
    units_.resize(plan_.units.size());
    const Device moved = groups_.device();
    int64_t carried = 0;
    for (const StreamPlan::Round& round : plan_.rounds) {
      const size_t side = static_cast<size_t>(&round - plan_.rounds.data()) % 2;
      const size_t end = plan_.waves[round.end_wave - 1].end_move;
      for (size_t m = plan_.waves[round.first_wave].first_move; m < end; ++m) {
        const Move& move = plan_.moves[m];
        if (move.stays) continue;
        carried += move.region.source.numel() * element_bytes(move.wire);
        const bool casts = sources_[move.source].dtype != outputs_[plan_.units[move.unit].output].dtype;
        if ((casts || !want(move)) && staging_[side].size() == 0)
          staging_[side] = Buffer(plan_.stage_bytes(), moved);
      }
    }
    std::set<int> devices;
    const auto note = [&](Device device) {
      if (device.kind == DeviceKind::kCuda) devices.insert(device.index);
    };
    note(device_);
    note(moved);
    for (const auto& pieces : own_) {
      for (const auto& [offsets, view] : pieces) note(view.device);
    }
    if (!devices.empty()) copier_ = ElementCopier(devices, plan_.piece_bytes);
    const int64_t slot = std::min(plan_.piece_bytes, align_up(carried, kUnitAlignment));
    traffic_ = std::make_unique<Traffic>(Buffer(Traffic::kSlots * slot, moved), copier_, failure_);
    beside_units_ = staging_[0].size() + staging_[1].size() + copier_.bytes() + Traffic::kSlots * slot;
    pool_ = UnitPool(plan_.arena[me()], device_);
  }

  /// This rank's units of a round, but those without bytes.
  std::vector<size_t> units_with_bytes(size_t round) const {
    std::vector<size_t> units;
    for (size_t u = plan_.rounds[round].first_unit; u < plan_.rounds[round].end_unit; ++u) {
      if (mine(plan_.units[u]) && plan_.units[u].bytes > 0) units.push_back(u);
    }
    return units;
  }

  void take_units(size_t round) {
    const std::vector<size_t> units = units_with_bytes(round);
    std::vector<int64_t> sizes;
    for (size_t u : units) sizes.push_back(plan_.units[u].bytes);
    int64_t later = 0;
    if (plan_.rounds[round].ahead) {
      for (size_t u : units_with_bytes(round + 1)) later += plan_.units[u].bytes;
    }
    std::vector<Buffer> blocks = pool_.take(sizes, later);
    for (size_t i = 0; i < units.size(); ++i) units_[units[i]] = std::move(blocks[i]);
  }

  void let_go_of_units(size_t round) {
    for (size_t u : units_with_bytes(round)) {
      if (units_[u].size() > 0) pool_.give_back(std::exchange(units_[u], Buffer()));
    }
  }

  // Views.

  View unit_view(const Move& move) {
    const Unit& unit = plan_.units[move.unit];
    const DType dtype = moved_dtype(outputs_[unit.output].dtype);
    const int64_t width = element_bytes(dtype);
    const Dims strides = row_major_strides(unit.box.sizes);
    View view{units_[move.unit].data(), dtype, move.region.source.sizes, {}, device_};
    view.strides.resize(view.shape.size(), 0);
    for (size_t d = 0; d < unit.box.ndim(); ++d) {
      view.data += (move.region.target.offsets[d] - unit.box.offsets[d]) * strides[d] * width;
      const int64_t from = source_dim(move.region, d);
      if (from >= 0) view.strides[static_cast<size_t>(from)] = strides[d] * width;
    }
    return view;
  }

  View own_view(const Move& move) const {
    const Box& held = sources_[move.source].boxes[move.held].box;
    return view_of_box(own_[move.source].at(key_of(held)), held, move.region.source);
  }

  bool have(const Move& move) const { return holds(groups_.grid(), sources_[move.source], move.held, me()); }
  bool want(const Move& move) const { return mine(plan_.units[move.unit]); }
  DType target_dtype(const Move& move) const {
    return moved_dtype(outputs_[plan_.units[move.unit].output].dtype);
  }

  /// Where the move's elements pass through on this rank, as they travel: in place, or beside.
  View landing(size_t m) {
    const Move& move = plan_.moves[m];
    const DType wire = moved_dtype(move.wire);
    if (want(move) && wire == target_dtype(move)) return unit_view(move);
    return staged(m);
  }
  View staged(size_t m) {
    const Move& move = plan_.moves[m];
    Side& side = sides_[side_];
    if (side.at.empty()) side.at.resize(side.end_move - side.first_move, kNone);
    size_t& at = side.at[m - side.first_move];
    if (at == kNone) {
      at = static_cast<size_t>(side.used);
      side.used += align_up(move.region.source.numel() * element_bytes(move.wire), kUnitAlignment);
    }
    return dense_view(staging_[side_].data() + at, moved_dtype(move.wire), move.region.source.sizes,
                      staging_[side_].device());
  }
  /// What a root sends.
  View outgoing(size_t m) {
    const Move& move = plan_.moves[m];
    if (!have(move)) return landing(m);  // a relay
    const View own = own_view(move);
    if (own.dtype == moved_dtype(move.wire)) return own;
    const View narrowed_own = staged(m);
    copy(narrowed_own, own);
    return narrowed_own;
  }

  // Transfers.

  /// Of a round that is on its way: a wave, how far it is started, and where its staged pieces lie.
  struct Side {
    size_t first_move = 0, next_move = 0, end_move = 0;
    std::optional<int64_t> point;  // of the traffic: when all are started
    std::vector<size_t> at;
    int64_t used = 0;
  };

  /// This rank's part in a route.
  void take_part(Group& group, const RowRoute& route, size_t m) {
    const StreamGrid& grid = groups_.grid();
    const auto place = [&](size_t seat) { return group.place_of(grid.rank_of(seat)); };
    if (route.broadcast) {
      traffic_->broadcast(group, place(route.root), route.root == me() ? outgoing(m) : landing(m));
    } else if (route.root == me()) {
      const View sent = outgoing(m);
      for (size_t to : route.to) traffic_->send(group, place(to), sent);
    } else if (std::ranges::find(route.to, me()) != route.to.end()) {
      traffic_->receive(group, place(route.root), landing(m));
    }
  }

  void open_wave(size_t side, size_t wave) {
    side_ = side;
    const StreamPlan::Wave& moves = plan_.waves[wave];
    sides_[side] = {moves.first_move, moves.first_move, moves.end_move, {}, {}, 0};
    if (groups_.column() == nullptr) return;
    for (size_t m = moves.first_move; m < moves.end_move; ++m) {
      const auto down = column_route(groups_.grid(), sources_, plan_, plan_.moves[m]);
      if (!down || groups_.grid().column_of(down->root) != groups_.grid().column_of(me())) continue;
      take_part(*groups_.column(), *down, m);
    }
    traffic_->flush();
    traffic_->wait_until(traffic_->started());
  }

  /// Starts the side's moves before `end`.
  void start_moves(size_t side, size_t end) {
    side_ = side;
    Side& on_its_way = sides_[side];
    for (size_t& m = on_its_way.next_move; m < end; ++m) {
      const auto along =
          row_route(groups_.grid(), sources_, outputs_, plan_, plan_.moves[m], groups_.grid().row_of(me()));
      if (along) take_part(groups_.row(), *along, m);
    }
    if (end < on_its_way.end_move || on_its_way.point) return;
    traffic_->flush();
    on_its_way.point = traffic_->started();
  }

  void finish_wave(size_t side) {
    start_moves(side, sides_[side].end_move);
    const Side& landed = sides_[side];
    side_ = side;
    std::vector<size_t> later;
    for (size_t m = landed.first_move; m < landed.end_move; ++m) {
      const Move& move = plan_.moves[m];
      if (!want(move)) continue;
      if (move.twin || received(move)) {
        if (move.twin || moved_dtype(move.wire) != target_dtype(move)) later.push_back(m);
      } else {
        copy(unit_view(move), own_view(move));
      }
    }
    traffic_->wait_until(*landed.point);
    for (size_t m : later) {
      const Move& move = plan_.moves[m];
      copy(unit_view(move), move.twin ? unit_view(plan_.moves[*move.twin]) : staged(m));
    }
    sides_[side] = {};
  }

  /// What this rank copies for itself.
  void copy(const View& to, const ConstView& from) {
    failure_.guard([&] { copier_.copy(to, from); });
  }

  /// Whether it comes from another rank.
  bool received(const Move& move) const {
    if (!have(move)) return true;
    const auto along =
        row_route(groups_.grid(), sources_, outputs_, plan_, move, groups_.grid().row_of(me()));
    return along && along->broadcast && along->root != me();
  }

  // Rounds.

  size_t next_round() const { return round_ == kNone ? 0 : round_ + 1; }
  bool next_is_on_its_way() const { return started_ > next_round(); }

  void start_round(size_t round) {
    started_ = round + 1;
    open_wave(round % 2, plan_.rounds[round].first_wave);
  }

  void finish_round(size_t r) {
    const StreamPlan::Round& round = plan_.rounds[r];
    finish_wave(r % 2);
    for (size_t w = round.first_wave + 1; w < round.end_wave; ++w) {
      open_wave(r % 2, w);
      finish_wave(r % 2);
    }
    for (size_t u = round.first_unit; u < round.end_unit; ++u) {
      const StreamOutput& output = outputs_[plan_.units[u].output];
      if (!output.fill || !mine(plan_.units[u])) continue;
      const DType dtype = moved_dtype(output.dtype);
      const auto element = fill_element(output.dtype, *output.fill);
      const View unit = dense_view(units_[u].data(), dtype, plan_.units[u].box.sizes, device_);
      copy(unit, {element.data(), dtype, unit.shape, Dims(unit.shape.size(), 0), {}});
    }
  }

  /// From the round whose units are used up to the next one's.
  void advance() {
    if (round_ != kNone) let_go_of_units(round_);
    const size_t r = next_round();
    const bool more = r < plan_.rounds.size();
    if (!next_is_on_its_way()) {
      if (more) failure_.guard([&] { take_units(r); });
      if (meet(false, failure_.first())) return;
      if (!more) {
        end_ = StreamEnd::kDone;
        return;
      }
      start_round(r);
    }
    finish_round(r);
    const bool ahead = plan_.rounds[r].ahead;
    if (ahead) failure_.guard([&] { take_units(r + 1); });
    if (meet(false, failure_.first())) return;
    round_ = r;
    next_item_ = 0;
    items_.clear();
    for (size_t u = plan_.rounds[r].first_unit; u < plan_.rounds[r].end_unit; ++u) {
      if (mine(plan_.units[u])) items_.push_back(u);
    }
    if (ahead) start_round(r + 1);
  }

  /// More of the round ahead, in step with what of this one is handed out.
  void pump() {
    if (!next_is_on_its_way()) return;
    const size_t side = next_round() % 2;
    const Side& ahead = sides_[side];
    const size_t share = (ahead.end_move - ahead.first_move) * (next_item_ + 1) / items_.size();
    start_moves(side, ahead.first_move + share);
  }

  StreamItem hand_out() {
    pump();
    const size_t u = items_[next_item_++];
    taken_ = false;
    const Unit& unit = plan_.units[u];
    const StreamOutput& output = outputs_[unit.output];
    StreamItem item{output.name, output.dtype, output.shape, unit.box, {}, true, last_piece_[u]};
    item.whole = unit.box == whole(addressable_shape(output.dtype, output.shape));
    const DType dtype = item.whole ? output.dtype : moved_dtype(output.dtype);
    item.memory = dense_view(static_cast<const std::byte*>(units_[u].data()), dtype,
                             item.whole ? std::span<const int64_t>(output.shape) : unit.box.sizes, device_);
    ++report_.items;
    report_.bytes += unit.bytes;
    return item;
  }

  /// All say how they are. Returns whether that is the end of the stream.
  bool meet(bool ended, const std::exception_ptr& failure) {
    const bool all_used = next_round() == plan_.rounds.size() && next_item_ == items_.size();
    StreamGroups::Verdict verdict;
    try {
      verdict = groups_.settle("streaming", ended, failure);
    } catch (...) {
      end_ = StreamEnd::kEnded;
      throw;
    }
    if (!verdict.ended) return false;
    end_ = all_used ? StreamEnd::kDone : StreamEnd::kEnded;
    ended_by_ = verdict.by;
    return true;
  }

  /// Early, when what is on its way has landed: the others count on this rank until then.
  void leave(bool ended, const std::exception_ptr& failure) {
    try {
      if (next_is_on_its_way()) finish_round(next_round());
    } catch (...) {
      give_up(std::current_exception());
      if (failure) std::rethrow_exception(failure);
      throw;
    }
    meet(ended, failure ? failure : failure_.first());
  }

  /// After a failure in the middle of transfers in which this rank cannot take part any more: the others'
  /// groups break.
  void give_up(const std::exception_ptr& why) {
    if (end_ != StreamEnd::kNot) return;  // all know
    end_ = StreamEnd::kEnded;
    groups_.break_both(why);
    traffic_->give_up();
  }

  StreamGroups groups_;
  const int exceptions_;
  std::vector<StreamSource> sources_;
  std::vector<StreamOutput> outputs_;
  StreamPlan plan_;
  Device device_;             // where units are
  int64_t beside_units_ = 0;  // bytes that this rank holds from begin to end
  /// Of each source, this rank's parts, by the offsets of their boxes.
  std::vector<std::map<std::vector<int64_t>, View>> own_;
  std::vector<bool> last_piece_;  // of each unit

  size_t round_ = kNone;       // whose units are handed out
  size_t started_ = 0;         // rounds
  std::vector<size_t> items_;  // of that round, this rank's units
  size_t next_item_ = 0;
  bool taken_ = false;  // the last that was handed out
  StreamEnd end_ = StreamEnd::kNot;
  int64_t ended_by_ = 0;
  StreamReport report_;

  // Memory goes after what moves it.
  LocalFailure failure_;
  ElementCopier copier_;
  UnitPool pool_;
  std::vector<Buffer> units_;  // of those that are on their way or used
  Buffer staging_[2];
  Side sides_[2];
  size_t side_ = 0;  // the one that is worked on
  std::unique_ptr<Traffic> traffic_;
};

Assembler::Assembler(Group& group, const StateDict& state, const AssemblerOptions& options)
    : stream_(std::make_unique<Stream>(StreamGroups(group), state, options)) {}

Assembler::Assembler(Group* row, Group* column, const StateDict& state, const AssemblerOptions& options)
    : stream_(std::make_unique<Stream>(StreamGroups(row, column), state, options)) {}

Assembler::~Assembler() { stream_->abandon(); }

std::optional<StreamItem> Assembler::next() { return stream_->next(); }
Buffer Assembler::take() { return stream_->take(); }
void Assembler::stop() { stream_->stop(); }
void Assembler::fail(std::exception_ptr why) { stream_->fail(why); }
StreamEnd Assembler::end() const { return stream_->end(); }
int64_t Assembler::ended_by() const { return stream_->ended_by(); }
const StreamPlan& Assembler::plan() const { return stream_->plan(); }
std::string Assembler::plan_text() const { return stream_->plan_text(); }
std::span<const StreamOutput> Assembler::outputs() const { return stream_->outputs(); }
const StreamGrid& Assembler::grid() const { return stream_->grid(); }
StreamReport Assembler::report() const { return stream_->report(); }

void for_each_item(Assembler& assembler, const std::function<bool(const StreamItem& item)>& use) {
  while (const std::optional<StreamItem> item = assembler.next()) {
    bool more = false;
    try {
      more = use(*item);
    } catch (...) {
      assembler.fail(std::current_exception());
    }
    if (!more) return assembler.stop();
  }
}

}  // namespace spolia
