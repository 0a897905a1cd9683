// What every backend has to do: the tests that leave the groups whole.
//
// Each case is run by every rank of a world and throws where something is wrong.
#pragma once

#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/world.h"

namespace spolia {

struct ConformanceCase {
  std::string name;
  std::function<void(World& world)> run;
};

namespace conformance {

inline std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes;
  for (size_t i = 0; i < kDTypeCount; ++i) dtypes.push_back(static_cast<DType>(i));
  return dtypes;
}

/// Shapes that whole bytes hold in every dtype.
inline const Dims kShapes[] = {{3, 4}, {4}, {2, 1, 8}, {0, 4}, {1, 4}};

/// What rank `rank` gives in the `salt`th operation.
inline std::vector<std::byte> gift(int64_t rank, int64_t salt, int64_t bytes) {
  return noise(rank * 1000003 + salt, bytes);
}

/// Calls body(dtype, shape, arrangement, salt) for a covering of all three.
template <class Body>
void for_each_kind_of_tensor(Body body) {
  int64_t salt = 0;
  for (DType dtype : all_dtypes()) {
    for (const Dims& shape : kShapes) {
      body(dtype, shape, kArrangements[salt % 4], salt);
      ++salt;
    }
  }
}

inline void append(std::vector<std::byte>& all, const std::vector<std::byte>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

inline void broadcasts(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims& shape, Arrangement arrangement, int64_t salt) {
    const int root = static_cast<int>(salt) % group.size();
    // Each rank has its own strides.
    TestTensor tensor(dtype, shape, kArrangements[(static_cast<int64_t>(arrangement) + group.place()) % 4],
                      group.device());
    tensor.set_elements(gift(group.place(), salt, tensor.view().bytes()));
    group.broadcast(tensor.view(), root).wait();
    tensor.require_elements(gift(root, salt, tensor.view().bytes()), "broadcast");
  });
}

inline void all_gathers(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims& shape, Arrangement arrangement, int64_t salt) {
    TestTensor piece(dtype, shape, arrangement, group.device());
    Dims stacked = {group.size()};
    for (int64_t dim : shape) stacked.push_back(dim);
    TestTensor all(dtype, stacked, kArrangements[(salt / 2) % 4], group.device());
    piece.set_elements(gift(group.place(), salt, piece.view().bytes()));
    group.all_gather(piece.view(), all.view()).wait();
    std::vector<std::byte> expected;
    for (int r = 0; r < group.size(); ++r) append(expected, gift(r, salt, piece.view().bytes()));
    all.require_elements(expected, "all-gather");
  });
}

/// A count for each rank: some are 0, and whole bytes in every dtype.
inline std::vector<int64_t> uneven_counts(int ranks, int64_t salt) {
  std::vector<int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(static_cast<int64_t>(mixed({r, salt}) % 4) * 4);
  return counts;
}

inline void uneven_all_gathers(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims&, Arrangement arrangement, int64_t salt) {
    const std::vector<int64_t> counts = uneven_counts(group.size(), salt);
    TestTensor piece(dtype, {counts[group.place()]}, arrangement, group.device());
    TestTensor all(dtype, {std::accumulate(counts.begin(), counts.end(), int64_t{0})},
                   kArrangements[salt % 3], group.device());
    piece.set_elements(gift(group.place(), salt, piece.view().bytes()));
    group.all_gather(piece.view(), counts, all.view()).wait();
    std::vector<std::byte> expected;
    for (int r = 0; r < group.size(); ++r) {
      append(expected, gift(r, salt, byte_size(dtype, std::span(&counts[r], 1))));
    }
    all.require_elements(expected, "uneven all-gather");
  });
}

