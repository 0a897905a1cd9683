#include "spolia/optim/mesh_engine.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/comm/agree.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr int64_t kAlign = 512;  // of what is packed, in bytes

void grow(Buffer& buffer, int64_t bytes) {
  if (buffer.size() < bytes) buffer = Buffer(bytes);
}

int64_t elements_of(const std::vector<UnitPiece>& pieces) {
  int64_t elements = 0;
  for (const UnitPiece& piece : pieces) elements += numel(piece.sizes);
  return elements;
}

enum class End : uint8_t { kLocal, kUnit };

/// Pieces from a shard, or a matrix, to a message, one after the other; or back.
void pack(const std::vector<UnitPiece>& pieces, int64_t width, End end, std::byte* from, std::byte* message,
          bool unpack) {
  for (const UnitPiece& piece : pieces) {
    const Dims strides = in_bytes(end == End::kLocal ? piece.local_strides : piece.unit_strides, width);
    const Dims dense = in_bytes(row_major_strides(piece.sizes), width);
    std::byte* at = from + (end == End::kLocal ? piece.local_offset : piece.unit_offset) * width;
    if (unpack) {
      copy_strided(piece.sizes, width, at, strides, message, dense);
    } else {
      copy_strided(piece.sizes, width, message, dense, at, strides);
    }
    message += numel(piece.sizes) * width;
  }
}

/// Whether a matrix lies in the shard as it would by itself.
bool lies_dense(const MatrixUnit& unit, const std::vector<UnitPiece>& pieces) {
  if (pieces.size() != 1 || numel(pieces[0].sizes) != unit.rows * unit.columns) return false;
  const Dims dense = row_major_strides(pieces[0].sizes);
  for (size_t d = 0; d < dense.size(); ++d)
    if (pieces[0].sizes[d] != 1 && pieces[0].local_strides[d] != dense[d]) return false;
  return true;
}

View bytes_view(Buffer& buffer, int64_t bytes) {
  return byte_view(std::span(buffer.data(), static_cast<size_t>(bytes)));
}

}  // namespace

MeshEngine::MeshEngine(World& world, MeshPlan plan, const MeshEngineOptions& options)
    : plan_(std::move(plan)),
      options_(options),
      rank_(world.rank()),
      timeout_(world.all()->timeout()),
      groups_(plan_.groups.size()) {
  make_groups(world);
  for (size_t g = 0; g < groups_.size(); ++g) prepare(groups_[g], plan_.groups[g]);
}

void MeshEngine::make_groups(World& world) {
  std::map<std::vector<int64_t>, std::shared_ptr<Group>> rows;
  auto make = [&](std::vector<int64_t> ranks) {
    std::sort(ranks.begin(), ranks.end());
    std::shared_ptr<Group> group = world.create(ranks);
    if (group) all_groups_.push_back(group);
    return group;
  };
  std::vector<size_t> leaders;  // the first group of the plan for each channel
  std::vector<std::optional<size_t>> channel_of(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const MeshGroup& group = plan_.groups[g];
    GroupWork& work = groups_[g];
    work.position = group.position_of(rank_);
    const bool exchanges = std::any_of(group.batches.begin(), group.batches.end(),
                                       [](const MeshBatch& batch) { return batch.exchanges; });
    for (const auto& ranks : group.rows) {
      if (!exchanges) break;
      auto [found, fresh] = rows.try_emplace(ranks);
      if (fresh) found->second = make(ranks);
      if (found->second) work.row = found->second;
    }
    if (group.rows.size() == group.replica_groups.size()) continue;  // no replicas
    // Groups with the same columns share their channel.
    for (size_t leader : leaders) {
      const MeshGroup& other = plan_.groups[leader];
      if (other.layout.mesh() == group.layout.mesh() && other.replicated_dims == group.replicated_dims)
        channel_of[g] = channel_of[leader];
    }
    if (!channel_of[g]) {
      leaders.push_back(g);
      channel_of[g] = channels_.size();
      Channel& channel = channels_.emplace_back();
      channel.flat = group.replica_groups.size() > 1;
      // Every rank makes all lines, its own and the others'.
      std::map<std::vector<int64_t>, std::shared_ptr<Group>> lines;
      std::vector<BroadcastDim> dims;
      auto meet = [&](const std::vector<int64_t>& line, bool own) {
        std::shared_ptr<Group> made;
        if (line.size() > 1) {
          auto [found, fresh] = lines.try_emplace(line);
          if (fresh) found->second = make(line);
          made = found->second;
        }
        if (!own) return;
        dims.push_back({made.get(), line});
        channel.groups.push_back(made);
      };
      const DeviceMesh& mesh = group.layout.mesh();
      if (channel.flat) {
        for (size_t place = 0; place < group.rows[0].size(); ++place)
          for (const std::vector<size_t>& members : group.replica_groups) {
            std::vector<int64_t> line;
            for (size_t row : members) line.push_back(group.rows[row][place]);
            meet(line, std::find(line.begin(), line.end(), rank_) != line.end());
          }
      } else {
        for (int64_t rank : mesh.ranks())
          for (size_t d : group.replicated_dims) meet(mesh.ranks_along(d, rank), rank == rank_);
      }
      if (!dims.empty()) channel.broadcast = std::make_unique<HierarchicalBroadcast>(std::move(dims));
    }
    work.channel = channel_of[g];
  }
}

