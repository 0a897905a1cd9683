// What every backend has to do when ranks disagree, die or do not come: each case breaks its groups, and
// takes a launch of its own.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "spolia/comm/decorators.h"
#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/world.h"

namespace spolia {

/// Every rank runs `run`, which throws where something is wrong.
struct FailureCase {
  std::string name;
  std::function<void(World& world)> run;
  Decorator decorate;
  /// What the launch has to throw: a kind, and a part of the message.
  std::optional<std::pair<ErrorKind, std::string>> thrown;
};

namespace failures {

/// The time-out of operations that are meant to fail, and what they may take on a busy machine.
inline constexpr milliseconds kTimeout{150};
inline constexpr milliseconds kPatience = 20 * kTimeout;

inline constexpr int64_t kElements = 30000;

/// Memory of one operation; gone as soon as the operation has failed, so that sanitizers see who touches it
/// later.
struct Memory {
  Memory(const Group& group, int64_t elements, DType dtype = DType::kInt32)
      : memory(group.device(), elements * element_bytes(dtype)),
        view(dense_view(memory.data(), dtype, Dims{elements}, group.device())) {}
  TestMemory memory;
  View view;
};

/// A whole operation of each kind; those between two ranks are between 0 and 1, and a barrier for the others.
struct Operation {
  std::string name;
  std::function<void(Group& group)> run;
};

inline std::vector<int64_t> equal_counts(const Group& group, int64_t count) {
  return std::vector<int64_t>(static_cast<size_t>(group.size()), count);
}

inline void barrier(Group& group) { group.barrier().wait(); }
inline void broadcast(Group& group) {
  Memory memory(group, kElements);
  group.broadcast(memory.view, 0).wait();
}
inline void broadcast_from_one(Group& group) {
  Memory memory(group, kElements);
  group.broadcast(memory.view, 1).wait();
}
inline void all_gather(Group& group) {
  Memory piece(group, kElements), all(group, kElements * group.size());
  group.all_gather(piece.view, equal_counts(group, kElements), all.view).wait();
}
inline void all_reduce(Group& group) {
  Memory memory(group, kElements);
  group.all_reduce(memory.view, memory.view).wait();
}
inline void reduce_scatter(Group& group) {
  Memory send(group, kElements * group.size()), receive(group, kElements);
  group.reduce_scatter(send.view, equal_counts(group, kElements), receive.view).wait();
}
inline void all_to_all(Group& group) {
  Memory send(group, kElements * group.size()), receive(group, kElements * group.size());
  const std::vector<int64_t> counts = equal_counts(group, kElements);
  group.all_to_all(send.view, counts, receive.view, counts).wait();
}
inline void send_to_one(Group& group) {
  Memory memory(group, kElements);
  if (group.place() == 0) return group.send(memory.view, 1).wait();
  if (group.place() == 1) return group.receive(memory.view, 0).wait();
  group.barrier().wait();
}
inline void receive_from_one(Group& group) {
  Memory memory(group, kElements);
  if (group.place() == 0) return group.receive(memory.view, 1).wait();
  if (group.place() == 1) return group.send(memory.view, 0).wait();
  group.barrier().wait();
}

inline std::vector<Operation> operations() {
  return {{"Barrier", barrier},
          {"Broadcast", broadcast},
          {"BroadcastFromTheCulprit", broadcast_from_one},
          {"AllGather", all_gather},
          {"AllReduce", all_reduce},
          {"ReduceScatter", reduce_scatter},
          {"AllToAll", all_to_all},
          {"SendToTheCulprit", send_to_one},
          {"ReceiveFromTheCulprit", receive_from_one}};
}

/// What `body` throws; a fault of the test where it throws nothing.
template <class Body>
std::pair<ErrorKind, std::string> error_of(Body body) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    body();
  } catch (const Error& error) {
    require(std::chrono::steady_clock::now() - begin < kPatience, "too late: {}", error.what());
    return {error.kind(), error.what()};
  }
  require(false, "an operation that cannot succeed did");
  return {};
}

inline bool says(const std::string& message, const std::string& word) {
  return message.find(word) != std::string::npos;
}

/// The group is broken, tells why, and lets nothing start.
inline void require_broken(Group& group, const std::string& word) {
  const std::string reason = group.backend().broken();
  require(says(reason, word), "the group is broken by \"{}\", which does not say \"{}\"", reason, word);
  for (const Operation& operation : operations()) {
    const auto [kind, message] = error_of([&] { operation.run(group); });
    require(kind == ErrorKind::kPeerFailed && says(message, reason), "in a broken group: {}", message);
  }
}

/// Some operations that succeed: a barrier and a sum.
inline void warm_up(Group& group) {
  barrier(group);
  all_reduce(group);
}
constexpr int64_t kWarmUp = 2;

