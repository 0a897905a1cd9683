#include "job.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "spolia/base/error.h"
#include "spolia/checkpoint/checkpoints.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/optim/mesh_state.h"
#include "spolia/optim/muon_adamw.h"

namespace train_lm {

using namespace spolia;

namespace {

std::byte* bytes_of(std::vector<float>& values) { return std::as_writable_bytes(std::span(values)).data(); }

View flat_view(std::vector<float>& values) {
  const int64_t shape[] = {std::ssize(values)};
  return dense_view(bytes_of(values), DType::kFloat32, shape);
}

/// A number that looks random, and follows from three.
uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Job::Job(World& world, const ModelShape& shape, const JobOptions& options)
    : world_(world), shape_(shape), qk_clip_(options.qk_clip) {
  const int64_t replicas = options.replicas, shards = options.shards;
  if (replicas * shards != world.size()) {
    throw InvalidArgumentError("a mesh of {} x {} is not {} ranks", replicas, shards, world.size());
  }
  const DeviceMesh mesh({replicas, shards}, {"replica", "shard"});
  const auto layout =
      std::make_shared<const Layout>(mesh, std::vector<Placement>{Replicate{}, Shard{0, Split::kCeil}});
  for (int64_t replica = 0; replica < replicas; ++replica) {
    const std::vector<int64_t> ranks = mesh.ranks_along(1, replica * shards);
    if (auto group = world.create(ranks)) row_ = std::move(group);
  }

  const std::vector<std::vector<float>> first = first_values(shape, options.seed);
  const std::vector<ParameterShape> all = parameter_shapes(shape);
  for (size_t p = 0; p < all.size(); ++p) {
    Parameter& own = parameters_.emplace_back();
    own.shape = all[p];
    own.layout = layout;
    const RankShard shard = layout->shard(all[p].shape, world.rank());
    if (!shard.boxes.empty()) {
      own.first = shard.boxes[0].global.offsets[0] * (numel(all[p].shape) / all[p].shape[0]);
    }
    const auto begin = first[p].begin() + own.first;
    own.values.assign(begin, begin + numel(shard.local_shape));
    own.gradient.resize(own.values.size());
  }

  std::vector<MeshParameter> parameters;
  for (Parameter& own : parameters_) {
    const Dims local = layout->shard(own.shape.shape, world.rank()).local_shape;
    parameters.push_back({{.name = own.shape.name,
                           .value = dense_view(bytes_of(own.values), DType::kFloat32, local),
                           .gradient = dense_view(bytes_of(own.gradient), DType::kFloat32, local)},
                          own.shape.shape,
                          layout});
    if (own.shape.parts > 1) {
      const int64_t rows = own.shape.shape[0] / own.shape.parts;
      parameters.back().parameter.matrix.parts =
          stacked_rows(std::vector<int64_t>(static_cast<size_t>(own.shape.parts), rows));
    }
  }
  MuonAdamWOptions chosen;
  chosen.muon = {
      .lr = .02, .weight_decay = .01, .newton_schulz = {.precision = NewtonSchulzPrecision::kInput}};
  if (options.normuon) chosen.muon.normuon.emplace();
  chosen.adamw = {.lr = 3e-3, .weight_decay = .01};
  optimizer_ = make_muon_adamw(world, std::move(parameters), chosen);
}

std::vector<std::vector<float>> Job::gather_parameters() {
  std::vector<std::vector<float>> whole;
  std::vector<Pending> pending;
  for (Parameter& own : parameters_) {
    whole.emplace_back(static_cast<size_t>(numel(own.shape.shape)));
    std::vector<int64_t> counts;
    for (int64_t rank : row_->ranks()) {
      counts.push_back(numel(own.layout->shard(own.shape.shape, rank).local_shape));
    }
    pending.push_back(row_->all_gather(flat_view(own.values), counts, flat_view(whole.back())));
  }
  for (Pending& one : pending) one.wait();
  return whole;
}

double Job::step(std::span<const uint8_t> text, int64_t batch, int64_t number) {
  const std::vector<std::vector<float>> parameters = gather_parameters();
  std::vector<std::vector<float>> gradients;
  for (const std::vector<float>& parameter : parameters) gradients.emplace_back(parameter.size());
  double loss = 0;
  std::vector<float> largest(static_cast<size_t>(shape_.layers * shape_.heads),
                             std::numeric_limits<float>::lowest());
  for (int64_t i = world_.rank(); i < batch; i += world_.size()) {
    const uint64_t starts = text.size() - static_cast<size_t>(shape_.context);
    const uint64_t start = mixed(static_cast<uint64_t>(number), static_cast<uint64_t>(i)) % starts;
    loss += add_loss_and_gradients(
        shape_, parameters, text.subspan(start, static_cast<size_t>(shape_.context + 1)), gradients, largest);
  }

  // Sums are taken in the order of the ranks, so that a mesh gives the same bits each time.
  const View loss_view = dense_view(std::as_writable_bytes(std::span(&loss, 1)).data(), DType::kFloat64, {});
  std::vector<Pending> pending;
  pending.push_back(world_.all()->all_reduce(loss_view, loss_view));
  for (std::vector<float>& gradient : gradients) {
    pending.push_back(world_.all()->all_reduce(flat_view(gradient), flat_view(gradient)));
  }
  for (Pending& one : pending) one.wait();
  const auto tokens = static_cast<double>(batch * shape_.context);
  for (size_t p = 0; p < parameters_.size(); ++p) {
    Parameter& own = parameters_[p];
    for (size_t i = 0; i < own.gradient.size(); ++i) {
      own.gradient[i] = static_cast<float>(gradients[p][static_cast<size_t>(own.first) + i] / tokens);
    }
  }
  optimizer_->step();
  if (qk_clip_) clip_logits(largest);
  return loss / tokens;
}

/// Makes queries and keys smaller where the largest logits of this step were too large. Replicas compute the
/// same from the same.
void Job::clip_logits(std::vector<float>& largest) {
  world_.all()->all_reduce(flat_view(largest), flat_view(largest), ReduceOp::kMax).wait();
  const std::vector<double> factors =
      qk_clip_factors(std::vector<double>(largest.begin(), largest.end()), 1, *qk_clip_);
  const int64_t width = shape_.width, each = width / shape_.heads;
  for (size_t i = 0; i < factors.size(); ++i) {
    const auto layer = static_cast<int64_t>(i) / shape_.heads, head = static_cast<int64_t>(i) % shape_.heads;
    Parameter& qkv = parameters_[qkv_index(layer)];
    const int64_t first = qkv.first / width, rows = std::ssize(qkv.values) / width;  // of this rank
    const View local = dense_view(bytes_of(qkv.values), DType::kFloat32, Dims{rows, width});
    for (int64_t begin : {head * each, width + head * each}) {  // of the head's queries, and of its keys
      const int64_t from = std::clamp<int64_t>(begin - first, 0, rows),
                    to = std::clamp<int64_t>(begin + each - first, 0, rows);
      scale_rows(local, {{from, to}}, std::sqrt(factors[i]));
    }
  }
}

void Job::add_model(StateDict& state) {
  for (Parameter& own : parameters_) {
    const Dims local = own.layout->shard(own.shape.shape, world_.rank()).local_shape;
    state.add("model." + own.shape.name,
              sharded_tensor(dense_view(bytes_of(own.values), DType::kFloat32, local), own.shape.shape,
                             own.layout));
  }
}

StateDict Job::state(int64_t steps) {
  StateDict state;
  add_model(state);
  state.add("optimizer", optimizer_->state_dict());
  state.add("steps", Value(steps));
  return state;
}

int64_t Job::load(const std::filesystem::path& run) {
  const Checkpoints checkpoints(run);
  Group& all = *world_.all();
  int64_t latest = -1;
  agree(all, "finding the checkpoint", [&] {
    const auto found = world_.rank() == 0 ? checkpoints.latest() : std::optional<int64_t>(0);
    if (!found) throw NotFoundError("{} holds no checkpoint", run.string());
    latest = *found;
  });
  latest = all_gather_number(all, latest)[0];
  const auto source = open_together(all, posix_store(), checkpoints.folder_of(latest));

  load_optimizer(world_, *source, *optimizer_, {.key = "optimizer"});
  StateDict model;
  add_model(model);
  model.add("steps", Value());
  spolia::load(world_, *source, model);
  return *model.find("steps")->value()->get_if<int64_t>();
}

JobCounters Job::counters() const {
  const MeshCounters &muon = optimizer_->find<MeshMuon>()->counters(),
                     &adamw = optimizer_->find<MeshAdamW>()->counters();
  const auto sum = [&](double number, double unit) {
    double all = 0;
    for (int64_t n : all_gather_number(*world_.all(), std::llround(number / unit))) {
      all += static_cast<double>(n) * unit;
    }
    return all;
  };
  const auto ranks = static_cast<double>(world_.size());
  const double sent = sum(muon.broadcast_seconds + adamw.broadcast_seconds, 1e-6),
               waited = sum(muon.broadcast_wait_seconds + adamw.broadcast_wait_seconds, 1e-6),
               bytes = sum(static_cast<double>(muon.exchanged_bytes + muon.received_bytes +
                                               adamw.exchanged_bytes + adamw.received_bytes),
                           1);
  return {.newton_schulz_seconds = sum(muon.compute_seconds, 1e-6) / ranks,
          .hidden_share = sent > 0 ? 1 - waited / sent : 1,
          .sent_bytes = std::llround(bytes)};
}

}  // namespace train_lm