void MeshEngine::prepare(GroupWork& work, const MeshGroup& group) {
  if (!work.position) return;
  for (const MeshBatch& batch : group.batches) work.batches.push_back(prepare_batch(work, group, batch));
}

MeshEngine::BatchWork MeshEngine::prepare_batch(const GroupWork& work, const MeshGroup& group,
                                                const MeshBatch& batch) const {
  const MeshGroup::Position& position = *work.position;
  const std::vector<int64_t>& ranks = group.rows[position.row];
  BatchWork result;
  result.exchanges = batch.exchanges;
  result.outer_counts.resize(ranks.size());
  result.inner_counts.resize(ranks.size());
  std::map<size_t, Sending> sendings;
  for (size_t t : batch.tensors) {
    const MeshTensor& tensor = plan_.tensors[t];
    const MeshOwner& owner = plan_.assignments[t]->owners[position.replica_group];
    const Dims local_shape = group.layout.shard(tensor.shape, rank_).local_shape;
    const LeadingCut& cut = plan_.assignments[t]->cut;
    for (size_t i = 0; i < owner.rows.size(); ++i) {
      const LeadingPart part = cut.part(i, local_shape);
      const int64_t bytes = byte_size(tensor.dtype, part.shape_of(local_shape));
      if (bytes == 0) continue;
      Sending& sending = sendings[owner.rows[i]];
      if (bytes >= options_.pack_below) {
        sending.alone.push_back({t, part, bytes});
      } else {
        sending.packed.push_back({t, part, bytes});
        sending.packed_bytes = checked_add(sending.packed_bytes, align_up(bytes, kAlign));
      }
    }
    const std::optional<size_t> number = owner.part_of(position.row);
    if (!number) continue;
    const LeadingPart part = cut.part(*number, local_shape);
    const std::shared_ptr<const Layout> layout = plan_.state_layout(t);
    const RankShard own = layout->shard(tensor.shape, rank_);
    Owned& item = result.owned.emplace_back();
    item.tensor = t;
    item.local_shape = own.local_shape;
    item.offset = result.updates_bytes;
    if (!tensor.matrices) continue;
    result.updates_bytes =
        checked_add(item.offset, align_up(byte_size(tensor.update, own.local_shape), kAlign));
    item.units = matrix_units(*tensor.matrices, tensor.shape);
    const bool moments_travel = tensor.moments_travel();
    if (moments_travel && !part.is_all()) {  // the row's own moments begin with those of its part
      const MatrixShape matrices = matrix_shape(*tensor.matrices, tensor.shape);
      const int64_t before = part.begin * (matrices.batch / tensor.shape[0]) * matrices.rows;
      for (MatrixUnit& unit : item.units)
        for (RowRange& range : unit.moment_rows) range = {range.begin - before, range.end - before};
    }
    const int64_t width = element_bytes(tensor.update);
    std::vector<RankShard> shards(ranks.size());
    if (std::find(owner.units.begin(), owner.units.end(), rank_) != owner.units.end())
      for (size_t place = 0; place < ranks.size(); ++place)
        shards[place] = layout->shard(tensor.shape, ranks[place]);
    for (size_t u = 0; u < item.units.size(); ++u) {
      if (std::find(ranks.begin(), ranks.end(), owner.units[u]) == ranks.end()) continue;  // another row's
      MatrixUnit& unit = item.units[u];
      const int64_t moments = moments_travel ? unit.rows * element_bytes(DType::kFloat32) : 0;
      // A message's part for this matrix with the rank `peer`; its place is found when all are known.
      auto place_part = [&](std::vector<Transfer>& list, std::vector<int64_t>& counts, size_t index,
                            int64_t peer, std::vector<UnitPiece> pieces) {
        if (peer == rank_) {
          if (!pieces.empty()) list.push_back({index, u, std::nullopt, 0, std::move(pieces)});
          return;
        }
        const int64_t bytes = elements_of(pieces) * width + moments;
        if (bytes == 0) return;
        const auto at = static_cast<size_t>(work.row->place_of(peer));
        list.push_back({index, u, at, counts[at], std::move(pieces)});
        counts[at] = checked_add(counts[at], align_up(bytes, kAlign));
      };
      std::vector<UnitPiece> mine = unit_pieces(unit, own);
      if (owner.units[u] == rank_) {
        Computed& computed = result.computed.emplace_back();
        computed.owned = result.owned.size() - 1;
        computed.unit = u;
        computed.in_place = lies_dense(unit, mine);
        if (!moments_travel) {  // they are as the shard's rows
          unit.moment_rows.clear();
          for (const UnitPiece& piece : mine) {
            const int64_t begin = piece.local_offset / unit.columns;
            unit.moment_rows.push_back({begin, begin + numel(piece.sizes) / unit.columns});
          }
        }
        if (computed.in_place) {
          computed.offset = item.offset + mine[0].local_offset * width;
        } else {
          computed.offset = result.matrices_bytes;
          result.matrices_bytes =
              checked_add(computed.offset, align_up(unit.rows * unit.columns * width, kAlign));
        }
        for (size_t place = 0; place < ranks.size(); ++place)
          place_part(result.from_row, result.inner_counts, result.computed.size() - 1, ranks[place],
                     place == position.place ? mine : unit_pieces(unit, shards[place]));
      } else {
        place_part(result.to_owners, result.outer_counts, result.owned.size() - 1, owner.units[u],
                   std::move(mine));
      }
    }
  }
  // Messages lie in the buffers by place.
  auto lay_out = [](std::vector<Transfer>& list, const std::vector<int64_t>& counts) {
    std::vector<int64_t> begins(counts.size());
    int64_t total = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      begins[i] = total;
      total = checked_add(total, counts[i]);
    }
    for (Transfer& transfer : list)
      if (transfer.peer) transfer.offset += begins[*transfer.peer];
    return total;
  };
  result.outer_bytes = lay_out(result.to_owners, result.outer_counts);
  result.inner_bytes = lay_out(result.from_row, result.inner_counts);
  if (work.channel)
    for (auto& [row, sending] : sendings) {
      sending.row = row;
      result.sendings.push_back(std::move(sending));
    }
  return result;
}

