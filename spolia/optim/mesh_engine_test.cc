#include "spolia/optim/mesh_engine.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

/// Elements alone: a step sets what its rank owns to the rank's number.
class Numbers final : public MeshArithmetic {
 public:
  Numbers(const MeshPlan& plan, int64_t rank) : plan_(plan), rank_(rank) {
    for (const MeshTensor& tensor : plan.tensors)
      values_.emplace_back(static_cast<size_t>(numel(tensor.layout->shard(tensor.shape, rank).local_shape)),
                           -1);
  }
  void fill_update(size_t, const View&) override {}
  void compute(size_t, const MatrixUnit&, const View&, const View&) override {}
  void apply(size_t tensor, const View& update) override {
    EXPECT_EQ(update.data, nullptr);
    const View part = plan_.owned_part(tensor, rank_)->of(result(tensor));
    auto* values = reinterpret_cast<float*>(part.data);
    std::fill(values, values + numel(part.shape), static_cast<float>(rank_));
    ++applied;
  }
  View result(size_t tensor) override {
    return dense_view(std::as_writable_bytes(std::span(values_[tensor])).data(), DType::kFloat32,
                      plan_.tensors[tensor].layout->shard(plan_.tensors[tensor].shape, rank_).local_shape);
  }
  View row_moments(size_t) override { return {}; }
  void received(size_t tensor, const LeadingPart& part) override {
    received_elements += numel(part.shape_of(result(tensor).shape));
  }
  const std::vector<float>& values(size_t tensor) const { return values_[tensor]; }

  int applied = 0;
  int64_t received_elements = 0;

 private:
  const MeshPlan& plan_;
  const int64_t rank_;
  std::vector<std::vector<float>> values_;
};

MeshPlan plan_of_elements() {
  std::vector<MeshTensor> tensors;
  const auto add = [&](Dims shape, std::string_view layout) {
    MeshTensor& tensor = tensors.emplace_back();
    tensor.name = std::to_string(tensors.size());
    tensor.shape = std::move(shape);
    tensor.layout = std::make_shared<const Layout>(parse_layout(layout));
  };
  add({64, 4}, "[replicate, shard(0)] over 2x2");  // in parts
  add({5}, "[replicate] over 4");
  add({6, 2}, "[replicate, replicate] over 2x2");
  add({3}, "[shard(0)] over 4");
  return plan_mesh(std::move(tensors), {.batch_bytes = 64, .hosts = {}});
}

TEST(MeshEngine, WhatIsOwnedReachesEveryReplicaByTheWait) {
  for (int64_t pack_below : {0, 1 << 20})
    launch(4, [&](World& world) {
      MeshEngine engine(world, plan_of_elements(), {.pack_below = pack_below});
      const MeshPlan& plan = engine.plan();
      Numbers numbers(plan, world.rank());
      for (int step = 0; step < 3; ++step) {
        for (size_t group = 0; group < plan.groups.size(); ++group) engine.flush_group(group, numbers);
        engine.wait_all();
      }
      int64_t others = 0;
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        const MeshGroup& group = plan.groups[plan.assignments[t]->group];
        const MeshGroup::Position position = *group.position_of(world.rank());
        const MeshOwner& owner = *plan.owner_for(t, world.rank());
        const View all = numbers.result(t);
        for (size_t i = 0; i < owner.rows.size(); ++i) {
          const View part = plan.assignments[t]->cut.part(i, all.shape).of(all);
          const auto* values = reinterpret_cast<const float*>(part.data);
          for (int64_t e = 0; e < numel(part.shape); ++e)
            EXPECT_EQ(values[e], static_cast<float>(group.rows[owner.rows[i]][position.place]));
          if (owner.rows[i] != position.row) others += numel(part.shape);
        }
      }
      EXPECT_EQ(numbers.received_elements, 3 * others);
      EXPECT_EQ(engine.counters().arithmetic_seconds > 0, numbers.applied > 0);
    });
}

TEST(MeshEngine, AFailedBroadcastIsThrownByTheWaitAtTheLatest) {
  for (int64_t number : {0, 1, 2}) {
    LaunchOptions options;
    options.timeout = std::chrono::seconds(20);
    options.decorate = on_rank(
        1, where([](const GroupBackend& backend) { return backend.ranks().size() == 2; }, dying(number)));
    std::atomic<int> threw{0};
    EXPECT_THROW(launch(
                     4,
                     [&](World& world) {
                       MeshEngine engine(world, plan_of_elements());
                       Numbers numbers(engine.plan(), world.rank());
                       try {
                         for (size_t group = 0; group < engine.plan().groups.size(); ++group)
                           engine.flush_group(group, numbers);
                         engine.wait_all();
                       } catch (const Error&) {
                         ++threw;
                         throw;
                       }
                     },
                     options),
                 Error);
    EXPECT_GE(threw, 2) << number;  // the rank and whom it leaves waiting
  }
}

}  // namespace
}  // namespace spolia
