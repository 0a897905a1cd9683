// Random programs: operations of all kinds over random groups, whose results are those of a model that has
// one thread and does one operation after the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/world.h"

namespace spolia {

/// The same on every rank for the same numbers. Each rank has registers of bytes, which operations read and
/// write.
class RandomProgram {
 public:
  RandomProgram(int ranks, uint32_t seed) : ranks_(ranks), seed_(seed), random_(seed) {
    constexpr int64_t kSizes[] = {64, 4096, 300000};
    register_bytes_ = kSizes[pick(3)];
    for (int64_t g = 1 + pick(4); g > 0; --g) groups_.push_back(random_group());
    for (int64_t s = 5 + pick(40); s > 0; --s) steps_.push_back(random_step());
    for (int64_t r = 0; r < ranks_; ++r) results_.push_back(first_registers(r));
    for (const Step& step : steps_) model_step(step);
  }

  /// Throws where this rank's registers are not the model's in the end.
  void run(World& world) const {
    std::vector<std::shared_ptr<Group>> groups;
    for (const auto& ranks : groups_) groups.push_back(world.create(ranks));
    const Device device = world.all()->device();
    std::vector<TestMemory> registers;
    for (const auto& bytes : first_registers(world.rank())) registers.emplace_back(device, bytes);
    std::vector<Running> running;
    std::minstd_rand random(static_cast<uint32_t>(mixed({seed_, world.rank()}) % 1000000 + 1));
    for (const Step& step : steps_) {
      Group* group = groups[step.group].get();
      if (group == nullptr ||
          (is_between_two(step) && group->place() != step.from && group->place() != step.to)) {
        continue;
      }
      wait_for(running, [&](const Running& other) { return other.step->touches(step); });
      start(step, *group, registers, running);
      if (random() % 4 == 0) wait_for(running, [&](const Running&) { return random() % 2 == 0; });
      if (random() % 8 == 0 && !running.empty()) running[random() % running.size()].pending.test();
    }
    std::shuffle(running.begin(), running.end(), random);
    wait_for(running, [](const Running&) { return true; });
    const Registers& expected = results_[static_cast<size_t>(world.rank())];
    for (size_t r = 0; r < kRegisters; ++r) {
      require(registers[r].read() == expected[r], "program {} on {} ranks: register {} differs", seed_,
              ranks_, r);
    }
  }

 private:
  static constexpr size_t kRegisters = 6;
  using Registers = std::vector<std::vector<std::byte>>;
  enum class Kind { kBarrier, kBroadcast, kAllGather, kAllReduce, kReduceScatter, kAllToAll, kTransfer };

  struct Step {
    Kind kind;
    size_t group;
    DType dtype;
    ReduceOp op;
    int from, to;                              // of a broadcast, the root; of a transfer, both ends. Places
    size_t read, write;                        // registers
    int64_t at;                                // where in them, in elements
    int64_t count;                             // of all-reduce, broadcast and transfer
    std::vector<int64_t> counts;               // of all-gather and reduce-scatter
    std::vector<std::vector<int64_t>> matrix;  // of all-to-all: [from][to]

    bool touches(const Step& other) const {
      return write == other.write || write == other.read || read == other.write;
    }
  };
  struct Running {
    const Step* step;
    Pending pending;
  };

  static bool is_between_two(const Step& step) { return step.kind == Kind::kTransfer; }
  static int64_t total(std::span<const int64_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }

  int64_t pick(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }

  std::vector<int64_t> random_group() {
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < ranks_; ++r) {
      if (pick(3) != 0) ranks.push_back(r);
    }
    if (ranks.empty()) ranks.push_back(pick(ranks_));
    return ranks;
  }

  std::vector<int64_t> random_counts(size_t size, int64_t most) {
    std::vector<int64_t> counts(size);
    for (int64_t& count : counts) count = pick(4) == 0 ? 0 : pick(most / static_cast<int64_t>(size) + 1);
    return counts;
  }

