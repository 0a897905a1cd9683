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
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

  void allocate_state() override;
  /// What this rank has, each tensor with its layout over the ranks that have some: shards on the owning row;
  /// row_moments whole on it; "step" on every rank.
  std::vector<StateTensor> state() override;

  /// Gives the replicas the state that owners have, for those who save in a way that wants it on all ranks:
  /// state() then has it with the parameters' own layouts. The next step, or release(), takes it away again.
  /// Collective over the world.
  void materialise();
  void release();

  /// MismatchError on every rank where replicas of a parameter do not have the same bits, naming it.
  /// Collective over the world.
  void require_equal_replicas();

  /// A saved tensor that this rank takes, with memory for its shard.
  struct WantedTensor {
    std::string name;
    LocalTensor tensor;
    Buffer memory;
  };
  /// Adds the tensors that are state of this optimizer's parameters and that this rank has, in the saved
  /// dtypes; and the names of those of its parameters that no parameter here takes. For load_optimizer()
  /// (mesh_state.h); releases what was materialised. MismatchError where a shape is another.
  void collect_wanted(const SavedState& saved, std::vector<WantedTensor>& wanted,
                      std::vector<std::string>& unexpected);

 protected:
  MeshOptimizer(World& world, const MeshOptions& options)
      : LocalOptimizer(options.local), world_(world), options_(options) {}
  /// Collective: makes plan and engine from the parameters of all groups.
  void build(std::vector<std::vector<MeshParameter>> groups, bool matrices,
             const std::vector<bool>& row_moments);

  void take_step() final;
  void load(const SavedState& saved, const StateLoadOptions& options, LoadReport& report) final;
  std::vector<Field> fields(size_t group, const Slot& slot) const final;

  /// The state of a parameter whose shard has this shape.
  virtual std::vector<Field> owned_fields(size_t group, const Slot& slot, const Dims& whole) const = 0;
  /// Before the step, for every parameter in order that is not frozen, on each rank of its mesh.
  virtual void begin_step(size_t group, Slot& slot) = 0;
  /// The step of a parameter that is this rank's alone.
  virtual void step_alone(size_t group, Slot& slot) = 0;
  virtual void fill(size_t group, Slot& slot, const View& update) = 0;
  virtual void orthogonalise(size_t group, Slot& slot, const MatrixUnit& unit, const View& matrix,
                             const View& row_moments) = 0;
  virtual void apply_step(size_t group, Slot& slot, const View& update) = 0;
  const std::vector<MatrixUnit>& units(size_t group, const Slot& slot) const {
    return place_of(group, slot).units;
  }

 private:
  /// A slot's place on the mesh.
  struct Place {
    Dims whole;
    std::shared_ptr<const Layout> layout;        // null: this rank's alone
    std::optional<size_t> tensor;                // in the plan
    std::shared_ptr<const Layout> state_layout;  // null where frozen or alone
    bool in_mesh = true;
    bool owner = true;  // has state
    std::vector<MatrixUnit> units;
  };
  struct SlotPlace {
    size_t group = 0, slot = 0;
  };

  Place& place_of(size_t group, const Slot& slot);
  const Place& place_of(size_t group, const Slot& slot) const;
  Slot& slot_of(size_t tensor, size_t& group);
  static void check_saved_shape(const Slot& slot, const Place& place, std::string_view field,
                                const StateDict::Entry& entry);
  LocalTensor as_tensor(const Place& place, std::string_view field, const View& memory) const;

  void fill_update(size_t tensor, const View& update) final;
  void compute(size_t tensor, size_t unit, const View& matrix, const View& row_moments) final;
  void apply(size_t tensor, const View& update) final;
  View result(size_t tensor) final;
  View row_moments(size_t tensor) final;
  void received(size_t tensor) final;

  World& world_;
  MeshOptions options_;
  std::vector<std::vector<Place>> places_;       // by group and slot
  std::vector<std::optional<SlotPlace>> slots_;  // by tensor of the plan; nothing: this rank does not list it
  bool materialised_ = false;
  std::unique_ptr<MeshEngine> engine_;
};

struct MeshAdamWGroup {
  std::vector<MeshParameter> parameters;
  AdamWOptions options;
};

class MeshAdamW final : public MeshOptimizer {
 public:
  /// Collective over the world. Ranks list the parameters that they have, in one order. On all ranks, what
  /// one throws: AdamW's errors; InvalidArgumentError where memory does not suit a layout, MismatchError
  /// where ranks describe a parameter differently.
  MeshAdamW(World& world, std::vector<MeshAdamWGroup> groups, const MeshOptions& options = {});

 protected:
  std::vector<Field> owned_fields(size_t group, const Slot& slot, const Dims& whole) const override;
  std::vector<std::pair<std::string, Value>> option_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "ns_steps"; }
  void begin_step(size_t group, Slot& slot) override;
  void step_alone(size_t group, Slot& slot) override { apply_step(group, slot, {}); }
  void fill(size_t, Slot&, const View&) override {}
  void orthogonalise(size_t, Slot&, const MatrixUnit&, const View&, const View&) override {}
  void apply_step(size_t group, Slot& slot, const View& update) override;

 private:
  std::vector<AdamWOptions> options_;
  Buffer zeros_;
};

struct MeshMuonGroup {
  std::vector<MeshParameter> parameters;
  MuonOptions options;
};

class MeshMuon final : public MeshOptimizer {
 public:
  /// Sees, and may change, the update of each matrix before it is sent, on the rank that computes it.
  using UpdateHook =
      std::function<void(const OptimizerParameter& parameter, const MatrixUnit& unit, const View& update)>;

  /// As MeshAdamW; and a matrix rule has to fit its parameter's whole shape.
  MeshMuon(World& world, std::vector<MeshMuonGroup> groups, const MeshOptions& options = {});
  void set_update_hook(UpdateHook hook) { hook_ = std::move(hook); }
  const NewtonSchulz& newton_schulz() const { return calculator_.newton_schulz(); }

 protected:
  std::vector<Field> owned_fields(size_t group, const Slot& slot, const Dims& whole) const override;
  std::vector<std::pair<std::string, Value>> option_values(size_t group) const override;
  void set_options(size_t group, const ParamGroup& values, bool check_only) override;
  std::string_view foreign_option() const override { return "betas"; }
  double conversion(size_t group, std::string_view field, const SavedState::Parameter& saved,
                    const StateLoadOptions& options) const override;
  void begin_step(size_t, Slot&) override {}
  void step_alone(size_t group, Slot& slot) override;
  void fill(size_t group, Slot& slot, const View& update) override;
  void orthogonalise(size_t group, Slot& slot, const MatrixUnit& unit, const View& matrix,
                     const View& row_moments) override;
  void apply_step(size_t group, Slot& slot, const View& update) override;

 private:
  void show_units(size_t group, const Slot& slot, const View& update);

  std::vector<MuonOptions> options_;
  MuonCalculator calculator_;
  Buffer update_;
  UpdateHook hook_;
};

}  // namespace spolia