View MeshEngine::update_of(const BatchWork&, Flight& flight, const Owned& owned) const {
  const MeshTensor& tensor = plan_.tensors[owned.tensor];
  if (!tensor.matrices) return {};
  return dense_view(flight.updates.data() + owned.offset, tensor.update, owned.local_shape);
}

View MeshEngine::matrix_of(const BatchWork& work, Flight& flight, const Computed& computed) const {
  const Owned& owned = work.owned[computed.owned];
  const MatrixUnit& unit = owned.units[computed.unit];
  std::byte* memory = (computed.in_place ? flight.updates : flight.matrices).data() + computed.offset;
  return dense_view(memory, plan_.tensors[owned.tensor].update, std::array{unit.rows, unit.columns});
}

/// Scratch memory for a matrix's row moments.
View MeshEngine::moments_of(const MatrixUnit& unit) {
  const std::array shape{unit.rows, int64_t{1}};
  grow(moments_, byte_size(DType::kFloat32, shape));
  return dense_view(moments_.data(), DType::kFloat32, shape);
}

namespace {

/// A matrix's rows of the moments of the whole tensor, to `part` or back.
void copy_moments(const MatrixUnit& unit, const View& all, std::byte* part, bool to_part) {
  for (const RowRange& range : unit.moment_rows) {
    const int64_t width = element_bytes(DType::kFloat32), bytes = (range.end - range.begin) * width;
    std::byte* at = all.data + range.begin * width;
    std::memcpy(to_part ? part : at, to_part ? at : part, static_cast<size_t>(bytes));
    part += bytes;
  }
}

}  // namespace

