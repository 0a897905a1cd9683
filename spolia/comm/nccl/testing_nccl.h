// NCCL without GPUs, for tests: communicators between fake devices (testing_cuda.h) of one process.
//
// As with NCCL itself, calls return at once; what they ask for happens in the stream, one launch after the
// other, and holds the stream up until the other ranks take part; a launch may still be in progress when the
// call returns, and nothing may be told the communicator until it is not. Floats are reduced in the opposite
// of the order of the ranks. What NCCL leaves undefined is a fault of FakeCuda.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "spolia/comm/nccl/nccl_library.h"
#include "spolia/comm/reduce.h"
#include "spolia/device/testing_cuda.h"

namespace spolia {

/// One a process. Thread-safe.
class FakeNccl {
 public:
  static FakeNccl& instance() {
    static FakeNccl& fake = *new FakeNccl;
    return fake;
  }

  const NcclLibrary& library() const { return library_; }

  /// From now on, what the device is told never begins; until reset().
  void stall(int device) { set(stalled_, device); }
  /// From now on, communicators of the device say that another rank has failed; until reset().
  void fail(int device) { set(failing_, device); }
  void reset() {
    const std::lock_guard lock(mutex_);
    stalled_.clear();
    failing_.clear();
  }
  /// Communicators that have been made and neither destroyed nor aborted.
  int communicators() const { return communicators_.load(); }
  int aborted() const { return aborted_.load(); }

 private:
  enum class Kind { kBroadcast, kAllGather, kAllReduce, kReduce, kReduceScatter, kSend, kReceive };

  struct Call {
    Kind kind;
    const void* send = nullptr;
    void* receive = nullptr;
    size_t count = 0;
    int type = 0, op = 0, peer = 0;  // peer: the root, or the other one
  };
  struct Comm;
  struct Meeting {
    std::vector<std::optional<Call>> calls;  // by rank
    size_t arrived = 0;
    bool done = false;
  };
  struct Sent {
    const Call* call;
    bool taken = false;
  };
  struct Room {
    int ranks = 0, joined = 0;
    std::map<int64_t, std::shared_ptr<Meeting>> meetings;                   // by number
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Sent>>> sent;  // from, to
  };
  struct Launch {
    std::vector<Call> calls;
    FakeCuda::Stream* stream;
  };
  struct Comm {
    std::shared_ptr<Room> room;
    int rank = 0, device = 0;
    int64_t collectives = 0;  // told so far
    bool aborted = false;
    int polls_until_ready = 0;  // of a launch in progress
    std::optional<Launch> launch;
  };

  FakeNccl() {
    library_.get_version = [](int* version) {
      *version = 22809;
      return kNcclSuccess;
    };
    library_.error_text = [](int result) -> const char* {
      return result == kNcclRemoteError ? "remote process exited or there was a network error" : "an error";
    };
    library_.last_error = [](NcclLibrary::Comm) { return ""; };
    library_.get_unique_id = [](NcclUniqueId* id) {
      static std::atomic<int64_t> next{1};
      const int64_t number = next.fetch_add(1);
      std::memcpy(id->bytes, &number, sizeof number);
      return kNcclSuccess;
    };
    library_.init = [](NcclLibrary::Comm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
      return instance().init(comm, ranks, id, rank, *config);
    };
    library_.finalize = [](NcclLibrary::Comm) { return kNcclSuccess; };
    library_.destroy = [](NcclLibrary::Comm comm) { return instance().destroy(comm, false); };
    library_.abort = [](NcclLibrary::Comm comm) { return instance().destroy(comm, true); };
    library_.get_async_error = [](NcclLibrary::Comm comm, int* result) {
      *result = instance().state_of(comm_of(comm));
      return kNcclSuccess;
    };
    library_.group_start = [] {
      ++pending().depth;
      return kNcclSuccess;
    };
    library_.group_end = [] {
      if (--pending().depth > 0) return kNcclSuccess;
      return instance().tell(std::exchange(pending(), {}));
    };
    library_.broadcast = [](const void* send, void* receive, size_t count, int type, int root,
                            NcclLibrary::Comm comm, void* stream) {
      return add({Kind::kBroadcast, send, receive, count, type, 0, root}, comm, stream);
    };
    library_.all_gather = [](const void* send, void* receive, size_t count, int type, NcclLibrary::Comm comm,
                             void* stream) {
      return add({Kind::kAllGather, send, receive, count, type}, comm, stream);
    };
    library_.all_reduce = [](const void* send, void* receive, size_t count, int type, int op,
                             NcclLibrary::Comm comm, void* stream) {
      return add({Kind::kAllReduce, send, receive, count, type, op}, comm, stream);
    };
    library_.reduce = [](const void* send, void* receive, size_t count, int type, int op, int root,
                         NcclLibrary::Comm comm, void* stream) {
      return add({Kind::kReduce, send, receive, count, type, op, root}, comm, stream);
    };
    library_.reduce_scatter = [](const void* send, void* receive, size_t count, int type, int op,
                                 NcclLibrary::Comm comm, void* stream) {
      return add({Kind::kReduceScatter, send, receive, count, type, op}, comm, stream);
    };
    library_.send = [](const void* from, size_t count, int type, int peer, NcclLibrary::Comm comm,
                       void* stream) {
      return add({Kind::kSend, from, nullptr, count, type, 0, peer}, comm, stream);
    };
    library_.receive = [](void* to, size_t count, int type, int peer, NcclLibrary::Comm comm, void* stream) {
      return add({Kind::kReceive, nullptr, to, count, type, 0, peer}, comm, stream);
    };
  }