/// Rank 1 dies where it starts the operation.
inline FailureCase death_in(const Operation& operation) {
  const auto run = [operation](World& world) {
    Group& group = *world.all();
    group.set_timeout(std::chrono::minutes(5));  // nobody has to wait for it
    warm_up(group);
    if (world.rank() == 1) return operation.run(group);
    const auto [kind, message] = error_of([&] { operation.run(group); });
    require(kind == ErrorKind::kPeerFailed && says(message, "rank 1"), "after a death: {}", message);
    require_broken(group, "rank 1");
  };
  return {"DeathIn" + operation.name, run, on_rank(1, dying(kWarmUp)),
          std::pair(ErrorKind::kIo, std::string("rank 1: rank 1 dies at operation 2"))};
}

/// Rank 1 never arrives at the operation, and does not know.
inline FailureCase absence_in(const Operation& operation) {
  const auto run = [operation](World& world) {
    Group& group = *world.all();
    warm_up(group);
    group.set_timeout(kTimeout);
    const auto [kind, message] = error_of([&] { operation.run(group); });
    require(kind == ErrorKind::kTimeout || kind == ErrorKind::kPeerFailed, "without a rank: {}", message);
    require(
        says(message, "rank 1") || (operation.name.starts_with("Rec") || operation.name.starts_with("Send")),
        "without rank 1: {}", message);
    require_broken(group, "timed out");
  };
  return {"AbsenceIn" + operation.name, run, on_rank(1, dropping(kWarmUp)), std::nullopt};
}

/// Rank 1 returns, and the others go on.
inline FailureCase end_before(const Operation& operation) {
  const auto run = [operation](World& world) {
    Group& group = *world.all();
    warm_up(group);
    if (world.rank() == 1) return;
    const auto [kind, message] = error_of([&] { operation.run(group); });
    require(kind == ErrorKind::kPeerFailed && says(message, "rank 1"), "after an end: {}", message);
    require_broken(group, "rank 1");
  };
  return {"EndBefore" + operation.name, run, nullptr, std::nullopt};
}

/// An operation that the last rank sees differently.
struct Disagreement {
  std::string name, word;
  std::function<void(Group& group, bool odd)> run;
};

inline std::vector<Disagreement> disagreements() {
  const auto reduce = [](Group& group, int64_t elements, DType dtype, ReduceOp op) {
    Memory memory(group, elements, dtype);
    group.all_reduce(memory.view, memory.view, op).wait();
  };
  const auto parts = [](const Group& group, bool odd) {
    std::vector<int64_t> counts = equal_counts(group, 8);
    if (odd) counts[0] = 9;
    return counts;
  };
  return {
      {"Kinds", "these are different operations",
       [](Group& group, bool odd) { odd ? barrier(group) : all_reduce(group); }},
      {"DTypes", "the dtypes differ",
       [=](Group& group, bool odd) {
         reduce(group, 8, odd ? DType::kInt32 : DType::kFloat32, ReduceOp::kSum);
       }},
      {"Reductions", "the reductions differ",
       [=](Group& group, bool odd) {
         reduce(group, 8, DType::kInt32, odd ? ReduceOp::kMax : ReduceOp::kSum);
       }},
      {"SizesOfAllReduce", "the sizes differ",
       [=](Group& group, bool odd) { reduce(group, odd ? 9 : 8, DType::kInt32, ReduceOp::kSum); }},
      {"Roots", "the roots differ",
       [](Group& group, bool odd) {
         Memory memory(group, 8);
         group.broadcast(memory.view, odd ? 1 : 0).wait();
       }},
      {"SizesOfBroadcast", "the sizes differ",
       [](Group& group, bool odd) {
         Memory memory(group, odd ? 9 : 8);
         group.broadcast(memory.view, 0).wait();
       }},
      {"CountsOfAllGather", "from rank 0",
       [=](Group& group, bool odd) {
         Memory piece(group, 8), all(group, 8 * group.size() + odd);
         group.all_gather(piece.view, parts(group, odd), all.view).wait();
       }},
      {"CountsOfReduceScatter", "for rank 0",
       [=](Group& group, bool odd) {
         Memory send(group, 8 * group.size() + odd), receive(group, 8);
         group.reduce_scatter(send.view, parts(group, odd), receive.view).wait();
       }},
      {"CountsOfAllToAll", "to rank 0",
       [=](Group& group, bool odd) {
         Memory send(group, 8 * group.size() + odd), receive(group, 8 * group.size());
         group.all_to_all(send.view, parts(group, odd), receive.view, equal_counts(group, 8)).wait();
       }},
      {"SizesOfSend", "the sizes differ",
       [](Group& group, bool odd) {
         Memory memory(group, odd ? 9 : 8);
         if (odd) return group.receive(memory.view, 0).wait();
         if (group.place() == 0) return group.send(memory.view, group.size() - 1).wait();
         group.barrier().wait();
       }},
      {"DTypesOfSend", "the dtypes differ",
       [](Group& group, bool odd) {
         Memory memory(group, 8, odd ? DType::kFloat32 : DType::kInt32);
         if (odd) return group.receive(memory.view, 0).wait();
         if (group.place() == 0) return group.send(memory.view, group.size() - 1).wait();
         group.barrier().wait();
       }},
  };
}