/// What rank `rank` gives to a reduction: from 0 to 7 at each index.
inline int64_t addend(int64_t rank, int64_t index, int64_t salt) {
  return static_cast<int64_t>(mixed({rank, index, salt}) % 8);
}
inline int64_t reduced(ReduceOp op, int ranks, int64_t index, int64_t salt) {
  int64_t total = addend(0, index, salt);
  for (int r = 1; r < ranks; ++r) {
    const int64_t next = addend(r, index, salt);
    total = op == ReduceOp::kSum   ? total + next
            : op == ReduceOp::kMin ? std::min(total, next)
                                   : std::max(total, next);
  }
  return total;
}
inline std::vector<std::byte> addends(DType dtype, int64_t rank, int64_t count, int64_t salt) {
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < count; ++i) append_number(dtype, addend(rank, i, salt), bytes);
  return bytes;
}
inline std::vector<std::byte> reduction(DType dtype, ReduceOp op, int ranks, int64_t begin, int64_t count,
                                        int64_t salt) {
  std::vector<std::byte> bytes;
  for (int64_t i = begin; i < begin + count; ++i) {
    int64_t number = reduced(op, ranks, i, salt);
    if (dtype == DType::kBool && op == ReduceOp::kMin) {
      number = 1;
      for (int r = 0; r < ranks; ++r) number = number && addend(r, i, salt) != 0;
    }
    append_number(dtype, number, bytes);
  }
  return bytes;
}

inline constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};

inline void all_reduces(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims& shape, Arrangement arrangement, int64_t salt) {
    for (ReduceOp op : kOps) {
      if (!can_reduce(dtype, op)) continue;
      TestTensor send(dtype, shape, arrangement, group.device());
      TestTensor receive(dtype, shape, kArrangements[(salt / 3) % 4], group.device());
      send.set_elements(addends(dtype, group.place(), numel(shape), salt));
      const auto expected = reduction(dtype, op, group.size(), 0, numel(shape), salt);
      group.all_reduce(send.view(), receive.view(), op).wait();
      receive.require_elements(expected, "all-reduce");
      send.require_elements(addends(dtype, group.place(), numel(shape), salt),
                            "what an all-reduce was given");
      group.all_reduce(send.view(), send.view(), op).wait();  // in place
      send.require_elements(expected, "all-reduce in place");
    }
  });
}

inline void reduce_scatters(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims&, Arrangement arrangement, int64_t salt) {
    for (ReduceOp op : kOps) {
      if (!can_reduce(dtype, op)) continue;
      const std::vector<int64_t> counts = uneven_counts(group.size(), salt);
      const int64_t count = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      const int64_t begin = std::accumulate(counts.begin(), counts.begin() + group.place(), int64_t{0});
      TestTensor send(dtype, {count}, arrangement, group.device());
      TestTensor receive(dtype, {counts[group.place()]}, arrangement, group.device());
      send.set_elements(addends(dtype, group.place(), count, salt));
      group.reduce_scatter(send.view(), counts, receive.view(), op).wait();
      receive.require_elements(reduction(dtype, op, group.size(), begin, counts[group.place()], salt),
                               "reduce-scatter");
    }
  });
}

inline void all_to_alls(World& world) {
  Group& group = *world.all();
  for_each_kind_of_tensor([&](DType dtype, const Dims&, Arrangement arrangement, int64_t salt) {
    const auto count = [&](int from, int to) {
      return static_cast<int64_t>(mixed({from, to, salt}) % 3) * 4;
    };
    const auto bytes = [&](int from, int to) {
      const int64_t elements = count(from, to);
      return gift(from * 100 + to, salt, byte_size(dtype, std::span(&elements, 1)));
    };
    std::vector<int64_t> send_counts, receive_counts;
    std::vector<std::byte> sent, expected;
    for (int r = 0; r < group.size(); ++r) {
      send_counts.push_back(count(group.place(), r));
      receive_counts.push_back(count(r, group.place()));
      append(sent, bytes(group.place(), r));
      append(expected, bytes(r, group.place()));
    }
    TestTensor send(dtype, {std::accumulate(send_counts.begin(), send_counts.end(), int64_t{0})}, arrangement,
                    group.device());
    TestTensor receive(dtype, {std::accumulate(receive_counts.begin(), receive_counts.end(), int64_t{0})},
                       kArrangements[(salt / 2) % 4], group.device());
    send.set_elements(sent);
    group.all_to_all(send.view(), send_counts, receive.view(), receive_counts).wait();
    receive.require_elements(expected, "all-to-all");
  });
}

