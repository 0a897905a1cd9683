// A model that ranks share, and what one rank makes of it: for tests of the optimizers over meshes.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/comm/world.h"
#include "spolia/layout/layout_text.h"
#include "spolia/optim/chained_optimizer.h"
#include "spolia/optim/mesh_optimizer.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_reference.h"
#include "spolia/tensor/copy.h"

namespace spolia {

/// A whole tensor's shard, or back: element by element, from the boxes of the layout.
inline Elements shard_of(const Elements& whole, const Layout& layout, int64_t rank) {
  const RankShard shard = layout.shard(whole.shape, rank);
  Elements local(whole.dtype, shard.local_shape);
  const Dims strides = row_major_strides(whole.shape);
  const int64_t width = element_bytes(whole.dtype);
  for (const LocalBox& box : shard.boxes) {
    Dims from = strides, to = box.local_strides;
    int64_t at = 0;
    for (size_t d = 0; d < from.size(); ++d) {
      at += box.global.offsets[d] * strides[d];
      from[d] *= width;
      to[d] *= width;
    }
    copy_strided(box.global.sizes, width, local.bytes.data() + box.local_offset * width, to,
                 whole.bytes.data() + at * width, from);
  }
  return local;
}

/// Muon or AdamW on whole tensors in float64 and plain loops, from the formulas.
struct ReferenceOptimizer {
  std::vector<double> parameter, momentum, square;
  Dims shape;
  std::vector<MatrixUnit> units;
  int steps = 0;

  ReferenceOptimizer(const std::vector<double>& values, Dims whole)
      : parameter(values), momentum(values.size()), square(values.size()), shape(std::move(whole)) {}

  void muon(const MuonOptions& options, const std::vector<double>& gradient) {
    const double mu = options.momentum, add = options.momentum_rule == MomentumRule::kSum ? 1 : 1 - mu;
    std::vector<double> update(gradient.size());
    for (size_t i = 0; i < gradient.size(); ++i) {
      momentum[i] = mu * momentum[i] + add * gradient[i];
      update[i] = options.nesterov ? add * gradient[i] + mu * momentum[i] : momentum[i];
    }
    for (const MatrixUnit& unit : units) {
      ReferenceMatrix matrix(unit.rows, unit.columns);
      std::vector<size_t> places;
      for (const Box& box : unit.boxes) for_each_element(box, [&](size_t at) { places.push_back(at); });
      for (size_t i = 0; i < places.size(); ++i) matrix.values[i] = update[places[i]];
      matrix = reference_newton_schulz(options.newton_schulz, matrix);
      const double scale = muon_scale(options.scale, unit.rows, unit.columns);
      for (size_t i = 0; i < places.size(); ++i) update[places[i]] = scale * matrix.values[i];
    }
    for (size_t i = 0; i < parameter.size(); ++i)
      parameter[i] = parameter[i] * (1 - options.lr * options.weight_decay) - options.lr * update[i];
  }

  void adamw(const AdamWOptions& options, const std::vector<double>& gradient) {
    ++steps;
    for (size_t i = 0; i < parameter.size(); ++i) {
      const double g = gradient[i];
      parameter[i] *= 1 - options.lr * options.weight_decay;
      momentum[i] = options.beta1 * momentum[i] + (1 - options.beta1) * g;
      square[i] = options.beta2 * square[i] + (1 - options.beta2) * g * g;
      parameter[i] -= options.lr / (1 - std::pow(options.beta1, steps)) * momentum[i] /
                      (std::sqrt(square[i] / (1 - std::pow(options.beta2, steps))) + options.epsilon);
    }
  }

  template <class Body>
  void for_each_element(const Box& box, Body body) const {
    const Dims whole_strides = row_major_strides(shape), strides = row_major_strides(box.sizes);
    for (int64_t i = 0; i < box.numel(); ++i) {
      int64_t at = 0;
      for (size_t d = 0; d < shape.size(); ++d)
        at += (box.offsets[d] + i / strides[d] % box.sizes[d]) * whole_strides[d];
      body(static_cast<size_t>(at));
    }
  }
};

/// Parameters with their layouts, and gradients that follow from name and step alone.
struct MeshCase {
  struct Tensor {
    std::string name;
    std::shared_ptr<const Layout> layout;
    Elements initial;
    MatrixRule rule;
    bool frozen = false;
    bool adamw = false;
  };
  std::vector<Tensor> tensors;
  MuonOptions muon{.lr = .02, .newton_schulz = {.precision = NewtonSchulzPrecision::kInput}};
  AdamWOptions adamw{.lr = .01};
  MeshOptions options;
  LaunchOptions launched;
  /// Whether a rank has a gradient in a step. Where one of the owning row has none, all have zeros: the
  /// reference takes zeros for those that `missing_everywhere` names.
  std::function<bool(const std::string& name, int step, int64_t rank)> missing;