  Step random_step() {
    constexpr DType kDTypes[] = {DType::kInt64, DType::kInt32, DType::kInt16, DType::kUInt8};
    Step step;
    step.kind = static_cast<Kind>(pick(7));
    step.group = static_cast<size_t>(pick(std::ssize(groups_)));
    step.dtype = kDTypes[pick(4)];
    step.op = static_cast<ReduceOp>(pick(3));
    const auto size = groups_[step.group].size();
    step.from = static_cast<int>(pick(static_cast<int64_t>(size)));
    step.to = static_cast<int>(pick(static_cast<int64_t>(size)));
    step.read = static_cast<size_t>(pick(kRegisters));
    step.write = static_cast<size_t>(pick(kRegisters));
    const bool in_place = step.kind == Kind::kBroadcast || step.kind == Kind::kAllReduce;
    if (step.read == step.write && !in_place) step.write = (step.read + 1) % kRegisters;
    const int64_t capacity = register_bytes_ / element_bytes(step.dtype);
    step.at = pick(3) == 0 ? pick(capacity) : 0;
    step.count = pick(capacity - step.at + 1);
    step.counts = random_counts(size, capacity - step.at);
    for (size_t s = 0; s < size; ++s) step.matrix.push_back(random_counts(size, (capacity - step.at) / 4));
    // What a rank receives has to fit too.
    for (size_t r = 0; r < size; ++r) {
      int64_t left = capacity - step.at;
      for (size_t s = 0; s < size; ++s) left -= step.matrix[s][r] = std::min(step.matrix[s][r], left);
    }
    return step;
  }

  Registers first_registers(int64_t rank) const {
    Registers registers;
    for (size_t r = 0; r < kRegisters; ++r) {
      registers.push_back(
          noise(static_cast<int64_t>(mixed({seed_, rank, static_cast<int64_t>(r)}) >> 1), register_bytes_));
    }
    return registers;
  }

  template <class Which>
  static void wait_for(std::vector<Running>& running, Which which) {
    for (Running& one : running) {
      if (!which(one)) continue;
      one.pending.wait();
      one.step = nullptr;
    }
    std::erase_if(running, [](const Running& one) { return one.step == nullptr; });
  }

  void start(const Step& step, Group& group, std::vector<TestMemory>& registers,
             std::vector<Running>& running) const {
    const auto view = [&](size_t index, int64_t count) {
      return dense_view(registers[index].data() + step.at * element_bytes(step.dtype), step.dtype,
                        Dims{count}, group.device());
    };
    const auto own = static_cast<size_t>(group.place());
    const auto add = [&](Pending pending) { running.push_back({&step, std::move(pending)}); };
    switch (step.kind) {
      case Kind::kBarrier:
        return add(group.barrier());
      case Kind::kBroadcast:
        return add(group.broadcast(view(step.write, step.count), step.from));
      case Kind::kAllGather:
        return add(group.all_gather(view(step.read, step.counts[own]), step.counts,
                                    view(step.write, total(step.counts))));
      case Kind::kAllReduce:
        return add(group.all_reduce(view(step.read, step.count), view(step.write, step.count), step.op));
      case Kind::kReduceScatter:
        return add(group.reduce_scatter(view(step.read, total(step.counts)), step.counts,
                                        view(step.write, step.counts[own]), step.op));
      case Kind::kAllToAll: {
        std::vector<int64_t> received;
        for (const auto& row : step.matrix) received.push_back(row[own]);
        return add(group.all_to_all(view(step.read, total(step.matrix[own])), step.matrix[own],
                                    view(step.write, total(received)), received));
      }
      case Kind::kTransfer:
        if (group.place() == step.from) add(group.send(view(step.read, step.count), step.to));
        if (group.place() == step.to) add(group.receive(view(step.write, step.count), step.from));
        return;
    }
  }

