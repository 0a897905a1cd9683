// Jobs for tests of saving and loading: the same tensors, shared by any number of ranks in every kind of way.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/layout/layout_text.h"

namespace spolia {

/// What every job saves and loads, whatever its ranks: shapes of every sort.
inline std::vector<WantedTensor> contents() {
  std::vector<WantedTensor> tensors;
  auto add = [&](std::string name, DType dtype, Dims shape) {
    tensors.push_back({std::move(name), dtype, std::move(shape), nullptr, {}, {}});
  };
  add("column", DType::kInt16, {16, 1});
  add("cube", DType::kInt64, {6, 4, 5});
  add("even", DType::kFloat32, {24, 16});
  add("few", DType::kFloat64, {2, 3});
  add("matrix", DType::kBFloat16, {13, 7});
  add("nibbles", DType::kFloat4E2M1FNx2, {9});
  add("none", DType::kFloat32, {0, 4});
  add("scalar", DType::kFloat32, {});
  add("vector", DType::kUInt8, {37});
  add("wide", DType::kComplex128, {3, 65});
  return tensors;
}

/// Elements finer than a byte, which safetensors alone has: never cut, never in DCP.
inline std::vector<WantedTensor> fine_contents() {
  return {{"fine.four", DType::kFloat4E2M1FN, {2, 3}, nullptr, {}, {}},
          {"fine.six", DType::kFloat6E3M2FN, {4, 5}, nullptr, {}, {}}};
}

/// How a job's ranks share a tensor, by name.
struct Kind {
  std::string name;
  std::function<void(WantedTensor& tensor, int ranks)> apply;
};

/// The layout, where it suits the tensor's shape; else the tensor is replicated.
inline void lay_out(WantedTensor& tensor, int ranks, const std::string& text) {
  try {
    auto layout = std::make_shared<const Layout>(parse_layout(text));
    for (int64_t rank : layout->mesh().ranks()) layout->shard(tensor.shape, rank);
    tensor.layout = std::move(layout);
  } catch (const Error&) {
    tensor.layout = std::make_shared<const Layout>(parse_layout(fmt::format("[replicate] over {}", ranks)));
  }
}

inline std::string grid_over(int ranks) {
  return ranks % 2 == 0 ? fmt::format("2x{}", ranks / 2) : fmt::format("1x{}", ranks);
}

/// 12 units, none of them on every other rank.
inline std::string ragged_units(int ranks) {
  const int with_units = (ranks + 1) / 2;
  std::vector<int64_t> units;
  for (int r = 0; r < ranks; ++r) units.push_back(r % 2 == 1 ? 0 : 12 / with_units);
  units[0] += 12 % with_units;
  return list_text(units);
}

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = [] {
    std::vector<Kind> kinds = {{"plain", [](WantedTensor&, int) {}}};
    auto line = [&](std::string placement) {
      kinds.push_back({placement, [placement](WantedTensor& tensor, int ranks) {
                         lay_out(tensor, ranks, fmt::format("[{}] over {}", placement, ranks));
                       }});
    };
    auto grid = [&](std::string placements) {
      kinds.push_back({placements, [placements](WantedTensor& tensor, int ranks) {
                         lay_out(tensor, ranks, fmt::format("[{}] over {}", placements, grid_over(ranks)));
                       }});
    };
    line("replicate");
    line("shard(0)");
    line("shard(-1)");
    line("shard(0, balanced)");
    line("strided(0, 3)");
    line("strided(-1, 2, chunked)");
    grid("replicate, shard(0)");
    grid("shard(-1), replicate");
    grid("shard(0), shard(0)");
    grid("strided(0, 2), shard(0)");
    grid("shard(-1), shard(0)");
    grid("replicate, replicate");
    kinds.push_back({"ragged", [](WantedTensor& tensor, int ranks) {
                       const std::string dims = tensor.shape.size() > 1 ? "[0, 1]" : "0";
                       lay_out(tensor, ranks,
                               fmt::format("[ragged({}, {})] over {}", dims, ragged_units(ranks), ranks));
                     }});
    // Half of the ranks, from behind; the others have nothing of it.
    kinds.push_back({"sub-mesh", [](WantedTensor& tensor, int ranks) {
                       std::vector<int64_t> some;
                       for (int r = ranks - 1; r >= ranks / 2; --r) some.push_back(r);
                       lay_out(tensor, ranks,
                               fmt::format("[shard(0)] over {} on {}", some.size(), list_text(some)));
                     }});
    // The first half of the tensors is the first half of the ranks', and the others do not know of it.
    kinds.push_back({"stages", [](WantedTensor& tensor, int ranks) {
                       if (ranks < 2) return;
                       const bool first = tensor.name < "few";
                       for (int r = 0; r < ranks; ++r) {
                         if ((r < ranks / 2) == first) tensor.on_ranks.push_back(r);
                       }
                       lay_out(tensor, ranks,
                               fmt::format("[shard(0)] over {} on {}", tensor.on_ranks.size(),
                                           list_text(tensor.on_ranks)));
                       if (std::ssize(tensor.layout->mesh().ranks()) == ranks)
                         tensor.layout = nullptr;  // it did not suit
                     }});
    kinds.push_back({"tied", [](WantedTensor& tensor, int ranks) {
                       if (ranks < 4) return;
                       tensor.on_ranks = {0, 1, ranks - 2, ranks - 1};
                       lay_out(
                           tensor, ranks,
                           fmt::format("[replicate, shard(0)] over 2x2 on {}", list_text(tensor.on_ranks)));
                       if (tensor.layout->mesh().ranks().size() != 4) tensor.layout = nullptr;
                     }});
    // A box for each rank: a band of rows; the last ranks may have none.
    kinds.push_back({"boxes", [](WantedTensor& tensor, int ranks) {
                       if (tensor.shape.empty()) return;
                       const int64_t band = (tensor.shape[0] + ranks - 1) / ranks;
                       for (int r = 0; r < ranks; ++r) {
                         Box box = whole(tensor.shape);
                         box.offsets[0] = std::min(tensor.shape[0], band * r);
                         box.sizes[0] = std::min(tensor.shape[0] - box.offsets[0], band);
                         tensor.boxes.push_back(box);
                       }
                     }});
    return kinds;
  }();
  return all;
}

/// A job of so many ranks, which shares its tensors in one way.
struct Job {
  int ranks = 1;
  std::vector<WantedTensor> tensors;
};

inline Job job_of(const Kind& kind, int ranks, bool with_fine) {
  Job job{ranks, contents()};
  for (WantedTensor& tensor : job.tensors) kind.apply(tensor, ranks);
  if (with_fine) {
    for (WantedTensor& tensor : fine_contents()) job.tensors.push_back(tensor);
  }
  return job;
}

}  // namespace spolia