/// Round a ring, each rank to the next: alone, both ways started before a wait.
inline void sends(World& world) {
  Group& group = *world.all();
  const int next = (group.place() + 1) % group.size();
  const int previous = (group.place() + group.size() - 1) % group.size();
  for_each_kind_of_tensor([&](DType dtype, const Dims& shape, Arrangement arrangement, int64_t salt) {
    TestTensor send(dtype, shape, arrangement, group.device());
    TestTensor receive(dtype, shape, kArrangements[(salt / 2) % 4], group.device());
    send.set_elements(gift(group.place(), salt, send.view().bytes()));
    Pending sending = group.send(send.view(), next);
    Pending receiving = group.receive(receive.view(), previous);
    sending.wait();
    receiving.wait();
    receive.require_elements(gift(previous, salt, receive.view().bytes()), "receive");
  });
}

/// Several in each direction between the same two; collectives of the group come in between.
inline void sends_keep_their_order(World& world) {
  Group& group = *world.all();
  const int size = group.size();
  constexpr int kEach = 5;
  std::vector<int64_t> given;
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < kEach; ++i) given.push_back(group.place() * 10000 + r * 100 + i);
  }
  TestNumbers<int64_t> sent(group.device(), given),
      arrived(group.device(), std::vector<int64_t>(given.size(), -1));
  TestNumbers<int64_t> token(group.device(), std::vector<int64_t>{group.place() == 0 ? 77 : 0});
  std::vector<Pending> pending;
  for (int i = 0; i < kEach; ++i) {
    for (int r = 0; r < size; ++r) {
      const auto at = static_cast<size_t>(r * kEach + i);
      pending.push_back(group.send(sent.at(DType::kInt64, at), r));
      pending.push_back(group.receive(arrived.at(DType::kInt64, at), r));
    }
    if (i == 2) pending.push_back(group.broadcast(token.at(DType::kInt64, 0), 0));
  }
  for (Pending& one : pending) one.wait();
  require(token.read()[0] == 77, "a broadcast between sends: {}", token.read()[0]);
  const std::vector<int64_t> received = arrived.read();
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < kEach; ++i) {
      const int64_t got = received[static_cast<size_t>(r * kEach + i)];
      require(got == r * 10000 + group.place() * 100 + i, "send {} from rank {}: {}", i, r, got);
    }
  }
}

inline void barriers(World& world) {
  for (int i = 0; i < 200; ++i) world.all()->barrier().wait();
}

inline void scalars_and_nothing(World& world) {
  Group& group = *world.all();
  TestTensor scalar(DType::kFloat64, {}, Arrangement::kDense, group.device());
  TestTensor stacked(DType::kFloat64, {group.size()}, Arrangement::kDense, group.device());
  scalar.set_elements(gift(group.place(), 1, 8));
  group.all_gather(scalar.view(), stacked.view()).wait();
  group.broadcast(scalar.view(), group.size() - 1).wait();
  scalar.require_elements(gift(group.size() - 1, 1, 8), "broadcast of a scalar");

  const View nothing = dense_view<std::byte>(nullptr, DType::kFloat32, Dims{0}, group.device());
  const std::vector<int64_t> none(static_cast<size_t>(group.size()), 0);
  group.broadcast(nothing, 0).wait();
  group.all_gather(nothing, none, nothing).wait();
  group.all_reduce(nothing, nothing).wait();
  group.reduce_scatter(nothing, none, nothing).wait();
  group.all_to_all(nothing, none, nothing, none).wait();
  if (group.size() > 1 && group.place() == 0) group.send(nothing, 1).wait();
  if (group.place() == 1) group.receive(nothing, 0).wait();
}

/// An all-gather and a reduce-scatter whose own part is where it has to go already.
inline void in_place_parts(World& world) {
  Group& group = *world.all();
  const int size = group.size();
  std::vector<int32_t> given(static_cast<size_t>(size) * 3, -1);
  for (int i = 0; i < 3; ++i) given[static_cast<size_t>(group.place() * 3 + i)] = group.place() * 10 + i;
  TestNumbers<int32_t> all(group.device(), given);
  const View own = all.view(DType::kInt32, static_cast<size_t>(group.place()) * 3, 3);
  const View whole = all.view(DType::kInt32, 0, given.size());
  group.all_gather(own, dense_view(whole.data, DType::kInt32, Dims{size, 3}, group.device())).wait();
  const std::vector<int32_t> gathered = all.read();
  for (int i = 0; i < size * 3; ++i) {
    require(gathered[static_cast<size_t>(i)] == i / 3 * 10 + i % 3, "all-gather in place, element {}", i);
  }
  group.reduce_scatter(whole, std::vector<int64_t>(static_cast<size_t>(size), 3), own).wait();
  const std::vector<int32_t> reduced = all.read();
  for (int i = 0; i < 3; ++i) {
    const int32_t got = reduced[static_cast<size_t>(group.place() * 3 + i)];
    require(got == size * (group.place() * 10 + i), "reduce-scatter in place, element {}: {}", i, got);
  }
}