  /// One element of a reduction.
  template <class T>
  static T reduce_two(T a, T b, ReduceOp op) {
    if (op == ReduceOp::kSum) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
  }
  template <class T>
  static void reduce_into(std::byte* total, const std::byte* next, int64_t count, ReduceOp op) {
    for (int64_t i = 0; i < count; ++i) {
      T a, b;
      std::memcpy(&a, total + i * static_cast<int64_t>(sizeof a), sizeof a);
      std::memcpy(&b, next + i * static_cast<int64_t>(sizeof b), sizeof b);
      a = reduce_two(a, b, op);
      std::memcpy(total + i * static_cast<int64_t>(sizeof a), &a, sizeof a);
    }
  }
  static void reduce_into(DType dtype, std::byte* total, const std::byte* next, int64_t count, ReduceOp op) {
    switch (dtype) {
      case DType::kInt64:
        return reduce_into<int64_t>(total, next, count, op);
      case DType::kInt32:
        return reduce_into<int32_t>(total, next, count, op);
      case DType::kInt16:
        return reduce_into<int16_t>(total, next, count, op);
      default:
        return reduce_into<uint8_t>(total, next, count, op);
    }
  }

  /// Does one step for all ranks. None writes what it has yet to read: registers differ, except where a
  /// reduction is done first and where a root's elements stay.
  void model_step(const Step& step) {
    const std::vector<int64_t>& ranks = groups_[step.group];
    const int64_t width = element_bytes(step.dtype), size = std::ssize(ranks);
    const auto at = [&](int64_t place, size_t index, int64_t offset) {
      return results_[static_cast<size_t>(ranks[static_cast<size_t>(place)])][index].data() +
             (step.at + offset) * width;
    };
    const auto source = [&](int64_t place, int64_t offset) { return at(place, step.read, offset); };
    const auto target = [&](int64_t place, int64_t offset) { return at(place, step.write, offset); };
    const auto copy = [&](std::byte* to, const std::byte* from, int64_t count) {
      std::copy_n(from, count * width, to);
    };
    const auto reduced = [&](int64_t offset, int64_t count) {
      std::vector<std::byte> sum(source(0, offset), source(0, offset) + count * width);
      for (int64_t p = 1; p < size; ++p)
        reduce_into(step.dtype, sum.data(), source(p, offset), count, step.op);
      return sum;
    };
    const auto everything = reduced(0, step.kind == Kind::kAllReduce ? step.count : 0);
    for (int64_t p = 0; p < size; ++p) {
      const auto own = static_cast<size_t>(p);
      const int64_t offset = total(std::span(step.counts).first(own));
      switch (step.kind) {
        case Kind::kBarrier:
          break;
        case Kind::kBroadcast:
          if (p != step.from) copy(target(p, 0), target(step.from, 0), step.count);
          break;
        case Kind::kAllGather:
          for (int64_t r = 0; r < size; ++r) copy(target(r, offset), source(p, 0), step.counts[own]);
          break;
        case Kind::kAllReduce:
          copy(target(p, 0), everything.data(), step.count);
          break;
        case Kind::kReduceScatter:
          copy(target(p, 0), reduced(offset, step.counts[own]).data(), step.counts[own]);
          break;
        case Kind::kAllToAll:
          for (int64_t s = 0, landed = 0; s < size; ++s) {
            const std::vector<int64_t>& row = step.matrix[static_cast<size_t>(s)];
            copy(target(p, landed), source(s, total(std::span(row).first(own))), row[own]);
            landed += row[own];
          }
          break;
        case Kind::kTransfer:
          if (p == step.to) copy(target(p, 0), source(step.from, 0), step.count);
          break;
      }
    }
  }

  const int ranks_;
  const uint32_t seed_;
  std::minstd_rand random_;
  int64_t register_bytes_ = 0;
  std::vector<std::vector<int64_t>> groups_;
  std::vector<Step> steps_;
  std::vector<Registers> results_;  // of every rank, by the model
};

}  // namespace spolia
