// Messages between threads that play processes, as MPI would carry them: for tests of what stands on a
// Transport, where MPI is not installed, and under sanitizers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "spolia/comm/mpi/mpi_job.h"
#include "spolia/comm/mpi/transport.h"

namespace spolia {

/// Small messages leave at once, others when they are received. Nothing moves but inside test() and probe(),
/// and there at random; what two ranks say to each other on one tag stays in its order.
class FakeNetwork {
 public:
  FakeNetwork(int ranks, uint32_t seed, int ranks_per_host = 0) : ranks_(ranks), seed_(seed) {
    for (int r = 0; r < ranks; ++r)
      hosts_.push_back(ranks_per_host > 0 ? r / ranks_per_host * ranks_per_host : 0);
    dead_ = std::vector<bool>(static_cast<size_t>(ranks), false);
  }

  /// The rank's end; its owner deletes it.
  Transport* open(int rank);

  /// The process is gone, without a word: nothing of it is heard any more, and what it is sent is lost.
  void kill(int rank) {
    std::lock_guard lock(mutex_);
    dead_[static_cast<size_t>(rank)] = true;
  }
  /// How many ends were closed by a rank that had met all others in the end.
  int closed_together() const { return closed_together_; }

 private:
  friend class FakeTransport;
  using Line = std::tuple<Transport::Lane, int, int, int>;  // from, to, tag
  static constexpr int64_t kEagerBytes = 512;

  struct Message {
    std::vector<std::byte> copy;  // of an eager one
    const std::byte* data = nullptr;
    int64_t bytes = 0;
    uint64_t request = 0;
  };
  struct Slot {
    std::byte* data = nullptr;
    int64_t bytes = 0;
    uint64_t request = 0;
  };
  struct Queue {
    std::deque<Message> messages;
    std::deque<Slot> slots;
  };

  void match(const Line& line) {
    Queue& queue = queues_[line];
    if (queue.messages.empty() || queue.slots.empty()) return;
    const Message& message = queue.messages.front();
    const Slot& slot = queue.slots.front();
    const int64_t bytes = std::min(message.bytes, slot.bytes);
    if (bytes > 0) {
      const std::byte* from = message.copy.empty() ? message.data : message.copy.data();
      std::memcpy(slot.data, from, static_cast<size_t>(bytes));
    }
    done_[slot.request] = message.bytes > slot.bytes ? kTruncated : message.bytes;
    if (message.request != 0) done_[message.request] = message.bytes;
    queue.messages.pop_front();
    queue.slots.pop_front();
  }

  static constexpr int64_t kTruncated = -2;

  const int ranks_;
  const uint32_t seed_;
  std::vector<int> hosts_;
  std::atomic<int> closed_together_{0};
  std::mutex mutex_;  // guards what follows
  std::vector<bool> dead_;
  std::map<Line, Queue> queues_;
  std::map<uint64_t, int64_t> done_;  // bytes of a request, where it is done
  std::map<uint64_t, Line> lines_;    // of requests that are not
  uint64_t requests_ = 0;
};

class FakeTransport final : public Transport {
 public:
  FakeTransport(FakeNetwork& network, int rank)
      : network_(network), rank_(rank), random_(network.seed_ + static_cast<uint32_t>(rank) * 7919 + 1) {}

  int rank() const override { return rank_; }
  int size() const override { return network_.ranks_; }
  int greatest_tag() const override { return 32767; }
  const int* hosts() const override { return network_.hosts_.data(); }

  int send(Lane lane, const void* data, int64_t bytes, int to, int tag, Request* request) override {
    std::lock_guard lock(network_.mutex_);
    request->handle = ++network_.requests_;
    const FakeNetwork::Line line{lane, rank_, to, tag};
    FakeNetwork::Message message{{}, static_cast<const std::byte*>(data), bytes, 0};
    if (bytes <= FakeNetwork::kEagerBytes) {
      message.copy.assign(message.data, message.data + bytes);
      network_.done_[request->handle] = bytes;
    } else {
      message.request = request->handle;
      network_.lines_[request->handle] = line;
    }
    if (!is_dead(rank_) && !is_dead(to)) network_.queues_[line].messages.push_back(std::move(message));
    return 0;
  }

  int receive(Lane lane, void* data, int64_t bytes, int from, int tag, Request* request) override {
    std::lock_guard lock(network_.mutex_);
    request->handle = ++network_.requests_;
    const FakeNetwork::Line line{lane, from, rank_, tag};
    network_.lines_[request->handle] = line;
    network_.queues_[line].slots.push_back({static_cast<std::byte*>(data), bytes, request->handle});
    if (lane == Lane::kControl) network_.match(line);  // it was probed
    return 0;
  }

  int test(Request* request, bool* done, int64_t* bytes) override {
    std::lock_guard lock(network_.mutex_);
    *done = false;
    const auto line = network_.lines_.find(request->handle);
    if (line != network_.lines_.end() && !is_dead(rank_) && random_() % 3 != 0) network_.match(line->second);
    const auto over = network_.done_.find(request->handle);
    if (over == network_.done_.end()) return 0;
    const int64_t came = over->second;
    network_.done_.erase(over);
    network_.lines_.erase(request->handle);
    if (came == FakeNetwork::kTruncated) return 1;
    *done = true;
    if (bytes) *bytes = came;
    return 0;
  }

  int cancel(Request* request) override {
    std::lock_guard lock(network_.mutex_);
    const auto line = network_.lines_.find(request->handle);
    if (line == network_.lines_.end()) return 0;
    auto& slots = network_.queues_[line->second].slots;
    if (std::erase_if(slots, [&](const auto& slot) { return slot.request == request->handle; }) > 0)
      network_.done_[request->handle] = -1;
    return 0;
  }

  int probe(Lane lane, int tag, int* from, int64_t* bytes) override {
    std::lock_guard lock(network_.mutex_);
    *from = kAnyone;
    if (is_dead(rank_)) return 0;
    for (int r = 0; r < network_.ranks_; ++r) {
      const auto at = network_.queues_.find({lane, r, rank_, tag});
      if (at == network_.queues_.end() || at->second.messages.empty()) continue;
      *from = r;
      *bytes = at->second.messages.front().bytes;
    }
    return 0;
  }

  const char* error_text(int) override { return "a message is longer than its memory"; }
  void close(bool together) override { network_.closed_together_ += together; }
  void abort(int) override {}

 private:
  bool is_dead(int rank) const { return network_.dead_[static_cast<size_t>(rank)]; }

  FakeNetwork& network_;
  const int rank_;
  std::minstd_rand random_;
};

inline Transport* FakeNetwork::open(int rank) { return new FakeTransport(*this, rank); }

/// Runs `body` on every rank's own job, and gives what each threw.
inline std::vector<std::exception_ptr> run_jobs(FakeNetwork& network, int ranks,
                                                const std::function<void(MpiJob& job)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        MpiJob job([&network, rank] { return network.open(rank); });
        body(job);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace spolia