void MeshEngine::exchange(GroupWork& group, const BatchWork& work, Flight& flight, bool to_owners) {
  if (!work.exchanges) return;
  const View outer = bytes_view(flight.outer, work.outer_bytes),
             inner = bytes_view(flight.inner, work.inner_bytes);
  ++counters_.collectives;
  counters_.exchanged_bytes += to_owners ? work.outer_bytes : work.inner_bytes;
  flight.pending = to_owners ? group.row->all_to_all(outer, work.outer_counts, inner, work.inner_counts)
                             : group.row->all_to_all(inner, work.inner_counts, outer, work.outer_counts);
}

void MeshEngine::gather(GroupWork& group, size_t batch, MeshArithmetic& arithmetic) {
  const BatchWork& work = group.batches[batch];
  Flight& flight = flights_[batch % flights_.size()];
  grow(flight.updates, work.updates_bytes);
  grow(flight.matrices, work.matrices_bytes);
  grow(flight.outer, work.outer_bytes);
  grow(flight.inner, work.inner_bytes);
  for (const Owned& owned : work.owned) {
    if (!plan_.tensors[owned.tensor].matrices) continue;
    timed([&] { arithmetic.fill_update(owned.tensor, update_of(work, flight, owned)); });
    poll();
  }
  for (const Transfer& transfer : work.to_owners) {
    const Owned& owned = work.owned[transfer.item];
    pack(transfer.pieces, element_bytes(plan_.tensors[owned.tensor].update), End::kLocal,
         flight.updates.data() + owned.offset, flight.outer.data() + transfer.offset, false);
  }
  exchange(group, work, flight, true);
}

void MeshEngine::compute(GroupWork& group, size_t batch, MeshArithmetic& arithmetic) {
  const BatchWork& work = group.batches[batch];
  Flight& flight = flights_[batch % flights_.size()];
  auto wait = [&] {
    const auto start = Clock::now();
    poll_until([&] { return flight.pending.test(); }, [&] { flight.pending.wait(); });
    counters_.exchange_wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  };
  if (work.exchanges) wait();
  auto place = [&](const Transfer& transfer, bool back) {
    const Computed& computed = work.computed[transfer.item];
    const Owned& owned = work.owned[computed.owned];
    const int64_t width = element_bytes(plan_.tensors[owned.tensor].update);
    std::byte* matrix = matrix_of(work, flight, computed).data;
    if (transfer.peer) {
      pack(transfer.pieces, width, End::kUnit, matrix, flight.inner.data() + transfer.offset, !back);
    } else if (!computed.in_place) {
      copy_pieces(transfer.pieces, width, flight.updates.data() + owned.offset, matrix, !back);
    }
  };
  for (const Transfer& transfer : work.from_row) place(transfer, false);
  size_t next = 0;  // transfers lie in the order of the matrices
  for (size_t c = 0; c < work.computed.size(); ++c) {
    const Computed& computed = work.computed[c];
    const Owned& owned = work.owned[computed.owned];
    const MatrixUnit& unit = owned.units[computed.unit];
    const bool with_moments = plan_.tensors[owned.tensor].row_moments,
               they_travel = plan_.tensors[owned.tensor].moments_travel();
    const View moments = with_moments ? moments_of(unit) : View{};
    if (with_moments) copy_moments(unit, arithmetic.row_moments(owned.tensor), moments.data, true);
    counters_.compute_seconds +=
        timed([&] { arithmetic.compute(owned.tensor, unit, matrix_of(work, flight, computed), moments); });
    ++counters_.matrices;
    if (with_moments) copy_moments(unit, arithmetic.row_moments(owned.tensor), moments.data, false);
    for (; next < work.from_row.size() && work.from_row[next].item == c; ++next) {
      const Transfer& transfer = work.from_row[next];
      place(transfer, true);
      if (they_travel && transfer.peer)
        std::memcpy(flight.inner.data() + transfer.offset +
                        elements_of(transfer.pieces) * element_bytes(plan_.tensors[owned.tensor].update),
                    moments.data, static_cast<size_t>(moments.bytes()));
    }
    poll();
  }
  exchange(group, work, flight, false);
}