  /// The calls of a thread between group_start() and group_end().
  struct Pending {
    int depth = 0;
    std::vector<Call> calls;
    std::shared_ptr<Comm> comm;
    FakeCuda::Stream* stream = nullptr;
  };
  static Pending& pending() {
    static thread_local Pending pending;
    return pending;
  }
  static std::shared_ptr<Comm> comm_of(NcclLibrary::Comm comm) {
    return *static_cast<std::shared_ptr<Comm>*>(comm);
  }
  static void fault(std::string text) { FakeCuda::instance().add_fault("NCCL: " + std::move(text)); }

  void set(std::set<int>& devices, int device) {
    const std::lock_guard lock(mutex_);
    devices.insert(device);
    changed_.notify_all();
  }

  static int add(const Call& call, NcclLibrary::Comm comm, void* stream) {
    Pending& mine = pending();
    if (mine.comm && mine.comm != comm_of(comm)) fault("calls to two communicators in a group");
    mine.comm = comm_of(comm);
    mine.stream = static_cast<FakeCuda::Stream*>(stream);
    mine.calls.push_back(call);
    if (mine.depth > 0) return kNcclSuccess;
    return instance().tell(std::exchange(mine, {}));
  }

  int init(NcclLibrary::Comm* comm, int ranks, const NcclUniqueId& id, int rank, const NcclConfig& config) {
    if (config.magic != 0xcafebeef || config.blocking != 0) fault("a configuration that is none");
    if (FakeCuda::current_device() < 0) fault("a communicator without a device");
    int64_t number = 0;
    std::memcpy(&number, id.bytes, sizeof number);
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Room> room = rooms_[number].lock();
    if (!room) rooms_[number] = room = std::make_shared<Room>();
    if (room->joined == 0) room->ranks = ranks;
    if (room->ranks != ranks || rank >= ranks) fault("ranks that do not agree how many they are");
    ++room->joined;
    auto made = std::make_shared<Comm>();
    made->room = std::move(room);
    made->rank = rank;
    made->device = FakeCuda::current_device();
    *comm = new std::shared_ptr<Comm>(std::move(made));
    ++communicators_;
    return kNcclInProgress;
  }

  int destroy(NcclLibrary::Comm comm, bool aborts) {
    const std::shared_ptr<Comm> held = comm_of(comm);
    delete static_cast<std::shared_ptr<Comm>*>(comm);
    const std::lock_guard lock(mutex_);
    held->aborted = true;
    --communicators_;
    if (aborts) ++aborted_;
    if (!aborts && held->launch) fault("a communicator is destroyed while it is in progress");
    changed_.notify_all();
    return kNcclSuccess;
  }