inline FailureCase disagreement_case(const Disagreement& disagreement) {
  const auto run = [disagreement](World& world) {
    Group& group = *world.all();
    warm_up(group);
    const bool odd = world.rank() == world.size() - 1;
    const bool between_two = disagreement.name.ends_with("Send");
    const auto [kind, message] = error_of([&] { disagreement.run(group, odd); });
    const bool takes_part = !between_two || odd || world.rank() == 0;
    require(kind == (takes_part ? ErrorKind::kMismatch : ErrorKind::kPeerFailed), "of another kind: {}",
            message);
    require(says(message, fmt::format("rank {} asks for", world.size() - 1)) ||
                says(message, fmt::format("rank {} for", world.size() - 1)),
            "does not name the last rank: {}", message);
    require(says(message, disagreement.word), "does not say \"{}\": {}", disagreement.word, message);
    require_broken(group, disagreement.word);
  };
  return {"DisagreeOn" + disagreement.name, run, nullptr, std::nullopt};
}

/// An exception that passes a pending operation does not wait for the others.
inline void error_past_a_pending_operation(World& world) {
  Group& group = *world.all();
  group.set_timeout(std::chrono::minutes(5));
  warm_up(group);
  if (world.rank() == 1) {
    Memory memory(group, kElements);
    const Pending pending = group.broadcast(memory.view, 0);
    throw NotFoundError("nothing there");
  }
  if (world.rank() == 0) {
    const auto [kind, message] = error_of([&] { receive_from_one(group); });
    require(kind == ErrorKind::kPeerFailed && says(message, "rank 1"), "{}", message);
  } else {
    error_of([&] { broadcast(group); });
  }
}

/// Whoever breaks a group does so on all ranks, and for what is pending.
inline void broken_on_purpose(World& world) {
  const std::vector<int64_t> all(world.all()->ranks().begin(), world.all()->ranks().end());
  const std::shared_ptr<Group> group = world.create(all), other = world.create(all);
  Memory memory(*group, kElements);
  if (world.rank() == 0) {
    group->backend().break_group("enough");
    group->backend().break_group("more than enough");
  } else {
    const auto [kind, message] = error_of([&] { group->broadcast(memory.view, 0).wait(); });
    require(kind == ErrorKind::kPeerFailed && says(message, "enough"), "{}", message);
  }
  require(group->backend().broken() == "enough", "the first reason is kept: {}", group->backend().broken());
  require_broken(*group, "enough");
  warm_up(*other);  // another group of the same ranks goes on
  warm_up(*world.all());
}

/// Ranks that make different groups are told so, and go on.
inline void different_groups(World& world) {
  const int64_t pair[] = {0, 1}, one[] = {0}, far[] = {0, world.size() - 1};
  const bool odd = world.rank() == world.size() - 1;
  auto error = error_of([&] { world.create(odd ? std::span<const int64_t>(one) : pair); });
  require(error.first == ErrorKind::kMismatch && says(error.second, "rank 0 one of [0, 1]"), "{}",
          error.second);
  if (world.size() > 2) {
    error = error_of([&] { world.create(odd ? far : pair); });
    require(error.first == ErrorKind::kMismatch && says(error.second, "[0, 1]"), "{}", error.second);
  }
  const std::shared_ptr<Group> group = world.create(pair);
  if (group) warm_up(*group);
}

}  // namespace failures

/// At least two ranks.
inline std::vector<FailureCase> failure_cases() {
  using namespace failures;
  std::vector<FailureCase> cases = {
      {"ErrorPastAPendingOperation", error_past_a_pending_operation, nullptr,
       std::pair(ErrorKind::kNotFound, std::string("rank 1: nothing there"))},
      {"BrokenOnPurpose", broken_on_purpose, nullptr, std::nullopt},
      {"DifferentGroups", different_groups, nullptr, std::nullopt},
  };
  for (const Operation& operation : operations()) {
    cases.push_back(death_in(operation));
    cases.push_back(absence_in(operation));
    cases.push_back(end_before(operation));
  }
  for (const Disagreement& disagreement : disagreements()) cases.push_back(disagreement_case(disagreement));
  return cases;
}

}  // namespace spolia