  Tensor& add(std::string name, Dims shape, std::string_view layout, MatrixRule rule = {},
              DType dtype = DType::kFloat32) {
    const auto seed = 17 * tensors.size() + 3;
    tensors.push_back({std::move(name), std::make_shared<const Layout>(parse_layout(layout)),
                       Elements(dtype, shape, random_values(static_cast<size_t>(numel(shape)), seed)), rule,
                       false, false});
    return tensors.back();
  }

  static Elements gradient(const Tensor& tensor, int step) {
    const auto seed = std::hash<std::string>()(tensor.name) % 1000 + static_cast<size_t>(step) * 1009;
    return Elements(tensor.initial.dtype, tensor.initial.shape,
                    random_values(tensor.initial.values().size(), seed));
  }

  /// One rank's part.
  struct Rank {
    std::map<std::string, Elements> values, gradients;
    std::unique_ptr<ChainedOptimizer> optimizer;
    MeshMuon* muon = nullptr;
    MeshAdamW* adamw = nullptr;
  };
  Rank make(World& world) const {
    Rank rank;
    MeshMuonGroup muons{{}, muon};
    MeshAdamWGroup adamws{{}, adamw};
    for (const Tensor& tensor : tensors) {
      Elements& value =
          rank.values.emplace(tensor.name, shard_of(tensor.initial, *tensor.layout, world.rank()))
              .first->second;
      MeshParameter parameter{{tensor.name, value.view(), {}, {}, tensor.frozen, tensor.rule},
                              tensor.initial.shape,
                              tensor.layout};
      (tensor.adamw ? adamws.parameters : muons.parameters).push_back(std::move(parameter));
    }
    std::vector<std::unique_ptr<Optimizer>> children;
    children.push_back(std::make_unique<MeshMuon>(world, std::vector{std::move(muons)}, options));
    children.push_back(std::make_unique<MeshAdamW>(world, std::vector{std::move(adamws)}, options));
    rank.optimizer = std::make_unique<ChainedOptimizer>(std::move(children));
    rank.muon = rank.optimizer->find<MeshMuon>();
    rank.adamw = rank.optimizer->find<MeshAdamW>();
    return rank;
  }
  void step(Rank& rank, World& world, int step) const {
    rank.gradients.clear();
    for (const Tensor& tensor : tensors) {
      if (missing && missing(tensor.name, step, world.rank())) {
        rank.optimizer->set_gradient(tensor.name, {});
        continue;
      }
      Elements& local =
          rank.gradients.emplace(tensor.name, shard_of(gradient(tensor, step), *tensor.layout, world.rank()))
              .first->second;
      rank.optimizer->set_gradient(tensor.name, local.view());
    }
    rank.optimizer->step();
  }

  /// The whole parameters after so many steps in float64 on one rank.
  std::map<std::string, std::vector<double>> reference(int steps) const {
    std::map<std::string, std::vector<double>> all;
    for (const Tensor& tensor : tensors) {
      ReferenceOptimizer optimizer(tensor.initial.values(), tensor.initial.shape);
      if (!tensor.adamw) optimizer.units = matrix_units(tensor.rule, tensor.initial.shape);
      for (int step = 1; step <= steps && !tensor.frozen; ++step) {
        std::vector<double> values = gradient(tensor, step).values();
        if (missing && missing(tensor.name, step, -1)) std::fill(values.begin(), values.end(), 0);
        if (tensor.adamw) {
          optimizer.adamw(adamw, values);
        } else {
          optimizer.muon(muon, values);
        }
      }
      all.emplace(tensor.name, optimizer.parameter);
    }
    return all;
  }

  /// Every rank's shards after the steps are those of the reference, and replicas have the same bits.
  void expect_steps_of_one_rank(int ranks, int steps, double tolerance = 2e-5,
                                const std::function<void(Rank&, World&)>& after = {}) const {
    const auto expected = reference(steps);
    std::mutex mutex;
    launch(
        ranks,
        [&](World& world) {
          Rank rank = make(world);
          for (int step = 1; step <= steps; ++step) this->step(rank, world, step);
          rank.muon->require_equal_replicas();
          rank.adamw->require_equal_replicas();
          {
            std::lock_guard lock(mutex);
            for (const Tensor& tensor : tensors) {
              const Elements& local = rank.values.at(tensor.name);
              const Elements wanted =
                  shard_of(Elements(DType::kFloat64, tensor.initial.shape, expected.at(tensor.name)),
                           *tensor.layout, world.rank());
              EXPECT_LT(distance(local.values(), wanted.values()), tolerance)
                  << tensor.name << " " << shape_text(tensor.initial.shape) << " " << tensor.layout->text()
                  << " on rank " << world.rank() << "\n"
                  << rank.muon->plan().text();
            }
          }
          if (after) after(rank, world);
        },
        launched);
  }
};

}  // namespace spolia
