#include "spolia/comm/group.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/comm/runs.h"
#include "spolia/device/strided_copy.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

using Kind = CollectiveKind;

Deadline deadline_after(milliseconds timeout) {
  const auto now = std::chrono::steady_clock::now();
  return timeout < Deadline::max() - now ? now + timeout : Deadline::max();
}

/// The bytes of a dense tensor, as an argument of the caller's.
int64_t bytes_of(DType dtype, std::span<const int64_t> shape) {
  try {
    return byte_size(dtype, shape);
  } catch (const CorruptError& error) {
    throw InvalidArgumentError("{}", error.what());
  }
}

std::vector<int64_t> bytes_of_parts(DType dtype, std::span<const int64_t> counts) {
  std::vector<int64_t> bytes;
  bytes.reserve(counts.size());
  for (int64_t count : counts) bytes.push_back(bytes_of(dtype, std::span(&count, 1)));
  return bytes;
}

void check_shape(const ConstView& view, std::span<const int64_t> expected, Kind kind) {
  if (std::ranges::equal(view.shape, expected)) return;
  throw InvalidArgumentError("{}: a view of shape {}, and it has to be {}", name_of(kind),
                             shape_text(view.shape), shape_text(expected));
}

void check_1d(const ConstView& view, Kind kind) {
  if (view.shape.size() == 1) return;
  throw InvalidArgumentError("{}: a view of shape {}, and it has to have one dim", name_of(kind),
                             shape_text(view.shape));
}

/// That a view can be packed or dealt out.
void check_strided(const ConstView& view, Kind kind) {
  if (is_sub_byte(view.dtype)) {
    throw UnsupportedError("{}: {} elements are packed finer than bytes and cannot lie at strides",
                           name_of(kind), name_of(view.dtype));
  }
}

/// On one device.
void copy_elements(const View& to, const ConstView& from) {
  const int64_t element = element_bytes(to.dtype);
  if (to.device == Device{}) {
    return copy_strided(to.shape, element, to.data, to.strides, from.data, from.strides);
  }
  copy_strided_on(backend_of(to.device), to.shape, element, to.data, to.strides, from.data, from.strides);
}

}  // namespace

/// An operation with what it borrows and owns.
struct Pending::State {
  State(Kind kind, DType dtype, Device device, DeviceEvent after = {}) {
    collective.kind = kind;
    collective.dtype = dtype;
    collective.device = device;
    collective.after = after;
  }
  State(Kind kind, const ConstView& view, DeviceEvent after) : State(kind, view.dtype, view.device, after) {}

  void set_send(const ConstView& view);
  void set_receive(const View& view);
  /// Deals what has landed out.
  void finish();

  Collective collective;
  Runs runs;                   // where the bytes lie; empty: densely, in the collective's buffer
  Buffer packed;               // the sent elements, where they do not lie dense
  Buffer staged;               // those that arrive, until they are dealt out
  std::optional<View> target;  // where to
  milliseconds timeout{};
  int exceptions = std::uncaught_exceptions();
  std::shared_ptr<GroupBackend> backend;
  std::unique_ptr<Work> work;  // goes first

 private:
  int64_t checked_bytes(const ConstView& view) const;
  bool take_runs(const View& view);
};

/// Whether the view's elements go from or to their place.
bool Pending::State::take_runs(const View& view) {
  const bool takes = collective.kind == Kind::kBroadcast || is_between_two(collective.kind);
  if (!takes || !backend->takes_runs() || !lies_in_runs(view)) return false;
  append_runs(view, runs);
  return true;
}

int64_t Pending::State::checked_bytes(const ConstView& view) const {
  const std::string_view name = name_of(collective.kind);
  if (view.shape.size() != view.strides.size()) {
    throw InvalidArgumentError("{}: a view with {} dims and {} strides", name, view.shape.size(),
                               view.strides.size());
  }
  if (view.dtype != collective.dtype) {
    throw InvalidArgumentError("{}: a view of {} and one of {}", name, name_of(collective.dtype),
                               name_of(view.dtype));
  }
  if (view.device != collective.device) {
    throw InvalidArgumentError("{}: a view on {} and one on {}", name, name_of(collective.device),
                               name_of(view.device));
  }
  return bytes_of(view.dtype, view.shape);
}

