// A training job on a mesh of replicas and shards, as one of its ranks sees it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model.h"
#include "spolia/comm/world.h"
#include "spolia/optim/chained_optimizer.h"
#include "spolia/state/state_dict.h"

namespace train_lm {

struct JobOptions {
  int64_t replicas = 1, shards = 1;
  uint64_t seed = 1;
  bool normuon = false;
  std::optional<double> qk_clip;  // the largest that attention's logits are to be
};

/// Over all steps.
struct JobCounters {
  double newton_schulz_seconds = 0;  // of a rank, in the mean
  double hidden_share = 1;           // of the broadcasts' time, of a rank, in the mean
  int64_t sent_bytes = 0;            // by all ranks
};

/// Parameters are sharded by rows over the shards of a replica, the same on all replicas. The ranks of a step
/// each take some of its sequences, on gathered parameters; derivatives are summed over all ranks.
class Job {
 public:
  /// Collective over the world, which has replicas * shards ranks; InvalidArgumentError where it has not.
  Job(spolia::World& world, const ModelShape& shape, const JobOptions& options);

  /// One step on `batch` sequences of the text, which follow from the step's number; the mean loss before it.
  double step(std::span<const uint8_t> text, int64_t batch, int64_t number);

  /// What this rank has after so many steps: views of the job's own memory.
  spolia::StateDict state(int64_t steps);
  /// Takes over the latest checkpoint of a run, whatever mesh that was on; the number of steps it was saved
  /// after.
  int64_t load(const std::filesystem::path& run);

  /// Collective over the world.
  JobCounters counters() const;

 private:
  struct Parameter {
    ParameterShape shape;
    std::shared_ptr<const spolia::Layout> layout;
    std::vector<float> values, gradient;  // this rank's rows
    int64_t first = 0;                    // element of the whole
  };

  std::vector<std::vector<float>> gather_parameters();
  void clip_logits(std::vector<float>& largest);
  void add_model(spolia::StateDict& state);

  spolia::World& world_;
  const ModelShape shape_;
  const std::optional<double> qk_clip_;
  std::vector<Parameter> parameters_;
  std::shared_ptr<spolia::Group> row_;  // the shards of this rank's replica
  std::unique_ptr<spolia::ChainedOptimizer> optimizer_;
};

}  // namespace train_lm
