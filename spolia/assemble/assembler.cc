#include "spolia/assemble/assembler.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "spolia/assemble/pair_batches.h"
#include "spolia/assemble/stream_groups.h"
#include "spolia/assemble/stream_inputs.h"
#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/broadcast_batches.h"
#include "spolia/tensor/cast.h"
#include "spolia/tensor/copy.h"

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

std::string fingerprint(const StreamPlan& plan, std::span<const StreamOutput> outputs) {
  Packer out;
  for (const Unit& unit : plan.units) {
    out.text(outputs[unit.output].name);
    out.text(name_of(outputs[unit.output].dtype));
    out.numbers(outputs[unit.output].shape);
    out.numbers(unit.box.offsets);
  }
  for (const Move& move : plan.moves) {
    out.number(static_cast<int64_t>(move.unit));
    out.number(static_cast<int64_t>(move.source));
    out.number(static_cast<int64_t>(move.held));
    out.numbers(move.region.source.offsets);
    out.numbers(move.region.target.offsets);
    for (uint32_t root : move.roots) out.number(root);
  }
  return fmt::format("{:016x}", xxh3_64(bytes_of(out.take())));
}

void copy_elements(const View& to, const ConstView& from) {
  if (to.dtype != from.dtype) {
    cast_strided(to.shape, to.dtype, to.data, to.strides, from.dtype, from.data, from.strides);
  } else if (to.is_dense() && from.is_dense()) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
  } else {
    copy_strided(to.shape, element_bytes(to.dtype), to.data, to.strides, from.data, from.strides);
  }
}

/// Elements finer than a byte travel as bytes.
DType moved_dtype(DType dtype) { return is_sub_byte(dtype) ? DType::kUInt8 : dtype; }

}  // namespace