void Pending::State::set_send(const ConstView& view) {
  const int64_t bytes = checked_bytes(view);
  if (bytes == 0) return;
  if (view.is_dense()) {
    collective.send = {view.data, static_cast<size_t>(bytes)};
    return;
  }
  check_strided(view, collective.kind);
  const View only_read{const_cast<std::byte*>(view.data), view.dtype, view.shape, view.strides, view.device};
  if (take_runs(only_read)) {
    collective.send = {view.data, static_cast<size_t>(bytes)};
    return;
  }
  packed = Buffer(bytes, view.device);
  backend_of(view.device).wait_for(collective.after);
  copy_elements(dense_view(packed.data(), view.dtype, view.shape, view.device), view);
  collective.send = {packed.data(), static_cast<size_t>(bytes)};
}

void Pending::State::set_receive(const View& view) {
  const int64_t bytes = checked_bytes(view);
  if (bytes == 0) return;
  if (view.is_dense()) {
    collective.receive = {view.data, static_cast<size_t>(bytes)};
    return;
  }
  check_strided(view, collective.kind);
  for (size_t d = 0; d < view.shape.size(); ++d) {
    if (view.shape[d] > 1 && view.strides[d] == 0) {
      throw InvalidArgumentError("{}: elements of the view to receive into lie on each other (stride 0)",
                                 name_of(collective.kind));
    }
  }
  if (take_runs(view)) {
    collective.receive = {view.data, static_cast<size_t>(bytes)};
    return;
  }
  staged = Buffer(bytes, view.device);
  target = view;
  collective.receive = {staged.data(), static_cast<size_t>(bytes)};
}

void Pending::State::finish() {
  if (!target) return;
  copy_elements(*target,
                dense_view<const std::byte>(staged.data(), target->dtype, target->shape, target->device));
}

Pending::Pending() = default;
Pending::Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}
Pending::Pending(Pending&&) noexcept = default;

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    drop();
    state_ = std::move(other.state_);
  }
  return *this;
}

Pending::~Pending() { drop(); }

void Pending::drop() noexcept {
  if (!state_) return;
  try {
    if (std::uncaught_exceptions() > state_->exceptions && !state_->work->test()) {
      GroupBackend& backend = *state_->backend;
      backend.break_group(fmt::format("rank {} met an error and left its {} behind",
                                      backend.ranks()[static_cast<size_t>(backend.place())],
                                      describe(state_->collective, backend.ranks())));
    }
    wait();
  } catch (...) {  // the group is broken and says so
  }
  state_.reset();
}

bool Pending::test() {
  if (!state_) return true;
  std::unique_ptr<State> state = std::move(state_);  // over, where this throws
  if (!state->work->test()) {
    state_ = std::move(state);
    return false;
  }
  state->finish();
  return true;
}

void Pending::wait() {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  state->work->wait(deadline_after(state->timeout));
  state->finish();
}

Group::Group(std::shared_ptr<GroupBackend> backend, milliseconds timeout)
    : backend_(std::move(backend)), timeout_(timeout) {}

int Group::place_of(int64_t rank) const {
  const auto at = std::ranges::lower_bound(ranks(), rank);
  if (at == ranks().end() || *at != rank) {
    throw InvalidArgumentError("rank {} is not in the group {}", rank, list_text(ranks()));
  }
  return static_cast<int>(at - ranks().begin());
}

/// An operation that does not touch anything yet.
std::unique_ptr<Pending::State> Group::prepare(CollectiveKind kind, const ConstView& view,
                                               DeviceEvent after) const {
  if (!backend_->reaches(view.device)) {
    throw UnsupportedError("{}: the {} backend does not reach memory on {}", name_of(kind), backend_->name(),
                           name_of(view.device));
  }
  auto operation = std::make_unique<Pending::State>(kind, view, after);
  operation->backend = backend_;
  return operation;
}

Pending Group::start(std::unique_ptr<Pending::State> operation) {
  const Collective& collective = operation->collective;
  check(collective, place(), ranks());
  operation->timeout = timeout_;
  operation->backend = backend_;
  operation->work = operation->runs.empty() ? backend_->start(collective)
                                            : backend_->start_in_runs(collective, operation->runs);
  return Pending(std::move(operation));
}