  int state_of(const std::shared_ptr<Comm>& comm) {
    const std::lock_guard lock(mutex_);
    if (failing_.contains(comm->device)) return kNcclRemoteError;
    if (comm->room->joined < comm->room->ranks) return kNcclInProgress;
    if (comm->polls_until_ready > 0) {
      if (--comm->polls_until_ready > 0) return kNcclInProgress;
      begin(comm, *std::exchange(comm->launch, std::nullopt));
    }
    return kNcclSuccess;
  }

  int tell(Pending told) {
    if (told.calls.empty()) return kNcclSuccess;
    const std::lock_guard lock(mutex_);
    if (told.comm->launch) {
      fault("a communicator that is in progress is told more");
      return kNcclInvalidUsage;
    }
    if (told.comm->room->joined < told.comm->room->ranks) {
      fault("a communicator that is not connected is used");
      return kNcclInvalidUsage;
    }
    Launch launch{std::move(told.calls), told.stream};
    if (++launches_ % 3 != 0) {
      begin(told.comm, std::move(launch));
      return kNcclSuccess;
    }
    told.comm->polls_until_ready = 1 + static_cast<int>(launches_ % 5);
    told.comm->launch = std::move(launch);
    return kNcclInProgress;
  }

  /// Under the mutex.
  void begin(const std::shared_ptr<Comm>& comm, Launch launch) {
    const int64_t first = comm->collectives;
    comm->collectives +=
        std::ranges::count_if(launch.calls, [](const Call& call) { return !is_transfer(call); });
    launch.stream->add([this, comm, first, calls = std::move(launch.calls)] { run(*comm, first, calls); });
  }

  static bool is_transfer(const Call& call) {
    return call.kind == Kind::kSend || call.kind == Kind::kReceive;
  }