/// Rounds begin with a word from all (settle), then go on their way, the next one too where there is room.
/// While a round's units are used, more of the next one is started with every pull.
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
    const size_t unit = items_[next_item_ - 1];
    Buffer kept(plan_.units[unit].bytes);
    if (kept.size() > 0)
      std::memcpy(kept.data(), arena_.data() + place_[unit], static_cast<size_t>(kept.size()));
    return kept;
  }

  void stop() {
    if (end_ == StreamEnd::kNot) meet(true, nullptr);
  }

  [[noreturn]] void fail(const std::exception_ptr& why) {
    if (end_ == StreamEnd::kNot) meet(false, why);
    std::rethrow_exception(why);
  }

  void abandon() noexcept {
    if (end_ != StreamEnd::kNot) return;
    try {
      if (std::uncaught_exceptions() > exceptions_) {
        meet(false,
             std::make_exception_ptr(PeerFailedError("an exception has ended its part of the stream")));
      } else {
        meet(true, nullptr);
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
      find_own_pieces(state);
      place_units();
    });
  }

  void find_own_pieces(const StateDict& state) {
    own_.resize(sources_.size());
    for (size_t s = 0; s < sources_.size(); ++s) {
      const StateDict::Entry* entry = state.find(sources_[s].name);
      if (entry == nullptr) continue;
      const LocalTensor& tensor = *entry->tensor();
      if (is_sub_byte(tensor.memory.dtype)) {
        if (!tensor.memory.is_dense()) {
          throw UnsupportedError("tensor {}: elements of {} have to lie densely", quote(sources_[s].name),
                                 name_of(tensor.memory.dtype));
        }
        const Dims bytes = {tensor.memory.bytes()};
        own_[s].push_back({whole(bytes), dense_view(tensor.memory.data, DType::kUInt8, bytes)});
      } else {
        own_[s] = tensor.pieces(groups_.grid().rank_of(me()));
      }
    }
  }

  bool mine(const Unit& unit) const { return wants(outputs_[unit.output], me()); }

  /// Rounds lie at the two ends of the arena in turn, so that two that follow each other never meet.
  void place_units() {
    arena_ = Buffer(plan_.arena[me()]);
    place_.resize(plan_.units.size(), 0);
    round_bytes_.resize(plan_.rounds.size(), 0);
    last_piece_.resize(plan_.units.size());
    std::vector<bool> more(outputs_.size());
    for (size_t u = plan_.units.size(); u-- > 0;) {
      last_piece_[u] = !more[plan_.units[u].output];
      more[plan_.units[u].output] = true;
    }
    for (size_t r = 0; r < plan_.rounds.size(); ++r) {
      const StreamPlan::Round& round = plan_.rounds[r];
      for (size_t u = round.first_unit; u < round.end_unit; ++u) {
        if (!mine(plan_.units[u])) continue;
        place_[u] = round_bytes_[r];
        round_bytes_[r] += align_up(plan_.units[u].bytes, kUnitAlignment);
      }
      if (r % 2 == 0) continue;
      for (size_t u = round.first_unit; u < round.end_unit; ++u) place_[u] += arena_.size() - round_bytes_[r];
    }
    const int64_t slot = plan_.staging / 4;
    for (size_t r = 0; r < plan_.rounds.size(); ++r) {
      for (size_t w = plan_.rounds[r].first_wave; w < plan_.rounds[r].end_wave; ++w) {
        for (size_t m = plan_.waves[w].first_move; m < plan_.waves[w].end_move; ++m) {
          const bool casts = sources_[plan_.moves[m].source].dtype !=
                             outputs_[plan_.units[plan_.moves[m].unit].output].dtype;
          if (!plan_.moves[m].stays && (casts || !mine(plan_.units[plan_.moves[m].unit])))
            staging_[r % 2] = Buffer(slot);
          if (staging_[r % 2].size() > 0) break;
        }
      }
    }
    const BatchOptions batches = {std::min<int64_t>(int64_t{6} << 20, plan_.staging / 32), 4,
                                  plan_.staging / 8};
    for (Traffic& traffic : rows_) traffic = Traffic(batches);
    down_ = Traffic(batches);
    // Messages take no more than what they carry.
    int64_t carried = 0;
    for (const Move& move : plan_.moves) {
      if (!move.stays) carried += move.region.source.numel() * element_bytes(move.wire);
    }
    const int64_t kinds = groups_.column() != nullptr ? 3 : 2;
    packing_ = kinds * std::min(plan_.staging / 8, carried);
  }

  // Views.

  View unit_view(const Move& move) {
    const Unit& unit = plan_.units[move.unit];
    const DType dtype = moved_dtype(outputs_[unit.output].dtype);
    const int64_t width = element_bytes(dtype);
    const Dims strides = row_major_strides(unit.box.sizes);
    View view{arena_.data() + place_[move.unit], dtype, move.region.source.sizes, {}, {}};
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
    for (const LocalTensor::Piece& piece : own_[move.source]) {
      if (piece.global == held) return view_of_box(piece.view, held, move.region.source);
    }
    throw InvalidArgumentError("tensor {}: its memory has not the box {}", quote(sources_[move.source].name),
                               box_text(held));
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
      note_memory();
    }
    return dense_view(staging_[side_].data() + at, moved_dtype(move.wire), move.region.source.sizes);
  }
  /// What a root sends.
  View outgoing(size_t m) {
    const Move& move = plan_.moves[m];
    if (!have(move)) return landing(m);  // a relay
    const View own = own_view(move);
    if (own.dtype == moved_dtype(move.wire)) return own;
    const View narrowed_own = staged(m);
    copy_elements(narrowed_own, own);
    return narrowed_own;
  }

  // Transfers.

  /// Broadcasts and messages that are started and finished together.
  struct Traffic {
    Traffic() = default;
    explicit Traffic(const BatchOptions& options)
        : broadcasts(std::make_unique<BroadcastBatches>(options)),
          pairs(std::make_unique<PairBatches>(options)) {}
    void wait_all() {
      broadcasts->wait_all();
      pairs->wait_all();
    }
    std::unique_ptr<BroadcastBatches> broadcasts;
    std::unique_ptr<PairBatches> pairs;
  };
  /// Of a round that is on its way: the wave, how far it is started, and where its staged pieces lie.
  struct Side {
    size_t wave = kNone;
    size_t first_move = 0, next_move = 0, end_move = 0;
    std::vector<size_t> at;
    int64_t used = 0;
  };

  /// This rank's part in a route.
  void take_part(Traffic& traffic, Group& group, const RowRoute& route, size_t m) {
    const StreamGrid& grid = groups_.grid();
    const auto place = [&](size_t seat) { return group.place_of(grid.rank_of(seat)); };
    if (route.broadcast) {
      traffic.broadcasts->add(group, place(route.root), route.root == me() ? outgoing(m) : landing(m));
    } else if (route.root == me()) {
      const View sent = outgoing(m);
      for (size_t to : route.to) traffic.pairs->add(group, place(to), true, sent);
    } else if (std::ranges::find(route.to, me()) != route.to.end()) {
      traffic.pairs->add(group, place(route.root), false, landing(m));
    }
  }

  void open_wave(size_t side, size_t wave) {
    side_ = side;
    const StreamPlan::Wave& moves = plan_.waves[wave];
    sides_[side] = {wave, moves.first_move, moves.first_move, moves.end_move, {}, 0};
    if (groups_.column() == nullptr) return;
    for (size_t m = moves.first_move; m < moves.end_move; ++m) {
      const auto down = column_route(groups_.grid(), sources_, plan_, plan_.moves[m]);
      if (!down || groups_.grid().column_of(down->root) != groups_.grid().column_of(me())) continue;
      take_part(down_, *groups_.column(), *down, m);
    }
    down_.wait_all();
  }

  /// Starts the side's moves before `end`.
  void start_moves(size_t side, size_t end) {
    side_ = side;
    Side& on_its_way = sides_[side];
    for (size_t& m = on_its_way.next_move; m < end; ++m) {
      const auto along =
          row_route(groups_.grid(), sources_, outputs_, plan_, plan_.moves[m], groups_.grid().row_of(me()));
      if (along) take_part(rows_[side], groups_.row(), *along, m);
    }
    if (end < on_its_way.end_move || on_its_way.wave == kNone) return;
    rows_[side].broadcasts->flush();
    rows_[side].pairs->flush();
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
        copy_elements(unit_view(move), own_view(move));
      }
    }
    rows_[side].wait_all();
    for (size_t m : later) {
      const Move& move = plan_.moves[m];
      copy_elements(unit_view(move), move.twin ? unit_view(plan_.moves[*move.twin]) : staged(m));
    }
    sides_[side] = {};
  }

  /// Whether it comes from another rank.
  bool received(const Move& move) const {
    if (!have(move)) return true;
    const auto along =
        row_route(groups_.grid(), sources_, outputs_, plan_, move, groups_.grid().row_of(me()));
    return along && along->broadcast && along->root != me();
  }

  // Rounds.

  void start_round(size_t round) {
    started_ = round + 1;
    in_arena_ += round_bytes_[round];
    note_memory();
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
      const Dims bytes_or_sizes = plan_.units[u].box.sizes;
      fill_elements(dense_view(arena_.data() + place_[u], moved_dtype(output.dtype), bytes_or_sizes),
                    *output.fill);
    }
  }

  /// From the round whose units are used up to the next one's.
  void advance() {
    if (round_ != kNone) in_arena_ -= round_bytes_[round_];
    const size_t r = round_ == kNone ? 0 : round_ + 1;
    if (meet(false, nullptr)) return;
    if (r == plan_.rounds.size()) {
      end_ = StreamEnd::kDone;
      return;
    }
    if (started_ == r) {
      start_round(r);
      start_moves(r % 2, sides_[r % 2].end_move);
    }
    if (plan_.rounds[r].ahead) start_round(r + 1);
    finish_round(r);
    round_ = r;
    next_item_ = 0;
    items_.clear();
    for (size_t u = plan_.rounds[r].first_unit; u < plan_.rounds[r].end_unit; ++u) {
      if (mine(plan_.units[u])) items_.push_back(u);
    }
  }

  /// More of the round ahead, in step with what of this one is handed out.
  void pump() {
    if (started_ <= round_ + 1) return;
    const size_t side = (round_ + 1) % 2;
    const Side& ahead = sides_[side];
    const size_t share = (ahead.end_move - ahead.first_move) * (next_item_ + 1) / items_.size();
    start_moves(side, ahead.first_move + share);
  }

  StreamItem hand_out() {
    pump();
    const size_t u = items_[next_item_++];
    const Unit& unit = plan_.units[u];
    const StreamOutput& output = outputs_[unit.output];
    StreamItem item{output.name, output.dtype, output.shape, unit.box, {}, true, last_piece_[u]};
    item.whole = unit.box == whole(addressable_shape(output.dtype, output.shape));
    item.memory = dense_view(static_cast<const std::byte*>(arena_.data()) + place_[u], output.dtype,
                             item.whole ? std::span<const int64_t>(output.shape) : unit.box.sizes);
    ++report_.items;
    report_.bytes += unit.bytes;
    return item;
  }

  /// The boundary of a round: all say how they are. Returns whether that is the end of the stream.
  bool meet(bool ended, const std::exception_ptr& failure) {
    const bool at_the_end = round_ != kNone && round_ + 1 == plan_.rounds.size();
    const bool all_used = at_the_end && next_item_ == items_.size();
    StreamGroups::Verdict verdict;
    try {
      // What is started all have started, up to the boundary.
      const size_t ahead = round_ == kNone ? 0 : round_ + 1;
      if (started_ > ahead) start_moves(ahead % 2, sides_[ahead % 2].end_move);
      verdict = groups_.settle("streaming", ended, failure);
      if (verdict.ended) land();
    } catch (...) {
      end_ = StreamEnd::kEnded;
      land();
      throw;
    }
    if (!verdict.ended) return false;
    end_ = all_used ? StreamEnd::kDone : StreamEnd::kEnded;
    ended_by_ = verdict.by;
    return true;
  }

  /// Waits for what is on its way, whose memory is ours.
  void land() noexcept {
    for (Traffic& traffic : rows_) {
      try {
        if (traffic.broadcasts) traffic.wait_all();
      } catch (...) {
        // Why is known already.
      }
    }
  }

  /// After a failure in the middle of transfers the others cannot go on: their groups break.
  void give_up(const std::exception_ptr& why) {
    if (end_ != StreamEnd::kNot) return;  // all know
    end_ = StreamEnd::kEnded;
    const std::string reason =
        fmt::format("streaming failed on rank {}: {}", groups_.grid().rank_of(me()), text_of(why));
    groups_.row().backend().break_group(reason);
    if (groups_.column() != nullptr) groups_.column()->backend().break_group(reason);
    land();
  }

  void note_memory() {
    const int64_t now = in_arena_ + sides_[0].used + sides_[1].used + packing_;
    report_.peak_bytes = std::max(report_.peak_bytes, now);
  }

  StreamGroups groups_;
  const int exceptions_;
  std::vector<StreamSource> sources_;
  std::vector<StreamOutput> outputs_;
  StreamPlan plan_;
  std::vector<std::vector<LocalTensor::Piece>> own_;  // of each source
  std::vector<int64_t> place_;                        // of each unit, in the arena
  std::vector<int64_t> round_bytes_;                  // on this rank
  std::vector<bool> last_piece_;
  int64_t packing_ = 0;  // what messages may take
  int64_t in_arena_ = 0;

  size_t round_ = kNone;       // whose units are handed out
  size_t started_ = 0;         // rounds
  std::vector<size_t> items_;  // of that round, this rank's units
  size_t next_item_ = 0;
  StreamEnd end_ = StreamEnd::kNot;
  int64_t ended_by_ = 0;
  StreamReport report_;

  // Memory goes after what moves it.
  Buffer arena_, staging_[2];
  Side sides_[2];
  size_t side_ = 0;  // the one that is worked on
  Traffic rows_[2], down_;
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