Pending Group::start_in_runs(CollectiveKind kind, Runs runs, DType dtype, int peer) {
  if (!backend_->takes_runs()) {
    throw InvalidArgumentError("{}: the {} backend takes no runs", name_of(kind), backend_->name());
  }
  auto operation = std::make_unique<Pending::State>(kind, dtype, Device{});
  Collective& collective = operation->collective;
  collective.peer = peer;
  int64_t bytes = 0;  // no more than there is memory
  for (const Run& run : runs) bytes += run.bytes * run.rows;
  if (bytes > 0) {
    const std::span all(runs[0].data, static_cast<size_t>(bytes));
    if (kind == Kind::kSend || (kind == Kind::kBroadcast && peer == place())) {
      collective.send = all;
    } else {
      collective.receive = all;
    }
  }
  operation->runs = std::move(runs);
  return start(std::move(operation));
}

Pending Group::broadcast(Runs runs, DType dtype, int root) {
  return start_in_runs(Kind::kBroadcast, std::move(runs), dtype, root);
}
Pending Group::send(Runs runs, DType dtype, int to) {
  return start_in_runs(Kind::kSend, std::move(runs), dtype, to);
}
Pending Group::receive(Runs runs, DType dtype, int from) {
  return start_in_runs(Kind::kReceive, std::move(runs), dtype, from);
}

Pending Group::barrier() {
  return start(std::make_unique<Pending::State>(Kind::kBarrier, DType::kUInt8, device()));
}

Pending Group::broadcast(const View& buffer, int root, DeviceEvent after) {
  auto operation = prepare(Kind::kBroadcast, buffer, after);
  operation->collective.peer = root;
  if (place() == root) {
    operation->set_send(buffer);
  } else {
    operation->set_receive(buffer);
  }
  return start(std::move(operation));
}

Pending Group::all_gather(const ConstView& piece, const View& all, DeviceEvent after) {
  Dims stacked = {size()};
  for (int64_t dim : piece.shape) stacked.push_back(dim);
  check_shape(all, stacked, Kind::kAllGather);
  auto operation = prepare(Kind::kAllGather, piece, after);
  operation->set_send(piece);
  operation->set_receive(all);
  operation->collective.receive_bytes.assign(static_cast<size_t>(size()), bytes_of(piece.dtype, piece.shape));
  return start(std::move(operation));
}

Pending Group::all_gather(const ConstView& piece, std::span<const int64_t> counts, const View& all,
                          DeviceEvent after) {
  check_1d(all, Kind::kAllGather);
  auto operation = prepare(Kind::kAllGather, piece, after);
  operation->set_send(piece);
  operation->set_receive(all);
  operation->collective.receive_bytes = bytes_of_parts(piece.dtype, counts);
  return start(std::move(operation));
}

Pending Group::all_reduce(const ConstView& send, const View& receive, ReduceOp op, DeviceEvent after) {
  check_shape(receive, send.shape, Kind::kAllReduce);
  auto operation = prepare(Kind::kAllReduce, send, after);
  operation->collective.op = op;
  operation->set_send(send);
  operation->set_receive(receive);
  return start(std::move(operation));
}

Pending Group::reduce_scatter(const ConstView& send, std::span<const int64_t> counts, const View& receive,
                              ReduceOp op, DeviceEvent after) {
  check_1d(send, Kind::kReduceScatter);
  auto operation = prepare(Kind::kReduceScatter, send, after);
  operation->collective.op = op;
  operation->set_send(send);
  operation->set_receive(receive);
  operation->collective.send_bytes = bytes_of_parts(send.dtype, counts);
  return start(std::move(operation));
}

Pending Group::all_to_all(const ConstView& send, std::span<const int64_t> send_counts, const View& receive,
                          std::span<const int64_t> receive_counts, DeviceEvent after) {
  check_1d(send, Kind::kAllToAll);
  check_1d(receive, Kind::kAllToAll);
  auto operation = prepare(Kind::kAllToAll, send, after);
  operation->set_send(send);
  operation->set_receive(receive);
  operation->collective.send_bytes = bytes_of_parts(send.dtype, send_counts);
  operation->collective.receive_bytes = bytes_of_parts(send.dtype, receive_counts);
  return start(std::move(operation));
}

Pending Group::send(const ConstView& buffer, int to, DeviceEvent after) {
  auto operation = prepare(Kind::kSend, buffer, after);
  operation->collective.peer = to;
  operation->set_send(buffer);
  return start(std::move(operation));
}

Pending Group::receive(const View& buffer, int from, DeviceEvent after) {
  auto operation = prepare(Kind::kReceive, buffer, after);
  operation->collective.peer = from;
  operation->set_receive(buffer);
  return start(std::move(operation));
}

}  // namespace spolia
