// How long mappings take to read and to compile.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "spolia/mapping/mapping.h"

namespace spolia {
namespace {

struct Model {
  std::string text;
  std::vector<TensorDescription> sources;
};

/// Ten tensors a layer, and five statements that mention six of them.
Model written_out(int64_t layers) {
  Model model;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (char one = 'a'; one <= 'j'; ++one) {
      model.sources.push_back({fmt::format("layers.{}.{}.weight", layer, one), DType::kFloat32, {64, 32}, 1});
    }
    const std::string from = fmt::format("layers.{}", layer), to = fmt::format("blocks.{}", layer);
    model.text +=
        fmt::format("{0}.a.weight^T -> {1}.a\n{0}.b.weight, {0}.c.weight -> {1}.bc, axis=0\n", from, to);
    model.text += fmt::format("{0}.d.weight -> {1}.d0, {1}.d1, axis=1\n", from, to);
    model.text += fmt::format("{0}.e.weight -> {1}.e\n{0}.f.weight -> _\n", from, to);
  }
  model.sources = sorted_by_name(model.sources);
  return model;
}

/// A mixture of experts, in four statements: fused heads, and experts stacked.
Model with_macros(int64_t layers, int64_t experts) {
  Model model;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (std::string_view one : {"q", "k", "v"}) {
      model.sources.push_back({fmt::format("layers.{}.attn.{}", layer, one),
                               DType::kBFloat16,
                               {one == "q" ? 4096 : 1024, 4096},
                               1});
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      for (std::string_view one : {"w1", "w3"}) {
        model.sources.push_back(
            {fmt::format("layers.{}.experts.{}.{}", layer, expert, one), DType::kBFloat16, {1024, 4096}, 1});
      }
    }
  }
  model.sources = sorted_by_name(model.sources);
  model.text =
      "layers.$LAYER_ID.attn.q^T, layers.$LAYER_ID.attn.k^T, layers.$LAYER_ID.attn.v^T -> "
      "blocks.$LAYER_ID.qkv, fused_qkv, num_heads=32, num_key_value_groups=8\n"
      "layers.$LAYER_ID.experts.$EXPERT_ID.w1^T, layers.$LAYER_ID.experts.$EXPERT_ID.w3^T -> "
      "blocks.$LAYER_ID.experts.$EXPERT_ID, fused_ffn\n"
      "blocks.$LAYER_ID.experts.* -> blocks.$LAYER_ID.stacked, axis=0\n";
  return model;
}

void compile(benchmark::State& state, const Model& model) {
  size_t copies = 0;
  for (auto _ : state) {
    copies = compile_mapping(parse_mapping(model.text), {model.sources, {}, {}}).copies.size();
    benchmark::DoNotOptimize(copies);
  }
  state.counters["tensors"] = static_cast<double>(model.sources.size());
  state.counters["copies"] = static_cast<double>(copies);
}

/// statements: 5 a layer; tensors: 10 a layer.
void BM_CompileStatements(benchmark::State& state) { compile(state, written_out(state.range(0))); }
BENCHMARK(BM_CompileStatements)->Arg(2'000)->Arg(20'000)->Unit(benchmark::kMillisecond);

void BM_CompileMacros(benchmark::State& state) {
  compile(state, with_macros(state.range(0), state.range(1)));
}
BENCHMARK(BM_CompileMacros)->Args({60, 160})->Args({100, 1000})->Unit(benchmark::kMillisecond);

void BM_CompileBackwards(benchmark::State& state) {
  const Model model = written_out(state.range(0));
  const Mapping mapping = parse_mapping(model.text);
  const CompiledMapping made = compile_mapping(mapping, {model.sources, {}, {}});
  std::vector<TensorDescription> there;
  for (const MappedTensor& target : made.targets)
    there.push_back({target.name, target.dtype, target.shape, 1});
  std::vector<TensorDescription> wanted = model.sources;
  std::erase_if(wanted,
                [](const TensorDescription& tensor) { return tensor.name.find(".f.") != std::string::npos; });
  for (auto _ : state) {
    benchmark::DoNotOptimize(compile_mapping(mapping, {there, wanted, {}}, {.reverse = true}).copies.size());
  }
}
BENCHMARK(BM_CompileBackwards)->Arg(20'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