/// The bytes and pieces that many threads carry out together.
inline void large_buffers(World& world) {
  Group& group = *world.all();
  const int size = group.size();
  const int64_t count = (3 << 20) / size + 1;
  TestTensor piece(DType::kUInt8, {count}, Arrangement::kDense, group.device());
  TestTensor all(DType::kUInt8, {size, count}, Arrangement::kDense, group.device());
  piece.set_elements(gift(group.place(), 5, count));
  group.all_gather(piece.view(), all.view()).wait();
  std::vector<std::byte> expected;
  for (int r = 0; r < size; ++r) append(expected, gift(r, 5, count));
  require(all.elements() == expected, "a large all-gather");
  group.broadcast(all.view(), size / 2).wait();
  require(all.elements() == expected, "a large broadcast");

  std::vector<double> given(300001);
  for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<double>(i) + group.place();
  TestNumbers<double> summed(group.device(), given);
  const View view = summed.view(DType::kFloat64, 0, given.size());
  group.all_reduce(view, view).wait();
  const std::vector<double> numbers = summed.read();
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double sum = static_cast<double>(i) * size + size * (size - 1) / 2;
    require(numbers[i] == sum, "a large all-reduce, element {}: {}", i, numbers[i]);
  }
}

/// A float sum depends on the order; every rank has to get the same bits, those of the order of the ranks.
inline void sums_are_the_same_to_the_bit(World& world) {
  Group& group = *world.all();
  const auto value = [](int rank, size_t i) {
    return static_cast<float>(mixed({rank, static_cast<int64_t>(i)}) % 100000) / 7.0f *
           (mixed({rank, static_cast<int64_t>(i), 1}) % 2 == 0 ? 1e6f : 1e-3f);
  };
  std::vector<float> given(50001);
  for (size_t i = 0; i < given.size(); ++i) given[i] = value(group.place(), i);
  TestNumbers<float> summed(group.device(), given);
  const View view = summed.view(DType::kFloat32, 0, given.size());
  group.all_reduce(view, view).wait();
  const std::vector<float> numbers = summed.read();
  for (size_t i = 0; i < numbers.size(); ++i) {
    float sum = value(0, i);
    for (int r = 1; r < group.size(); ++r) sum += value(r, i);
    require(sum == numbers[i], "element {}: {}, not {}", i, numbers[i], sum);
  }
}

/// Lists of ranks, among them those that this world is large enough for.
inline std::vector<std::vector<int64_t>> some_groups(World& world) {
  std::vector<std::vector<int64_t>> groups = {{0}, {world.size() - 1}};
  std::vector<int64_t> all, even, odd;
  for (int64_t r = 0; r < world.size(); ++r) {
    all.push_back(r);
    (r % 2 == 0 ? even : odd).push_back(r);
  }
  groups.push_back(all);
  groups.push_back(even);
  if (!odd.empty()) groups.push_back(odd);
  if (world.size() >= 8) groups.push_back({0, 1, 6, 7});
  if (world.size() >= 4) groups.push_back({1, 3});
  groups.push_back(even);  // twice the same ranks, another group
  return groups;
}