void MeshEngine::apply(GroupWork& group, size_t batch, MeshArithmetic& arithmetic) {
  const BatchWork& work = group.batches[batch];
  Flight& flight = flights_[batch % flights_.size()];
  if (work.exchanges) {
    const auto start = Clock::now();
    poll_until([&] { return flight.pending.test(); }, [&] { flight.pending.wait(); });
    counters_.exchange_wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
  for (const Transfer& transfer : work.to_owners) {
    const Owned& owned = work.owned[transfer.item];
    const int64_t width = element_bytes(plan_.tensors[owned.tensor].update);
    std::byte* message = flight.outer.data() + transfer.offset;
    pack(transfer.pieces, width, End::kLocal, flight.updates.data() + owned.offset, message, true);
    if (plan_.tensors[owned.tensor].moments_travel())
      copy_moments(owned.units[transfer.unit], arithmetic.row_moments(owned.tensor),
                   message + elements_of(transfer.pieces) * width, false);
  }
  for (const Owned& owned : work.owned) {
    timed([&] { arithmetic.apply(owned.tensor, update_of(work, flight, owned)); });
    poll();
  }
}

void MeshEngine::send(const GroupWork& group, const MeshGroup& plan, const BatchWork& work,
                      MeshArithmetic& arithmetic) {
  for (const Sending& sending : work.sendings) {
    Channel& channel = channels_[*group.channel];
    const bool receives = sending.row != group.position->row;
    for (const Result& result : sending.alone) {
      Parcel parcel{
          .buffer = {}, .unpack = {}, .results = {}, .arithmetic = &arithmetic, .bytes = result.bytes};
      if (receives) parcel.results.push_back(result);
      add(channel, plan, sending.row, result.part.of(arithmetic.result(result.tensor)), std::move(parcel));
    }
    if (sending.packed.empty()) continue;
    Parcel parcel{
        .buffer = {}, .unpack = {}, .results = {}, .arithmetic = &arithmetic, .bytes = sending.packed_bytes};
    if (!free_.empty()) {
      parcel.buffer = std::move(free_.back());
      free_.pop_back();
    }
    grow(parcel.buffer, sending.packed_bytes);
    int64_t at = 0;
    for (const Result& result : sending.packed) {
      const View memory = result.part.of(arithmetic.result(result.tensor));
      const int64_t bytes = result.bytes;
      if (receives) {
        parcel.unpack.emplace_back(memory, at);
        parcel.results.push_back(result);
      } else {
        std::memcpy(parcel.buffer.data() + at, memory.data, static_cast<size_t>(bytes));
        std::memset(parcel.buffer.data() + at + bytes, 0,
                    static_cast<size_t>(align_up(bytes, kAlign) - bytes));
      }
      at += align_up(bytes, kAlign);
    }
    const View memory = bytes_view(parcel.buffer, sending.packed_bytes);
    add(channel, plan, sending.row, memory, std::move(parcel));
  }
}

void MeshEngine::add(Channel& channel, const MeshGroup& group, size_t row, const View& memory,
                     Parcel parcel) {
  const MeshGroup::Position position = *group.position_of(rank_);
  const int64_t bytes = parcel.bytes;
  // Room for it, unless it is larger than all there may be.
  const auto start = Clock::now();
  poll_until(
      [&] {
        poll();
        return bytes_in_flight_ == 0 || bytes_in_flight_ <= options_.max_bytes_in_flight - bytes;
      },
      [&] {
        for (Channel& other : channels_)
          if (other.broadcast) other.broadcast->wait_all();
      });
  counters_.broadcast_wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  std::vector<int64_t> source;
  if (channel.flat) {
    const std::vector<size_t>& members = group.replica_groups[position.replica_group];
    source.push_back(std::find(members.begin(), members.end(), row) - members.begin());
  } else {
    const Dims at = group.coordinates(row);
    source.assign(at.begin(), at.end());
  }
  if (row != position.row) counters_.received_bytes += bytes;
  ++counters_.collectives;
  bytes_in_flight_ += bytes;
  note_in_flight();
  channel.parcels.push_back(std::move(parcel));
  channel.broadcast->add(byte_view(std::span(memory.data, static_cast<size_t>(memory.bytes()))), source);
}

void MeshEngine::send_to_replicas(size_t tensor, const View& memory) {
  const auto& assignment = plan_.assignments[tensor];
  if (!assignment) return;
  const GroupWork& group = groups_[assignment->group];
  if (!group.position || !group.channel) return;
  guarded([&] {
    const MeshOwner& owner = assignment->owners[group.position->replica_group];
    for (size_t i = 0; i < owner.rows.size(); ++i) {
      const View part = assignment->cut.part(i, memory.shape).of(memory);
      if (part.bytes() == 0) continue;
      add(channels_[*group.channel], plan_.groups[assignment->group], owner.rows[i], part,
          {.buffer = {}, .unpack = {}, .results = {}, .arithmetic = nullptr, .bytes = part.bytes()});
    }
  });
}

void MeshEngine::flush_group(size_t group, MeshArithmetic& arithmetic) {
  GroupWork& work = groups_.at(group);
  guarded([&] {
    const size_t batches = work.batches.size();
    auto finish = [&](size_t batch) {
      apply(work, batch, arithmetic);
      send(work, plan_.groups[group], work.batches[batch], arithmetic);
    };
    if (batches > 0) gather(work, 0, arithmetic);
    for (size_t batch = 0; batch < batches; ++batch) {
      if (batch + 1 < batches) gather(work, batch + 1, arithmetic);
      compute(work, batch, arithmetic);
      if (batch > 0) finish(batch - 1);
    }
    if (batches > 0) finish(batches - 1);
  });
}

void MeshEngine::wait_all() {
  guarded([&] {
    const auto start = Clock::now();
    poll_until(
        [&] {
          poll();
          return std::all_of(channels_.begin(), channels_.end(),
                             [](const Channel& channel) { return channel.parcels.empty(); });
        },
        [&] {
          for (Channel& channel : channels_)
            if (channel.broadcast) channel.broadcast->wait_all();
        });
    for (Channel& channel : channels_)
      if (channel.broadcast) channel.broadcast->wait_all();
    counters_.broadcast_wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  });
}

/// Moves on all broadcasts, and takes what has landed out of its packing.
void MeshEngine::poll() {
  for (Channel& channel : channels_) {
    if (channel.parcels.empty()) continue;
    channel.broadcast->progress();
    const auto in_flight = static_cast<size_t>(channel.broadcast->in_flight());
    if (in_flight == 0) channel.broadcast->wait_all();  // they have landed, or failed
    while (channel.parcels.size() > in_flight) {
      Parcel parcel = std::move(channel.parcels.front());
      channel.parcels.pop_front();
      for (const auto& [view, at] : parcel.unpack)
        std::memcpy(view.data, parcel.buffer.data() + at, static_cast<size_t>(view.bytes()));
      for (const Result& result : parcel.results) parcel.arithmetic->received(result.tensor, result.part);
      bytes_in_flight_ -= parcel.bytes;
      if (parcel.buffer.size() > 0) free_.push_back(std::move(parcel.buffer));
    }
  }
  note_in_flight();
}

/// Keeps all broadcasts going until `done`, since other ranks may need them before they get to what this one
/// waits for. Where nothing comes for as long as groups wait, `give_up` waits in earnest, and throws.
template <class Done>
void MeshEngine::poll_until(Done done, const std::function<void()>& give_up) {
  const auto start = Clock::now();
  while (!done()) {
    poll();
    const auto idle = Clock::now() - start;
    if (idle > timeout_) return give_up();
    if (idle > std::chrono::microseconds(50)) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else {
      std::this_thread::yield();
    }
  }
}

void MeshEngine::guarded(const std::function<void()>& step) {
  try {
    step();
  } catch (...) {
    const std::string reason =
        fmt::format("rank {} cannot go on with its step: {}", rank_, text_of(std::current_exception()));
    for (const auto& group : all_groups_)
      if (group->backend().broken().empty()) group->backend().break_group(reason);
    throw;
  }
}

/// Runs arithmetic; its seconds.
template <class Body>
double MeshEngine::timed(Body body) {
  const auto start = Clock::now();
  body();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  counters_.arithmetic_seconds += seconds;
  return seconds;
}

void MeshEngine::note_in_flight() {
  const bool any = bytes_in_flight_ > 0;
  if (any && !in_flight_since_) in_flight_since_ = Clock::now();
  if (any || !in_flight_since_) return;
  counters_.broadcast_seconds += std::chrono::duration<double>(Clock::now() - *in_flight_since_).count();
  in_flight_since_.reset();
}

}  // namespace spolia