  /// In the stream.
  void run(Comm& comm, int64_t number, const std::vector<Call>& calls) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return comm.aborted || !stalled_.contains(comm.device); });
    for (const Call& call : calls) {
      if (!is_transfer(call)) meet(lock, comm, number++, call);
    }
    std::vector<std::shared_ptr<Sent>> sent;
    for (const Call& call : calls) {
      if (call.kind != Kind::kSend || comm.aborted) continue;
      if (call.peer == comm.rank) fault("a send to the rank itself");
      sent.push_back(std::make_shared<Sent>(Sent{&call}));
      comm.room->sent[{comm.rank, call.peer}].push_back(sent.back());
    }
    changed_.notify_all();
    for (const Call& call : calls) {
      if (call.kind == Kind::kReceive) receive(lock, comm, call);
    }
    changed_.wait(lock, [&] {
      return comm.aborted || std::ranges::all_of(sent, [](const auto& one) { return one->taken; });
    });
    if (comm.aborted) {  // nobody reads what is not there any more
      for (auto& [between, queue] : comm.room->sent) {
        if (between.first == comm.rank) queue.clear();
      }
    }
  }

  void receive(std::unique_lock<std::mutex>& lock, Comm& comm, const Call& call) {
    auto& queue = comm.room->sent[{call.peer, comm.rank}];
    changed_.wait(lock, [&] { return comm.aborted || !queue.empty(); });
    if (comm.aborted) return;
    const std::shared_ptr<Sent> sent = queue.front();
    queue.pop_front();
    if (sent->call->count != call.count || sent->call->type != call.type) {
      fault(fmt::format("{} elements are sent, {} received", sent->call->count, call.count));
    }
    copy(call.receive, sent->call->send, call.count * width(call.type));
    sent->taken = true;
    changed_.notify_all();
  }

  void meet(std::unique_lock<std::mutex>& lock, Comm& comm, int64_t number, const Call& call) {
    if (comm.aborted) return;
    Room& room = *comm.room;
    std::shared_ptr<Meeting>& kept = room.meetings[number];
    if (!kept) kept = std::make_shared<Meeting>();
    const std::shared_ptr<Meeting> meeting = kept;
    meeting->calls.resize(static_cast<size_t>(room.ranks));
    meeting->calls[static_cast<size_t>(comm.rank)] = call;
    if (++meeting->arrived == meeting->calls.size()) {
      carry_out(meeting->calls);
      meeting->done = true;
      room.meetings.erase(number);
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return comm.aborted || meeting->done; });
    if (!meeting->done) {
      meeting->calls[static_cast<size_t>(comm.rank)].reset();
      --meeting->arrived;
    }
  }

  static size_t width(int type) {
    constexpr size_t kWidths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return kWidths[type];
  }
  static DType dtype_of(int type) {
    constexpr DType kDTypes[] = {DType::kInt8,    DType::kUInt8,   DType::kInt32,   DType::kUInt32,
                                 DType::kInt64,   DType::kUInt64,  DType::kFloat16, DType::kFloat32,
                                 DType::kFloat64, DType::kBFloat16};
    return kDTypes[type];
  }
  static std::byte* at(const void* address, size_t bytes) {
    if (!FakeCuda::instance().is_on_device(reinterpret_cast<uint64_t>(address))) {
      fault("memory that is not a device's");
      return nullptr;
    }
    return FakeCuda::instance().bytes_at(reinterpret_cast<uint64_t>(address), bytes);
  }
  static void copy(void* to, const void* from, size_t bytes) {
    std::byte* target = at(to, bytes);
    const std::byte* source = at(from, bytes);
    if (target == source) return;  // in place: what is there is only read, others may read it too
    if (target != nullptr && source != nullptr) std::memmove(target, source, bytes);
  }
  static const void* offset(const void* address, size_t bytes) {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(address) + bytes);
  }
  static void* offset(void* address, size_t bytes) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) + bytes);
  }

  /// All ranks are there. Under the mutex.
  static void carry_out(const std::vector<std::optional<Call>>& calls) {
    const Call& first = *calls[0];
    for (const auto& call : calls) {
      if (call->kind != first.kind || call->count != first.count || call->type != first.type ||
          call->op != first.op || call->peer != first.peer) {
        fault("ranks tell a communicator different things");
        return;
      }
    }
    const size_t bytes = first.count * width(first.type);
    switch (first.kind) {
      case Kind::kBroadcast:
        for (const auto& call : calls)
          copy(call->receive, calls[static_cast<size_t>(first.peer)]->send, bytes);
        return;
      case Kind::kAllGather:
        for (size_t r = 0; r < calls.size(); ++r) {
          for (const auto& call : calls) copy(offset(call->receive, r * bytes), calls[r]->send, bytes);
        }
        return;
      case Kind::kAllReduce: {
        const auto total = reduced(calls, 0, bytes);
        for (const auto& call : calls) put(call->receive, total);
        return;
      }
      case Kind::kReduce:
        return put(calls[static_cast<size_t>(first.peer)]->receive, reduced(calls, 0, bytes));
      case Kind::kReduceScatter: {
        std::vector<std::vector<std::byte>> parts;
        for (size_t r = 0; r < calls.size(); ++r) parts.push_back(reduced(calls, r * bytes, bytes));
        for (size_t r = 0; r < calls.size(); ++r) put(calls[r]->receive, parts[r]);
        return;
      }
      default:
        return;
    }
  }

  static std::vector<std::byte> reduced(const std::vector<std::optional<Call>>& calls, size_t begin,
                                        size_t bytes) {
    std::vector<std::byte> total(bytes);
    std::vector<const std::byte*> from;
    for (size_t r = calls.size(); r-- > 0;) from.push_back(at(offset(calls[r]->send, begin), bytes));
    if (std::ranges::find(from, nullptr) != from.end()) return total;
    const int op = calls[0]->op;
    std::byte* to = total.data();
    reduce(dtype_of(calls[0]->type),
           op == kNcclSum   ? ReduceOp::kSum
           : op == kNcclMin ? ReduceOp::kMin
                            : ReduceOp::kMax,
           from, std::span(&to, 1), 0, static_cast<int64_t>(bytes));
    return total;
  }
  static void put(void* to, const std::vector<std::byte>& bytes) {
    if (std::byte* target = at(to, bytes.size())) std::copy(bytes.begin(), bytes.end(), target);
  }

  NcclLibrary library_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::weak_ptr<Room>> rooms_;
  std::set<int> stalled_, failing_;
  uint64_t launches_ = 0;
  std::atomic<int> communicators_{0}, aborted_{0};
};

}  // namespace spolia