inline void groups_are_apart(World& world) {
  const std::vector<std::vector<int64_t>> lists = some_groups(world);
  std::vector<std::shared_ptr<Group>> groups;
  for (const auto& ranks : lists) {
    groups.push_back(world.create(ranks));
    const bool member = std::ranges::binary_search(ranks, world.rank());
    require((groups.back() != nullptr) == member, "create() on a rank that is, or is not, a member");
    if (!member) continue;
    require(std::ranges::equal(groups.back()->ranks(), ranks), "the ranks of a new group");
    require(ranks[static_cast<size_t>(groups.back()->place())] == world.rank(), "the place in a new group");
    require(groups.back()->place_of(world.rank()) == groups.back()->place(), "place_of()");
  }
  // All groups' operations in flight at once.
  struct Round {
    TestNumbers<int64_t> values;
    size_t group;
    Pending pending;
  };
  std::vector<Round> rounds;
  for (int64_t i = 0; i < 10; ++i) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!groups[g]) continue;
      TestNumbers<int64_t> values(groups[g]->device(), {world.rank() + i, 1});
      const View view = values.view(DType::kInt64, 0, 2);
      Pending pending = groups[g]->all_reduce(view, view);
      rounds.push_back({std::move(values), g, std::move(pending)});
    }
  }
  // Another order on every rank.
  std::shuffle(rounds.begin(), rounds.end(), std::minstd_rand(static_cast<uint32_t>(world.rank() + 1)));
  for (Round& round : rounds) {
    round.pending.wait();
    require(round.values.read()[1] == std::ssize(lists[round.group]), "the sum of ones over a group");
  }
}

/// Waits in an order that differs from rank to rank must not wait for each other.
inline void waits_in_any_order(World& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  const std::shared_ptr<Group> other = world.create(ranks);
  constexpr int64_t kBytes = 200000;  // carried out by those who wait
  for (int round = 0; round < 5; ++round) {
    std::vector<TestTensor> tensors;
    std::vector<Pending> pending;
    for (int64_t i = 0; i < 8; ++i) {
      tensors.emplace_back(DType::kUInt8, Dims{kBytes}, Arrangement::kDense, other->device());
      if (world.rank() == i % world.size()) tensors.back().set_elements(gift(i, round, kBytes));
    }
    for (int64_t i = 0; i < 8; ++i) {
      Group& group = i % 2 == 0 ? *world.all() : *other;
      pending.push_back(
          group.broadcast(tensors[static_cast<size_t>(i)].view(), static_cast<int>(i % world.size())));
    }
    std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(order.begin(), order.end(),
                 std::minstd_rand(static_cast<uint32_t>(world.rank() * 31 + round + 1)));
    for (size_t i : order) {
      pending[i].wait();
      require(tensors[i].elements() == gift(static_cast<int64_t>(i), round, kBytes), "broadcast {}", i);
    }
  }
}

inline void many_in_flight(World& world) {
  Group& group = *world.all();
  constexpr size_t kMany = 2000;
  std::vector<int64_t> given(kMany);
  for (size_t i = 0; i < kMany; ++i) given[i] = static_cast<int64_t>(i) + world.rank();
  TestNumbers<int64_t> summed(group.device(), given);
  std::vector<Pending> pending;
  for (size_t i = 0; i < kMany; ++i) {
    const View view = summed.at(DType::kInt64, i);
    pending.push_back(group.all_reduce(view, view));
  }
  // The last first: operations of a group complete in their order.
  for (size_t i = kMany; i-- > 0;) {
    pending[i].wait();
    if (i == kMany - 1) require(pending[0].test(), "an operation landed before one that was started earlier");
  }
  const std::vector<int64_t> values = summed.read();
  for (size_t i = 0; i < kMany; ++i) {
    const int64_t sum = static_cast<int64_t>(i) * world.size() + world.size() * (world.size() - 1) / 2;
    require(values[i] == sum, "operation {}: {}", i, values[i]);
  }
}

/// test() alone brings an operation to its end.
inline void testing_is_enough(World& world) {
  Group& group = *world.all();
  TestTensor tensor(DType::kUInt8, {500000}, Arrangement::kGaps, group.device());
  tensor.set_elements(gift(world.rank(), 3, 500000));
  Pending pending = group.broadcast(tensor.view(), 0);
  while (!pending.test()) {
  }
  require(tensor.elements() == gift(0, 3, 500000), "a broadcast that was tested for");
  require(pending.test(), "an operation that has landed is over");
  pending.wait();
}

