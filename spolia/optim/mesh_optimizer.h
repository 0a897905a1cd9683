// AdamW and Muon over parameters that ranks share: shards, replicas, or both.
//
// Each step is taken once, by the ranks that own the parameter (mesh_plan.h), and sent to its replicas, which
// get the owner's bits. Muon gathers each matrix to one rank, whatever the layout; AdamW works on shards.
//
//   MeshMuon muon(world, {{.parameters = {{parameter, {4096, 1024}, layout}}, .options = {}}});
//   muon.step();
//
// Gradients are those of this rank's shard, reduced: the same on all replicas. One that is missing counts as
// zeros, since other ranks of the row may have theirs; only frozen parameters are left alone.
//
// State lives on the owning row, in the parameter's shards. state_dict() has on each rank what it owns, with
// layouts that say so, and save() (checkpoint/save.h) writes it without copying it anywhere first.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spolia/comm/world.h"
#include "spolia/optim/local_optimizer.h"
#include "spolia/optim/mesh_engine.h"

namespace spolia {

/// A parameter that ranks share by a layout.
struct MeshParameter {
  /// This rank's shard: values, gradient and master, dense, in the shape that Layout::shard() calls local.
  /// Ranks outside the mesh have none, and need not list it. A master has to be there on all ranks or none.
  OptimizerParameter parameter;
  Dims shape;  // of the whole, which `parameter.matrix` speaks of
  /// Nothing: the parameter is this rank's alone, and is stepped without the others.
  std::shared_ptr<const Layout> layout;
};

struct MeshOptions {
  LocalOptions local;
  int64_t batch_bytes = MeshPlanOptions{}.batch_bytes;
  int64_t replica_groups = 0;  // mesh_plan.h
  MeshEngineOptions engine;
};

/// What MeshAdamW and MeshMuon share. Used by its rank's thread; the world outlives it.
class MeshOptimizer : public LocalOptimizer, private MeshArithmetic {
 public:
  const MeshPlan& plan() const { return engine_->plan(); }
  const MeshCounters& counters() const { return engine_->counters(); }

  /// What this rank has, each tensor with its layout over the ranks that have some: shards, or parts of them,
  /// on the owning rows; row_moments whole on each rank of a row, where they travel (mesh_plan.h); "step" on
  /// every rank.
  std::vector<StateTensor> state() override;
  /// Takes away what was materialised.
  void allocate_state() override;
  void collect_wanted(const SavedState& saved, StateDict& wanted,
                      std::vector<std::string>& unexpected) override;

  /// Gives the replicas the state that owners have, for those who save in a way that wants it on all ranks:
  /// state() then has it with the parameters' own layouts. The next step, or release(), takes it away again.
  /// Collective over the world.
  void materialise();
  void release();

  /// MismatchError on every rank where replicas of a parameter do not have the same bits, naming it.
  /// Collective over the world.
  void require_equal_replicas();

 protected:
  /// Collective: makes plan and engine from the parameters of all groups.
  MeshOptimizer(World& world, std::unique_ptr<StepMethod> method,
                std::vector<std::vector<MeshParameter>> groups, const MeshOptions& options);

  void take_step() final;
  void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) final;
  bool has(const Slot& slot, const StateField& field) const final;
  LocalTensor as_tensor(const Slot& slot, const StateField& field, const View& memory) const final;

 private:
  /// A slot's place on the mesh.
  struct Place {
    bool in_mesh = true;
    bool frozen = false;                         // for those who share it; else the parameter says
    bool owner = true;                           // has state
    std::shared_ptr<const Layout> state_layout;  // null where frozen or alone
  };

  const Place& place_of(const Slot& slot) const {
    return places_[static_cast<size_t>(&slot - slots_.data())];
  }
  Slot& slot_of(size_t tensor) { return slots_[*slot_numbers_[tensor]]; }
  std::vector<MeshTensor> take_over(std::vector<std::vector<MeshParameter>> groups);

  void fill_update(size_t tensor, const View& update) final;
  void compute(size_t tensor, const MatrixUnit& unit, const View& matrix, const View& row_moments) final;
  void apply(size_t tensor, const View& update) final;
  View result(size_t tensor) final;
  View row_moments(size_t tensor) final;
  void received(size_t tensor, const LeadingPart& part) final;

  World& world_;
  std::vector<Place> places_;                        // by slot
  std::vector<std::optional<size_t>> slot_numbers_;  // by tensor of the plan; nothing: not listed here
  std::vector<std::vector<Slot::State>> copies_;     // by slot, of what others own
  bool materialised_ = false;                        // the copies are complete
  std::unique_ptr<MeshEngine> engine_;
};

using MeshAdamWGroup = OptimizerGroup<MeshParameter, AdamWOptions>;
using MeshMuonGroup = OptimizerGroup<MeshParameter, MuonOptions>;

class MeshAdamW final : public MeshOptimizer {
 public:
  /// Collective over the world. Ranks list the parameters that they have, in one order. On all ranks, what
  /// one throws: AdamW's errors; InvalidArgumentError where memory does not suit a layout, MismatchError
  /// where ranks describe a parameter differently.
  MeshAdamW(World& world, std::vector<MeshAdamWGroup> groups, const MeshOptions& options = {});
};

class MeshMuon final : public MeshOptimizer {
 public:
  /// As MeshAdamW; and a matrix rule has to fit its parameter's whole shape.
  MeshMuon(World& world, std::vector<MeshMuonGroup> groups, const MeshOptions& options = {});
  void set_update_hook(MuonUpdateHook hook) { method<MuonMethod>().set_update_hook(std::move(hook)); }
  const NewtonSchulz& newton_schulz() const { return method<MuonMethod>().newton_schulz(); }
};

}  // namespace spolia