/// A Pending that is dropped, or assigned over, has landed before its memory goes.
inline void dropped_operations_land(World& world) {
  Group& group = *world.all();
  for (int i = 0; i < 20; ++i) {
    TestNumbers<int64_t> value(group.device(), {world.rank()}), second(group.device(), {1});
    Pending pending = group.all_reduce(value.at(DType::kInt64, 0), value.at(DType::kInt64, 0));
    pending = group.all_reduce(second.at(DType::kInt64, 0), second.at(DType::kInt64, 0));
    require(value.read()[0] == world.size() * (world.size() - 1) / 2,
            "an operation whose Pending was assigned over");
  }
}

template <class E, class Body>
void require_throws(Body body, std::string_view word) {
  try {
    body();
  } catch (const E& error) {
    require(std::string_view(error.what()).find(word) != std::string_view::npos, "\"{}\" does not say \"{}\"",
            error.what(), word);
    return;
  }
  require(false, "nothing was thrown that says \"{}\"", word);
}

/// What is refused is refused before anything starts: the group goes on.
inline void wrong_arguments(World& world) {
  Group& group = *world.all();
  const int size = group.size();
  const auto tensor = [&](DType dtype, int64_t count) {
    return TestTensor(dtype, {count}, Arrangement::kDense, group.device());
  };
  TestTensor four = tensor(DType::kFloat32, 4), other = tensor(DType::kFloat32, 4),
             five = tensor(DType::kFloat32, 5), integers = tensor(DType::kInt32, 4),
             pairs = tensor(DType::kComplex64, 4), bits = tensor(DType::kFloat8E5M2, 4),
             sixths = tensor(DType::kFloat6E2M3FN, 4);
  const std::vector<int64_t> ones(static_cast<size_t>(size), 1), few(static_cast<size_t>(size) + 1, 0);
  std::vector<int64_t> negative(static_cast<size_t>(size), 0), huge(static_cast<size_t>(size), INT64_MAX);
  negative[0] = -1;
  using Invalid = InvalidArgumentError;
  require_throws<Invalid>([&] { group.broadcast(four.view(), size); }, "broadcast: place");
  require_throws<Invalid>([&] { group.broadcast(four.view(), -1); }, "broadcast: place -1");
  require_throws<Invalid>([&] { group.send(four.view(), size); }, "send: place");
  require_throws<Invalid>([&] { group.all_gather(four.view(), five.view()); },
                          "all-gather: a view of shape 5");
  require_throws<Invalid>([&] { group.all_gather(four.view(), few, four.view()); }, "all-gather");
  require_throws<Invalid>([&] { group.all_gather(four.view(), negative, other.view()); }, "negative");
  require_throws<Invalid>([&] { group.all_gather(four.view(), huge, other.view()); }, "overflow");
  require_throws<Invalid>([&] { group.all_reduce(four.view(), five.view()); },
                          "all-reduce: a view of shape 5");
  require_throws<Invalid>([&] { group.all_reduce(four.view(), integers.view()); }, "int32");
  require_throws<UnsupportedError>([&] { group.all_reduce(bits.view(), bits.view()); }, "float8_e5m2");
  require_throws<UnsupportedError>([&] { group.all_reduce(pairs.view(), pairs.view(), ReduceOp::kMin); },
                                   "complex64");
  require_throws<Invalid>([&] { group.reduce_scatter(four.view(), few, four.view()); }, "reduce-scatter");
  require_throws<Invalid>([&] { group.all_to_all(four.view(), ones, other.view(), few); }, "all-to-all");
  // Overlapping by half.
  TestMemory memory(group.device(), 64);
  const View low = dense_view(memory.data(), DType::kFloat32, Dims{4}, group.device());
  const View high = dense_view(memory.data() + 8, DType::kFloat32, Dims{4}, group.device());
  require_throws<Invalid>([&] { group.all_reduce(low, high); }, "overlap");
  // Elements on each other, and strides for what has none.
  View expanded = low;
  expanded.strides[0] = 0;
  if (world.rank() != 0) require_throws<Invalid>([&] { group.broadcast(expanded, 0); }, "stride 0");
  View strided = sixths.view();
  strided.strides[0] = 2;
  require_throws<UnsupportedError>([&] { group.broadcast(strided, 0); }, "float6_e2m3fn");
  const int64_t three[] = {3};
  const View halves = dense_view(memory.data(), DType::kFloat4E2M1FN, three, group.device());
  require_throws<Invalid>([&] { group.broadcast(halves, 0); }, "float4_e2m1fn");
  // Memory of a device that the group does not reach.
  View elsewhere = low;
  elsewhere.device = {group.device().kind == DeviceKind::kCpu ? DeviceKind::kCuda : DeviceKind::kCpu, 5};
  require_throws<UnsupportedError>([&] { group.broadcast(elsewhere, 0); }, name_of(elsewhere.device));
  require_throws<Invalid>([&] { world.create({}); }, "a group of the ranks []");
  const int64_t falling[] = {1, 0}, far[] = {0, world.size()};
  require_throws<Invalid>([&] { world.create(falling); }, "[1, 0]");
  require_throws<Invalid>([&] { world.create(far); }, "they have to rise");
  require_throws<Invalid>([&] { group.place_of(world.size()); }, "is not in the group");
  group.barrier().wait();
  require(group.backend().broken().empty(), "the group is broken: {}", group.backend().broken());
}

/// Sizes are looked at, buffers are not: there are none.
inline void ranks_that_only_meet(World& world) {
  GroupBackend& backend = world.all()->backend();
  Collective collective;
  collective.meets_only = true;
  collective.device = world.all()->device();
  auto* nowhere = reinterpret_cast<std::byte*>(64);
  for (const CollectiveKind kind : {CollectiveKind::kBroadcast, CollectiveKind::kAllReduce}) {
    collective.kind = kind;
    const bool sends = kind == CollectiveKind::kAllReduce || world.rank() == 0;
    const bool receives = kind == CollectiveKind::kAllReduce || world.rank() != 0;
    collective.send = sends ? std::span<const std::byte>(nowhere, 1 << 20) : std::span<const std::byte>();
    collective.receive = receives ? std::span(nowhere, 1 << 20) : std::span<std::byte>();
    backend.start(collective)->wait(Deadline::max());
  }
  if (world.size() > 1 && world.rank() < 2) {
    collective.kind = world.rank() == 0 ? CollectiveKind::kSend : CollectiveKind::kReceive;
    collective.peer = world.rank() == 0 ? 1 : 0;
    collective.send =
        world.rank() == 0 ? std::span<const std::byte>(nowhere, 100) : std::span<const std::byte>();
    collective.receive = world.rank() == 0 ? std::span<std::byte>() : std::span(nowhere, 100);
    backend.start(collective)->wait(Deadline::max());
  }
  world.all()->barrier().wait();
}

inline void the_world(World& world) {
  require(world.size() == std::ssize(world.all()->ranks()), "size()");
  require(world.rank() == world.all()->place(), "rank()");
  require(std::ssize(world.hosts()) == world.size() && world.hosts()[0] == 0, "hosts()");
  for (int64_t r = 0; r < world.size(); ++r)
    require(world.all()->ranks()[static_cast<size_t>(r)] == r, "ranks()");
}

}  // namespace conformance

inline std::vector<ConformanceCase> conformance_cases() {
  using namespace conformance;
  return {{"TheWorld", the_world},
          {"Barrier", barriers},
          {"Broadcast", broadcasts},
          {"AllGather", all_gathers},
          {"UnevenAllGather", uneven_all_gathers},
          {"AllReduce", all_reduces},
          {"ReduceScatter", reduce_scatters},
          {"AllToAll", all_to_alls},
          {"SendAndReceive", sends},
          {"SendsKeepTheirOrder", sends_keep_their_order},
          {"ScalarsAndNothing", scalars_and_nothing},
          {"InPlaceParts", in_place_parts},
          {"LargeBuffers", large_buffers},
          {"SumsAreTheSameToTheBit", sums_are_the_same_to_the_bit},
          {"GroupsAreApart", groups_are_apart},
          {"WaitsInAnyOrder", waits_in_any_order},
          {"ManyInFlight", many_in_flight},
          {"TestingIsEnough", testing_is_enough},
          {"DroppedOperationsLand", dropped_operations_land},
          {"RanksThatOnlyMeet", ranks_that_only_meet},
          {"WrongArguments", wrong_arguments}};
}

}  // namespace spolia
